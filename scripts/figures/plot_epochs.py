#!/usr/bin/env python
"""What changes from epoch to epoch, from finished runs: FLOPs (the paper's Fig 18) and trained tensors (Fig 21).

python scripts/figures/plot_epochs.py flops logs/a logs/b
python scripts/figures/plot_epochs.py maps logs/a
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
from plotting import Group

import utils
from elastic_trainer.errors import figure_text


def draw_flops(groups: Sequence[Group], stem: Path, scale: str = "full") -> None:
    """Fig 18: FLOPs of each epoch, a line for each scheme and budget."""
    figure = plotting.new_figure(plotting.COLUMN, 2.8, plotting.caption(groups), scale)
    axes = figure.add_subplot(xlabel="epoch", ylabel="training (TFLOPs an epoch)")
    rows: list[tuple[Any, ...]] = []
    for group, colour in zip(groups, plotting.colours(groups), strict=True):
        each = np.array([np.diff([0.0, *run.column("train_flops")]) / 1e12 for run in group.runs])
        epochs = np.arange(1, each.shape[1] + 1)
        plotting.plot_band(axes, epochs, each, colour, group.look, group.label)
        for run, values in zip(group.runs, each, strict=True):
            rows += [
                (group.label, run.config["seed"], epoch, value) for epoch, value in zip(epochs, values, strict=True)
            ]
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    plotting.legend_below(figure, axes)
    plotting.save(figure, stem, ["scheme", "seed", "epoch", "tflops"], rows)


def draw_maps(groups: Sequence[Group], stem: Path, scale: str = "full") -> None:
    """Fig 21: which tensors train in which epoch. A map for each network, data set and budget, of its first seed."""
    shown = plotting.caption([Group([group.first]) for group in groups])
    figure = plotting.new_figure(max(plotting.COLUMN, 1.75 * len(groups)), 3.2, shown, scale)
    rows: list[tuple[Any, ...]] = []
    for index, group in enumerate(groups):
        run = group.first
        epochs, chosen, _ = run.selections()
        edges = np.array([*epochs, run.summary["epochs"]])
        network, dataset = map(figure_text, group.place)
        title = f"{network}\n{dataset}, ρ={100 * (run.summary['rho'] or 1):g}%"
        axes = figure.add_subplot(1, len(groups), index + 1, xlabel="epoch", title=title)
        axes.pcolormesh(edges, np.arange(chosen.shape[1] + 1) - 0.5, chosen.T, cmap="Blues", vmin=0, vmax=1.25)
        axes.vlines(edges[1:-1], -0.5, chosen.shape[1] - 0.5, color="0.6", lw=0.4)
        axes.grid(visible=False)
        if not index:
            axes.set_ylabel("tensor (0 is next to the input; blue: trained)")
        for epoch, mask in zip(epochs, chosen, strict=True):
            rows += [(run.config["run_name"], epoch, tensor, int(one)) for tensor, one in enumerate(mask)]
    plotting.save(figure, stem, ["run", "epoch", "tensor", "trained"], rows)


KINDS: dict[str, plotting.Plot] = {"flops": draw_flops, "maps": draw_maps}


if __name__ == "__main__":
    utils.run_cli(lambda: plotting.draw_by_name(__doc__, KINDS))
