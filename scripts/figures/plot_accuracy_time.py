#!/usr/bin/env python
"""Compare finished runs (the paper's Figs 15 and 16, Table 2): test accuracy and loss over time, and a table.

A column for each data set. Time is training and testing, as in the paper; runs that differ in their seed alone make one
curve, the mean, with a band of one standard deviation.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
from plotting import FinishedRun, Group

import utils
from utils import UserError


def table(groups: Sequence[Group]) -> str:
    """Scheme, accuracy, time, and time and step over full training's, as text; full training of the same data."""
    header = ("scheme", "test accuracy", "training s", "time over full", "rho asked", "rho measured")
    rows = [header]
    for group in groups:
        full = next((one for one in groups if _is_full(one) and one.place == group.place), None)
        rho = group.first.summary["rho"]
        rows.append(
            (
                group.look.label,
                f"{group.mean(lambda run: run.summary['final_accuracy']):.1%}",
                f"{group.mean(lambda run: run.summary['train_seconds']):.1f}",
                _ratio(group, full, "train_seconds"),
                f"{rho:.2f}" if rho else "-",
                _ratio(group, full, "median_step_ms"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _is_full(group: Group) -> bool:
    return group.first.summary["train_type"] == "full_training"


def check_alike(groups: Sequence[Group]) -> None:
    """Raise `UserError` where runs on one data set differ in what must be alike to compare them."""
    first: dict[str, FinishedRun] = {}
    for run in (group.first for group in groups):
        other = first.setdefault(run.config["dataset_name"], run)
        for key in ("model_name", *plotting.ALIKE):
            if run.config.get(key) != other.config.get(key):
                raise UserError(f"{run.folder}: --{key} differs from that of {other.folder}; name runs of one setting")


def _ratio(group: Group, full: Group | None, key: str) -> str:
    ratio = group.mean(lambda run: run.summary[key]) / (full.mean(lambda run: run.summary[key]) if full else np.nan)
    return "-" if np.isnan(ratio) else f"{ratio:.2f}"


def seconds(run: FinishedRun) -> np.ndarray:
    """Training and testing up to the end of each epoch."""
    return np.array(run.column("train_seconds")) + np.array(run.column("validation_seconds"))


def draw(groups: Sequence[Group], stem: Path, reference: Mapping[Any, Sequence[float]] | None = None) -> None:
    """Accuracy over loss, a column for each data set; `reference`: (data set, network, scheme, ρ) -> (%, hours)."""
    datasets = [*dict.fromkeys(plotting.dataset(group.first) for group in groups)]
    longest = max(seconds(run)[-1] for group in groups for run in group.runs)
    unit, size = next(
        (unit, size) for unit, size in (("h", 3600), ("min", 60), ("s", 1)) if longest > 2 * size or size == 1
    )
    figure = plotting.new_figure(max(plotting.COLUMN, plotting.PAGE * len(datasets) / 3), 4.2, plotting.setting(groups))
    panels = figure.subplots(2, len(datasets), squeeze=False, sharex="col")
    rows: list[tuple[Any, ...]] = []
    for group, colour in zip(groups, plotting.colours(groups), strict=True):
        column = datasets.index(plotting.dataset(group.first))
        look, label = group.look, group.label
        times = np.mean([seconds(run) for run in group.runs], axis=0) / size
        for axes, name, factor in ((panels[0][column], "test_accuracy", 100), (panels[1][column], "test_loss", 1)):
            curves = factor * np.array([run.column(name) for run in group.runs])
            axes.plot(times, curves.mean(0), color=colour, ls=look.dashes, marker=look.marker, label=label)
            if len(curves) > 1:
                low, high = curves.mean(0) - curves.std(0, ddof=1), curves.mean(0) + curves.std(0, ddof=1)
                axes.fill_between(times, low, high, color=colour, alpha=0.2, lw=0)
        if reference:
            told = reference.get(group.paper_key)
            if told is not None:
                percent, hours = told
                end = {"marker": look.marker, "ls": "", "ms": 7, "mfc": "none", "mec": colour, "alpha": 0.5}
                text = "the paper's end" if look.label == "ElasticTrainer" and not column else None
                panels[0][column].plot(hours * 3600 / size, percent, label=text, **end)
        for run in group.runs:
            for row, when in zip(run.epochs, seconds(run), strict=True):
                values = [row[name] for name in ("epoch", "test_accuracy", "test_loss")]
                rows.append((plotting.dataset(run), label, run.config["seed"], float(when), *values))
    for column, name in enumerate(datasets):
        panels[0][column].set_title(name)
        panels[1][column].set_xlabel(f"training and testing ({unit})")
        for axes in panels[:, column]:
            axes.set_xlim(left=0)
    panels[0][0].set_ylabel("test accuracy (%)")
    panels[1][0].set_ylabel("test loss")
    plotting.legend_below(figure, panels[0][0], 4)
    columns = ["dataset", "scheme", "seed", "seconds", "epoch", "test_accuracy", "test_loss"]
    plotting.save(figure, stem, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--output", type=Path, default=Path("figures/accuracy_time"), help="figure without its ending")
    args = parser.parse_args()
    groups = plotting.group_runs(args.runs)
    check_alike(groups)
    print(table(groups))
    draw(groups, args.output)


if __name__ == "__main__":
    utils.run_cli(main)
