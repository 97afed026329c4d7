#!/usr/bin/env python
"""Draw the run of a fleet: accuracy by round and by wall time, and each board's selection, times and bytes.

    python scripts/figures/plot_fleet.py logs/fleet/server --output figures/fleet

It writes a PDF and a PNG, and prints the same as two tables. Everything is read from the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import plotting
from plotting import PAGE, STYLE

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.extensions.fleet.records import BOARDS
from elastic_trainer.files import reading, save_figure
from elastic_trainer.options import stem_to_write
from elastic_trainer.runs.reader import METRICS, read_rows

Rows = Sequence[dict[str, str]]
LOOKS = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "v"), ("#e69f00", "D"), ("#56b4e9", "P"))


def read_fleet(folder: Path) -> tuple[Rows, Rows]:
    """The rows of metrics.csv and boards.csv. Raises `UserError` if `folder` is no fleet's."""
    if not (folder / BOARDS).is_file():
        raise UserError(f"{folder}: has no {BOARDS}; give the run's folder of a fleet that has done a round")
    with reading(folder):
        return read_rows(folder / METRICS), read_rows(folder / BOARDS)


def number(text: str | None, digits: int = 1, factor: float = 1.0) -> str:
    """A cell for the terminal; empty cells stay empty."""
    return f"{factor * float(text):.{digits}f}" if text else ""


def round_table(rounds: Rows) -> list[str]:
    """A line a round."""
    header = ("round", "accuracy %", "boards", "late", "deadline s", "in all s", "down MB", "up MB")
    rows = [
        (
            *(row["epoch"], number(row["test_accuracy"], 1, 100), row["boards"], row["late"]),
            *(number(row["round_seconds"]), number(row["train_seconds"])),
            *(number(row["bytes_down"], 2, 1e-6), number(row["bytes_up"], 2, 1e-6)),
        )
        for row in rounds
    ]
    return text_table([header, *rows])


def board_table(boards: Rows) -> list[str]:
    """A line a board and round."""
    names = (
        "board",
        "round",
        "images",
        "tensors",
        "steps",
        "step ms",
        "predicted ms",
        "training s",
        "answer s",
        "up MB",
    )
    rows = [
        (
            *(row["board"], row["round"], row["images"], row["trained_tensors"], row["steps"]),
            *(number(row["step_ms"]), number(row["predicted_step_ms"])),
            *(number(row["train_seconds"]), number(row["answer_seconds"]), number(row["bytes_up"], 2, 1e-6)),
        )
        for row in sorted(boards, key=lambda row: (row["board"], int(row["round"])))
    ]
    return text_table([names, *rows])


def draw(rounds: Rows, boards: Rows, stem: Path) -> None:
    """The figure, as `stem`.pdf and .png."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]  # its stubs list all names
        from matplotlib.figure import Figure

        figure = Figure(figsize=(PAGE, 4.4))
        axes = figure.subplots(2, 3).ravel()
        tested = [row for row in rounds if row["test_accuracy"]]
        accuracy = [100 * float(row["test_accuracy"]) for row in tested]
        titles = ("round", "wall time of the rounds (s)")
        for one, column, label in zip(axes, ("epoch", "train_seconds"), titles, strict=False):
            one.plot([float(row[column]) for row in tested], accuracy, "o-", color="black")
            one.set(xlabel=label, ylabel="accuracy (%)")
        panels = (
            ("trained_tensors", 1.0, "tensors that train"),
            ("steps", 1.0, "steps in a round"),
            ("train_seconds", 1.0, "training (s); grey: deadline"),
            ("bytes_up", 1e-6, "sent by the board (MB)"),
        )
        for one, (column, factor, label) in zip(axes[2:], panels, strict=True):
            if column == "train_seconds":
                due = [row for row in rounds if row["round_seconds"]]
                one.plot([int(row["epoch"]) for row in due], [float(row["round_seconds"]) for row in due], color="grey")
            _draw_boards(one, boards, column, factor)
            one.set(xlabel="round", ylabel=label, ylim=(0, None))
        axes[2].legend()
        save_figure(figure, stem)


def _draw_boards(axes: Any, boards: Rows, column: str, factor: float) -> None:
    for name, (colour, marker) in zip(sorted({row["board"] for row in boards}), cycle(LOOKS), strict=False):
        own = [row for row in boards if row["board"] == name and row[column]]
        values = [factor * float(row[column]) for row in own]
        axes.plot([int(row["round"]) for row in own], values, marker + "-", color=colour, label=figure_text(name))


def main() -> None:
    parser = OneLineParser(prog="plot_fleet.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the run's folder of a fleet")
    parser.add_argument("--output", type=stem_to_write, required=True, metavar="STEM", help="path without .pdf or .png")
    args = parser.parse_args()
    rounds, boards = read_fleet(args.folder)
    print("\n".join([*round_table(rounds), "", *board_table(boards)]))
    draw(rounds, boards, args.output)
    print(f"figure: {args.output}.png")


if __name__ == "__main__":
    assert plotting is not None  # imported first: it sets the import path
    utils.run_cli(main)
