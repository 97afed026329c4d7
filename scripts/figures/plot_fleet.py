#!/usr/bin/env python
"""Draw the run of a fleet: accuracy over wall time, and each board's selection, times and bytes.

    python scripts/figures/plot_fleet.py logs/fleet/server --output figures/fleet

It writes a PDF and a PNG, and prints the same as two tables. Everything is read from the run's folder. `--rules FILE`
adds a table and a panel of other rules, by a record of `benchmark_fleet.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import plotting  # first: it sets the import path

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.extensions.fleet.records import BOARDS
from elastic_trainer.files import reading, save_figure
from elastic_trainer.options import existing_file, stem_to_write
from elastic_trainer.runs.reader import METRICS, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, str]]
ROUND_COLUMNS: dict[str, tuple[Any, ...]] = {  # head -> name; of numbers also digits and a factor
    "round": ("epoch",),
    "accuracy %": ("test_accuracy", 1, 100),
    "boards": ("boards",),
    "late": ("late",),
    "deadline s": ("round_seconds", 1),
    "in all s": ("train_seconds", 1),
    "down MB": ("bytes_down", 2, 1e-6),
    "up MB": ("bytes_up", 2, 1e-6),
}
BOARD_COLUMNS: dict[str, tuple[Any, ...]] = {
    "board": ("board",),
    "round": ("round",),
    "images": ("images",),
    "tensors": ("trained_tensors",),
    "steps": ("steps",),
    "step ms": ("step_ms", 1),
    "predicted ms": ("predicted_step_ms", 1),
    "training s": ("train_seconds", 1),
    "answer s": ("answer_seconds", 1),
    "up MB": ("bytes_up", 2, 1e-6),
}
PANELS = (  # of each board over the rounds: column, factor, label
    ("trained_tensors", 1.0, "tensors that train"),
    ("steps", 1.0, "steps in a round"),
    ("train_seconds", 1.0, "training (s)"),
    ("bytes_up", 1e-6, "sent by the board (MB)"),
)
RULES = {
    "alone_1": "the fast board alone",
    "alone_2": "the second board alone",
    "alone_3": "the slowest board alone",
    "waits": "FedAvg, which waits for all",
    "drops": "FedAvg without the slowest",
}
SHORT = {"alone_1": "fast alone", "alone_2": "second alone", "alone_3": "slowest alone"}
SHORT |= {"waits": "FedAvg, waits", "drops": "FedAvg, drops"}
SHIFT = 0.08  # of a round: boards that do the same do not cover each other
LOOKS = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "v"), ("#e69f00", "D"), ("#56b4e9", "P"))


def table(rows: Rows, columns: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """The rows in the terminal; empty cells stay empty."""

    def cell(text: str, digits: int | None = None, factor: float = 1) -> str:
        return f"{factor * float(text):.{digits}f}" if text and digits is not None else text

    return text_table([[*columns], *([cell(row[name], *of) for name, *of in columns.values()] for row in rows)])


def rules_table(record: Mapping[str, Any]) -> list[str]:
    """What a fleet reaches by each rule, in simulated time; a board alone takes part with that alone."""
    rules = record["rules"]
    rows = [["simulated, without messages", "best accuracy %", "rare classes %", "rounds", "in all s"]]
    first = next(run["accuracy"][0] for run in record["runs"] if run["rule"] == "ours")
    rows.append(["ours, after round 0", f"{100 * first:.1f}", "", "0", "0.0"])
    for name, found in rules.items():
        rounds = next(len(run["accuracy"]) - 1 for run in record["runs"] if run["rule"] == name)
        cells = f"{found['accuracy_percent']:.1f}", f"{found['slow_classes_percent']:.1f}", str(rounds)
        rows.append([RULES.get(name, name), *cells, f"{rounds * found['round_seconds']:.1f}"])
    return text_table(rows)


def points(rows: Rows, x: str, y: str, factor: float = 1.0) -> tuple[list[float], list[float]]:
    """Two columns, without rows in which the second is empty."""
    known = [row for row in rows if row[y]]
    return [float(row[x]) for row in known], [factor * float(row[y]) for row in known]


def draw(rounds: Rows, boards: Rows, record: Mapping[str, Any] | None, stem: Path) -> None:
    """The figure, as `stem`.pdf and .png; `record` is of other rules, or None."""
    figure = plotting.new_figure(plotting.PAGE, 4.8, "")
    panels = figure.subplots(2, 3).ravel()
    draw_accuracy(panels[0], rounds)
    if record is None:
        panels[1].plot(*points(rounds, "epoch", "test_accuracy", 100), "o-", color="black")
        panels[1].set(xlabel="round", ylabel="accuracy (%)")
    else:
        draw_rules(panels[1], record)
    names = sorted({row["board"] for row in boards})
    shifts = np.linspace(-1, 1, len(names)) * SHIFT if len(names) > 1 else [0.0]
    for axes, (column, factor, label) in zip(panels[2:], PANELS, strict=True):
        if column == "train_seconds":
            axes.plot(*points(rounds, "epoch", "round_seconds"), "--", color="grey", label="deadline")
            axes.legend()
        for name, shift, (colour, marker) in zip(names, shifts, cycle(LOOKS), strict=False):
            x, y = points([row for row in boards if row["board"] == name], "round", column, factor)
            label_of_board = figure_text(name) if axes is panels[2] else None
            axes.plot(np.add(x, shift), y, marker + "-", color=colour, label=label_of_board)
        axes.set(xlabel="round", ylabel=label, ylim=(0, None))
        axes.locator_params(axis="x", integer=True)
    labels = panels[2].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=min(len(names), 6), frameon=False)
    save_figure(figure, stem)


def draw_accuracy(axes: Axes, rounds: Rows) -> None:
    """Accuracy over wall time: of each round's model, and of the best."""
    kept = [row for row in rounds if row["kept"] == "1"]
    x, y = points(kept, "train_seconds", "test_accuracy", 100)
    if x:
        axes.plot([*x, float(rounds[-1]["train_seconds"])], [*y, y[-1]], color="black", drawstyle="steps-post")
    axes.plot(x, y, "o", color="black", label="the best so far")
    others = points([row for row in rounds if row["kept"] == "0"], "train_seconds", "test_accuracy", 100)
    if others[0]:
        axes.plot(*others, "o", color="black", markerfacecolor="white", label="others")
    axes.set(xlabel="wall time of the rounds (s)", ylabel="accuracy (%)")
    axes.legend()


