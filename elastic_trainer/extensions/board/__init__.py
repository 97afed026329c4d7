"""A board trains in LiteRT or an older TensorFlow: the folder for it, `--export train_tflite` or `train_graph`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.errors import UserError
from elastic_trainer.options import flag, flags_of, shares
from elastic_trainer.registry import CHECKS, EXPORTERS, FLAGS, RETIMED, SCHEMES, Exporter, Lazy

EXPORTS = ("train_tflite", "train_graph")
EXCLUDED = (  # flags that the export excludes, and why
    ("deadline", "give it to board_train.py"),
    ("max_steps", "give --num_epochs"),
    ("resume", "nothing is trained here; leave it out"),
)


# fmt: off
@dataclass(frozen=True)
class BoardFlags:
    """The flags of main.py that boards add."""

    export_rho: tuple[float, ...] | None = flag(None, "Output", shares, "SHARES", is_free=True, help=(
        "with an export for a board: further values of `--rho`, such as `0.3,0.7`, between whose selections the "
        "board chooses"))
    board_times: Path | None = flag(None, "Output", Path, "FILE", is_free=True, help=(
        "with `--plan` or an export for a board: the times.json that a board measured; rho and the plan are then "
        "those [of the board](small_boards.md#times-of-the-board)"))
# fmt: on


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that a board excludes, or that its flags need."""
    is_exported, is_elastic = args.export in EXPORTS, SCHEMES[args.train_type].is_elastic
    if args.export_rho and not is_exported:
        raise UserError(f"--export_rho: works only with --export {' or '.join(EXPORTS)}; leave it out")
    if args.board_times and not args.plan and not is_exported:
        raise UserError(f"--board_times: works only with --plan or --export {' or '.join(EXPORTS)}; leave it out")
    if args.board_times and not is_elastic:
        raise UserError(f"--board_times: does not work with --train_type {args.train_type}, which has no time budget")
    if args.board_times and args.memory is not None:
        raise UserError("--memory: cannot be combined with --board_times; what a board's memory takes is not known")
    if args.board_times and not args.board_times.is_file():
        raise UserError(f"--board_times {args.board_times}: there is no such file; give the times.json of a board")
    for name, why in EXCLUDED if is_exported else ():
        if getattr(args, name):
            raise UserError(f"--{name}: cannot be combined with --export {args.export}; {why}")
    if is_exported and args.augment == "flip_rotate":
        raise UserError(
            f"--augment flip_rotate: cannot be combined with --export {args.export}; boards have none, flip"
        )
    if args.export_rho and not is_elastic:
        raise UserError(
            f"--export_rho: does not work with --train_type {args.train_type}, which has no rho; leave it out"
        )


FLAGS.update(flags_of(BoardFlags))
CHECKS.append(check)
for name, written in zip(EXPORTS, ("train.tflite", "train.pb"), strict=True):
    EXPORTERS[name] = Exporter(
        Lazy("elastic_trainer.extensions.board.export:export_for_board"),
        written,
        is_untrained=True,
        check=Lazy("elastic_trainer.extensions.board.export:check_export"),
    )
RETIMED["board_times"] = Lazy("elastic_trainer.extensions.board.export:board_table")
