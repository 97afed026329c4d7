#!/usr/bin/env python
"""What changes from epoch to epoch, from finished runs: FLOPs (the paper's Fig 18), trained tensors (Fig 21).

python scripts/plot_epochs.py flops logs/a logs/b
python scripts/plot_epochs.py maps logs/a
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
from plotting import FinishedRun, Group

import utils


def draw_flops(groups: Sequence[Group], stem: Path) -> None:
    """FLOPs of each epoch, a line for each scheme and budget."""
    figure = plotting.new_figure(plotting.COLUMN, 2.8, plotting.setting(groups))
    axes = figure.add_subplot(xlabel="epoch", ylabel="training (TFLOPs an epoch)")
    rows: list[tuple[Any, ...]] = []
    for group, colour in zip(groups, plotting.colours(groups), strict=True):
        each = np.array([np.diff([0.0, *run.column("train_flops")]) / 1e12 for run in group.runs])
        epochs = np.arange(1, each.shape[1] + 1)
        axes.plot(epochs, each.mean(0), color=colour, ls=group.look.dashes, marker=group.look.marker, label=group.label)
        if len(each) > 1:
            low, high = each.mean(0) - each.std(0, ddof=1), each.mean(0) + each.std(0, ddof=1)
            axes.fill_between(epochs, low, high, color=colour, alpha=0.2, lw=0)
        for run, values in zip(group.runs, each, strict=True):
            rows += [
                (group.label, run.config["seed"], epoch, value) for epoch, value in zip(epochs, values, strict=True)
            ]
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    plotting.legend_below(figure, axes)
    plotting.save(figure, stem, ["scheme", "seed", "epoch", "tflops"], rows)


def read_selections(run: FinishedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Epochs [S] of its selections, what they chose [S, N] (bool), and the importance [S, N] they chose by."""
    epochs: dict[str, list[tuple[bool, float]]] = {}
    with (run.folder / "selections.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chosen = (row["chosen"] == "1", float(row["importance"] or "nan"))
            epochs.setdefault(row["epoch"], []).append(chosen)
    table = np.array([*epochs.values()], float)
    return np.array([*epochs], float), table[:, :, 0] == 1, table[:, :, 1]


def draw_maps(groups: Sequence[Group], stem: Path) -> None:
    """Which tensors train in which epoch; a map for each network, data set and budget, of its first seed."""
    shown = plotting.setting([Group([group.first]) for group in groups])
    figure = plotting.new_figure(max(plotting.COLUMN, 1.75 * len(groups)), 3.2, shown)
    rows: list[tuple[Any, ...]] = []
    for index, group in enumerate(groups):
        run = group.first
        epochs, chosen, _ = read_selections(run)
        edges = np.array([*epochs, run.summary["epochs"]])
        title = f"{plotting.network(run)}\n{plotting.dataset(run)}, ρ={100 * (run.summary['rho'] or 1):g}%"
        axes = figure.add_subplot(1, len(groups), index + 1, xlabel="epoch", title=title)
        axes.pcolormesh(edges, np.arange(chosen.shape[1] + 1) - 0.5, chosen.T, cmap="Blues", vmin=0, vmax=1.25)
        axes.vlines(edges[1:-1], -0.5, chosen.shape[1] - 0.5, color="0.6", lw=0.4)
        axes.grid(visible=False)
        if not index:
            axes.set_ylabel("tensor (0 is next to the input; blue: trained)")
        for epoch, mask in zip(epochs, chosen, strict=True):
            rows += [(run.config["run_name"], epoch, tensor, int(one)) for tensor, one in enumerate(mask)]
    plotting.save(figure, stem, ["run", "epoch", "tensor", "trained"], rows)


KINDS = {"flops": draw_flops, "maps": draw_maps}


if __name__ == "__main__":
    utils.run_cli(lambda: plotting.draw_by_name(__doc__, KINDS))