def draw_rules(axes: Axes, record: Mapping[str, Any]) -> None:
    """The best accuracy so far by each rule, over simulated time; at its end, the name of the rule."""
    last = max((len(run["accuracy"]) - 1) * run["round_seconds"] for run in record["runs"])
    ends = list[tuple[float, str, str]]()
    for run, (usual, marker) in zip(record["runs"], cycle(LOOKS), strict=False):
        accuracy = 100 * np.array(run["accuracy"])
        seconds = run["round_seconds"] * np.arange(len(accuracy))
        colour, width = ("black", 2.0) if run["rule"] == "ours" else (usual, 1.0)
        style: dict[str, Any] = {"color": colour, "drawstyle": "steps-post", "marker": marker, "markevery": [-1]}
        axes.plot(seconds, accuracy, **style, linewidth=width)
        ends.append((float(accuracy[-1]), SHORT.get(run["rule"], run["rule"]), colour))
    low, high = axes.get_ylim()
    at, gap = low, 0.07 * (high - low)
    for end, name, colour in sorted(ends):  # from below, so that no name covers another
        at = max(end, at + gap)
        axes.text(1.07 * last, at, name, color=colour, fontsize=7, va="center")
    axes.set(xlabel="simulated time (s)", ylabel="best accuracy (%)")
    axes.set(xlim=(0, 1.9 * last), ylim=(low, max(high, at + gap)))
    axes.set_xticks(np.linspace(0, last, 3).round())


def main() -> None:
    parser = OneLineParser(prog="plot_fleet.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the run's folder of a fleet")
    parser.add_argument("--output", type=stem_to_write, required=True, metavar="STEM", help="path without .pdf or .png")
    parser.add_argument("--rules", type=existing_file, metavar="FILE", help="a record of benchmark_fleet.py")
    args = parser.parse_args()
    if not (args.folder / BOARDS).is_file():
        raise UserError(f"{args.folder}: has no {BOARDS}; give the run's folder of a fleet that has done a round")
    with reading(args.folder):
        rounds, boards = (read_rows(args.folder / name) for name in (METRICS, BOARDS))
    of_boards = sorted(boards, key=lambda row: (row["board"], int(row["round"])))
    print("\n".join([*table(rounds, ROUND_COLUMNS), "", *table(of_boards, BOARD_COLUMNS)]))
    record = None
    if args.rules is not None:
        with reading(args.rules):
            record = json.loads(args.rules.read_text(encoding="utf-8"))
            print("\n".join(["", *rules_table(record)]))
    draw(rounds, boards, record, args.output)
    print(f"figure: {args.output}.png")


if __name__ == "__main__":
    utils.run_cli(main)
