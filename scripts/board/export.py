#!/usr/bin/env python
"""Export for a board, or plan, with several values of rho or with times that the board measured.

Words after -- are those of main.py, with --export train_tflite or train_graph, or with --plan.

    python scripts/board/export.py --rho 0.3,0.7 -- --dataset_name image_folder --data_dir photos --export train_tflite
    python scripts/board/export.py --times times.json -- --dataset_name image_folder --data_dir photos --plan
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import main
import utils
from elastic_trainer.cli.checks import is_elastic, is_for_board
from elastic_trainer.cli.commands import parse_main
from elastic_trainer.settings import Evaluation, Settings
from elastic_trainer.settings.flags import OneLineParser, existing_file, shares
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import load_tensorflow


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """The flags of this script, and those of main.py. Raises `UserError` for those that do not suit each other."""
    split = words.index("--") if "--" in words else len(words)
    as_written = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="export.py", description=__doc__, formatter_class=as_written)
    text = "further values of --rho, between whose selections the board chooses"
    parser.add_argument("--rho", type=shares, default=(), metavar="SHARES", help=text)
    text = "the times.json that a board measured; rho and the plan are then those of the board"
    parser.add_argument("--times", type=existing_file, metavar="FILE", help=text)
    args, settings = parser.parse_args(words[:split]), parse_main(words[split + 1 :])
    if isinstance(settings, Evaluation) or not (settings.plan or is_for_board(settings)):
        raise UserError("--export: give train_tflite or train_graph after --, or --plan")
    if args.rho and settings.plan:
        raise UserError("--rho: is for an export; with --plan, give one after --")
    for name in ("rho", "times"):
        if getattr(args, name) and not is_elastic(settings):
            raise UserError(f"--{name}: does not work with --train_type {settings.train_type}, which has no rho")
    if args.times and settings.memory is not None:
        raise UserError("--memory: cannot be combined with --times; what a board's memory takes is not known")
    return args, settings


def export() -> None:
    args, settings = parse(sys.argv[1:])
    load_tensorflow()
    from elastic_trainer.board.export import board_table

    retimed = partial(board_table, args.times) if args.times else None
    main.train_run(settings, rhos=args.rho, retimed=retimed)


if __name__ == "__main__":
    utils.run_cli(export)
