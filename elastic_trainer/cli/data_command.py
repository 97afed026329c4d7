"""The command line of data.py (no TensorFlow here)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.cli.commands import check_data_options
from elastic_trainer.cli.flags import add_flag, main_parser, profiler_parser
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.options import OneOf, stem_to_write
from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import MAIN_FLAGS


def parse_data(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of data.py. `command` is show or prepare; the other options depend on it."""
    siblings = [main_parser, profiler_parser]
    parser = OneLineParser(siblings, prog="data.py", description="Look at data sets, and prepare them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|prepare")
    show = commands.add_parser("show", siblings=siblings, help="show the images of each class as a table and a picture")
    for name in ("dataset_name", "data_dir", "test_fraction"):
        add_flag(show, MAIN_FLAGS[name])
    help_text = "path of the pictures without _train.png; default: figures/<name>"
    show.add_argument("--output", type=stem_to_write, metavar="STEM", help=help_text)
    prepare = commands.add_parser("prepare", siblings=siblings, help="download a data set and prepare it")
    names = [name for name in DATASETS if DATASETS[name].is_tfds]
    add_flag(prepare, MAIN_FLAGS["dataset_name"], type=OneOf(names), default=None, required=True, help=", ".join(names))
    add_flag(prepare, MAIN_FLAGS["data_dir"])
    args = parser.parse_args(arguments)
    if args.command == "show":
        check_data_options(args)
        args.output = args.output or Path("figures") / args.dataset_name
    return args
