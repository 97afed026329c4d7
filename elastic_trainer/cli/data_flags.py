"""The flags of data.py, a set for each of its commands (no TensorFlow here)."""

from __future__ import annotations

import argparse
from pathlib import Path

from elastic_trainer.cli.flags import add_flag, main_parser, profiler_parser
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.options import OneOf, existing_file, file_to_write, stem_to_write
from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import MAIN_FLAGS

DATA_COMMANDS = ("show", "prepare", "pack", "unpack")


def data_parser() -> OneLineParser:
    """The flags of data.py; `command` is one of `DATA_COMMANDS`."""
    parser = OneLineParser(
        [main_parser, profiler_parser], prog="data.py", description="Look at, prepare and carry data sets."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(DATA_COMMANDS))
    show = commands.add_parser("show", help="images of each class as a table and a picture")
    for name in ("dataset_name", "data_dir", "test_fraction"):
        add_flag(show, MAIN_FLAGS[name])
    show.add_argument(
        "--output", type=stem_to_write, metavar="STEM", help="without _train.png; default: figures/<name>"
    )
    from_tfds = [name for name in DATASETS if DATASETS[name].is_tfds]
    prepare = commands.add_parser("prepare", help="download a data set and prepare it")
    _add_data_flags(prepare, from_tfds)
    pack = commands.add_parser("pack", help="put a data set into one file")
    _add_data_flags(pack, [*from_tfds, *(name for name in DATASETS if DATASETS[name].is_folder)])
    pack.add_argument("--output", type=file_to_write, metavar="FILE", help="default: <name>.tar")
    unpack = commands.add_parser("unpack", help="take a data set out of the file and check it")
    unpack.add_argument("archive", type=existing_file, metavar="FILE")
    unpack.add_argument("--data_dir", type=Path, required=True, metavar="DIR", help="folder it is put into")
    return parser


def _add_data_flags(parser: argparse.ArgumentParser, names: list[str]) -> None:
    changed = {"type": OneOf(names), "default": None, "required": True, "help": ", ".join(names)}
    add_flag(parser, MAIN_FLAGS["dataset_name"], **changed)
    add_flag(parser, MAIN_FLAGS["data_dir"])
