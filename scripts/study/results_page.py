#!/usr/bin/env python
"""Bring the tables and pictures of docs/results.md up to date with the files in docs/results/.

Each table stands between `<!-- NAME -->` and `<!-- end -->`; NAME is that of a CSV file of run_study.py.

    python scripts/study/results_page.py
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import plotting  # first: it sets the import path
from common import ROOT

import utils
from elastic_trainer.cli.parser import OneLineParser

RESULTS, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
BLOCK = re.compile(r"<!-- (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)
SCHEMES = {  # by the first word of a setting
    "full": "full_training",
    "elastic": "elastic_training",
    "upper": "elastic_training_upper_part",
    "random": "elastic_training_random",
    "head": "traditional_tl_training",
    "BN+Bias": "bn_plus_bias_training",
}
DASHES = ("-", "--", ":", "-.")


class Point(NamedTuple):
    """Runs that differ in their seed alone.

    Attributes:
        accuracies: after the last epoch, 0…1.
        seconds: of training.
    """

    setting: str
    budget: float
    rate: float
    accuracies: np.ndarray
    seconds: np.ndarray


def read_points(path: Path) -> list[Point]:
    """The points of a CSV file of run_study.py, in its order. Raises `UserError` if it cannot be read."""
    found: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    with utils.reading(path), path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["setting"], float(row["budget"]), float(row["learning_rate"])
            found.setdefault(key, []).append((float(row["final_accuracy"]), float(row["train_seconds"])))
    return [Point(*key, *np.array(values).T) for key, values in found.items()]


def spread(values: np.ndarray, digits: int = 1) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def table(points: Sequence[Point]) -> str:
    """A row a setting; columns are budgets, or learning rates if these differ at one budget."""
    by_rate = len({(point.setting, point.budget) for point in points}) < len(points)
    columns = sorted({point.rate if by_rate else point.budget for point in points})
    heads = [f"rate {value:g}" if by_rate else f"{value:g} of full training's time" for value in columns]
    lines = [" | ".join(["| setting", *heads]) + " |", "|---" * (len(columns) + 1) + "|"]
    for setting in dict.fromkeys(point.setting for point in points):
        cells = []
        for column in columns:
            here = [p for p in points if p.setting == setting and (p.rate if by_rate else p.budget) == column]
            cells.append(f"{spread(100 * here[0].accuracies)} % ({spread(here[0].seconds, 0)} s)" if here else "")
        lines.append(" | ".join([f"| {setting}", *cells]) + " |")
    return "\n".join(lines)


def draw(points: Sequence[Point], stem: Path, title: str) -> None:
    """Accuracy over measured training time, a line a setting."""
    figure = plotting.new_figure(7, 4, title)
    axes = figure.add_subplot(xlabel="training time (s)", ylabel="test accuracy (%)")
    seen: dict[str, int] = {}
    for setting in dict.fromkeys(point.setting for point in points):
        scheme = setting.split()[0]
        dashes = DASHES[seen.setdefault(scheme, 0) % len(DASHES)]
        seen[scheme] += 1
        here = sorted((p for p in points if p.setting == setting), key=lambda p: p.budget)
        axes.errorbar(
            [p.seconds.mean() for p in here],
            [100 * p.accuracies.mean() for p in here],
            [100 * p.accuracies.std(ddof=1) if len(p.accuracies) > 1 else 0.0 for p in here],
            color=plotting.LOOKS[SCHEMES[scheme]].colour,
            ls=dashes,
            marker="o",
            ms=3,
            capsize=2,
            label=setting,
        )
    axes.set_xscale("log")
    figure.legend(loc="outside right center", fontsize="small")
    utils.save_figure(figure, stem)


def updated(page: str) -> str:
    """The page with the tables of the present files."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- {name} -->\n{table(read_points(RESULTS / f'{name}.csv'))}\n<!-- end -->"

    return BLOCK.sub(block, page)


def main() -> None:
    OneLineParser(prog="results_page.py", description=__doc__).parse_args()
    utils.write_text(PAGE, updated(PAGE.read_text(encoding="utf-8")))
    for path in sorted(RESULTS.glob("budget_*.csv")):
        draw(read_points(path), path.with_suffix(""), path.stem.partition("_")[2])


if __name__ == "__main__":
    utils.run_cli(main)
