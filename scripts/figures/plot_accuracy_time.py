"""Finished runs compared (the paper's Figs 15 and 16, Table 2): test accuracy and loss over time, and a table.

The figure has a column for each data set. Time is training and testing, as in the paper. Runs that differ in their seed
alone make one curve: the mean, with a band of one standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotting
from plotting import FinishedRun, Group

from elastic_trainer.errors import UserError, figure_text

UNITS = (("h", 3600), ("min", 60), ("s", 1))  # of time, in seconds


def table(groups: Sequence[Group]) -> str:
    """Scheme, accuracy, time, and time and step over those of full training on the same data, as text."""
    rows = [["scheme", "test accuracy", "training s", "time over full", "rho asked", "rho measured"]]
    for group in groups:
        full = [one for one in groups if one.train_type == "full_training" and one.place == group.place]
        seconds_over_full, step_over_full = (
            _ratio(group.mean(name), full[0].mean(name) if full else np.nan)
            for name in ("train_seconds", "median_step_ms")
        )
        rho, accuracy = group.first.summary["rho"], f"{group.mean('final_accuracy'):.1%}"
        cells = [group.look.label, accuracy, f"{group.mean('train_seconds'):.1f}", seconds_over_full]
        rows.append([*cells, f"{rho:.2f}" if rho else "-", step_over_full])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _ratio(value: float, full: float) -> str:
    return "-" if np.isnan(value / full) else f"{value / full:.2f}"


def check_alike(groups: Sequence[Group]) -> None:
    """Raise `UserError` if runs on one data set differ in a setting that must be the same to compare them."""
    first: dict[str, FinishedRun] = {}
    for run in (group.first for group in groups):
        other = first.setdefault(run.config["dataset_name"], run)
        for key in ("model_name", *plotting.ALIKE):
            if run.config.get(key) != other.config.get(key):
                raise UserError(f"{run.folder}: --{key} differs from that of {other.folder}; name runs of one setting")


def seconds(run: FinishedRun) -> np.ndarray:
    """Training and testing up to the end of each epoch."""
    return np.array(run.column("train_seconds")) + np.array(run.column("validation_seconds"))


def draw(groups: Sequence[Group], stem: Path, reference: plotting.Reference = None, scale: str = "full") -> None:
    """Accuracy over loss, a column for each data set.

    `reference`: (data set, network, scheme, ρ) -> the paper's final accuracy in % and hours. Open markers show them.
    """
    datasets = [*dict.fromkeys(plotting.dataset_label(group.first) for group in groups)]
    longest = max(seconds(run)[-1] for group in groups for run in group.runs)
    unit, size = next((unit, size) for unit, size in UNITS if longest > 2 * size or size == 1)
    width = max(plotting.COLUMN, plotting.PAGE * len(datasets) / 3)
    figure = plotting.new_figure(width, 4.2, plotting.caption(groups), scale)
    panels = figure.subplots(2, len(datasets), squeeze=False, sharex="col")
    for group, colour in zip(groups, plotting.colours(groups), strict=True):
        column = datasets.index(plotting.dataset_label(group.first))
        times = np.mean([seconds(run) for run in group.runs], axis=0) / size
        for axes, name, factor in zip(panels[:, column], ("test_accuracy", "test_loss"), (100, 1), strict=True):
            curves = factor * np.array([run.column(name) for run in group.runs])
            plotting.plot_band(axes, times, curves, colour, group.look, group.label)
        paper_end = (reference or {}).get(group.paper_key)
        if paper_end is not None:
            percent, hours = paper_end
            label = "the paper's end" if group.look.label == "ElasticTrainer" and not column else None
            look = {"marker": group.look.marker, "ls": "", "ms": 7, "mfc": "none", "mec": colour, "alpha": 0.5}
            panels[0][column].plot(hours * 3600 / size, percent, label=label, **look)
    for column, name in enumerate(datasets):
        panels[0][column].set_title(figure_text(name))
        panels[1][column].set(xlabel=f"training and testing ({unit})", xlim=(0, None))
    panels[0][0].set_ylabel("test accuracy (%)")
    panels[1][0].set_ylabel("test loss")
    plotting.legend_below(figure, panels[0][0], 4)
    rows = [
        (
            plotting.dataset_label(run),
            group.label,
            run.config["seed"],
            float(when),
            *(row[name] for name in ("epoch", "test_accuracy", "test_loss")),
        )
        for group in groups
        for run in group.runs
        for row, when in zip(run.epochs, seconds(run), strict=True)
    ]
    columns = ["dataset", "scheme", "seed", "seconds", "epoch", "test_accuracy", "test_loss"]
    plotting.save(figure, stem, columns, rows)
