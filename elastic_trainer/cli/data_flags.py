"""The flags of data.py, a set for each of its commands (no TensorFlow here)."""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.cli.flags import add_data_flags, add_test_fraction, main_parser, profiler_parser
from elastic_trainer.cli.parser import OneLineParser, existing_file, file_to_write, stem_to_write
from elastic_trainer.datasets.names import TFDS_NAMES

DATA_COMMANDS = ("show", "prepare", "pack", "unpack")


def data_parser() -> OneLineParser:
    """The flags of data.py; `command` is one of `DATA_COMMANDS`."""
    parser = OneLineParser(
        [main_parser, profiler_parser], prog="data.py", description="Look at, prepare and carry data sets."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(DATA_COMMANDS))
    show = commands.add_parser("show", help="images of each class as a table and a picture")
    add_data_flags(show)
    add_test_fraction(show)
    show.add_argument(
        "--output", type=stem_to_write, metavar="STEM", help="without _train.png; default: figures/<name>"
    )
    prepare = commands.add_parser("prepare", help="download a data set and prepare it")
    add_data_flags(prepare, TFDS_NAMES, None)
    pack = commands.add_parser("pack", help="put a data set into one file")
    add_data_flags(pack, (*TFDS_NAMES, "image_folder"), None)
    pack.add_argument("--output", type=file_to_write, metavar="FILE", help="default: <name>.tar")
    unpack = commands.add_parser("unpack", help="take a data set out of the file and check it")
    unpack.add_argument("archive", type=existing_file, metavar="FILE")
    unpack.add_argument("--data_dir", type=Path, required=True, metavar="DIR", help="folder it is put into")
    return parser
