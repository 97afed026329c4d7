#!/usr/bin/env python
"""One number a scheme as bars, from finished runs (the paper's Figs 17, 19, 20, 22 and 23).

A panel for each quantity, a cluster of bars for each network and data set; error bars are one standard deviation over
the seeds. What a run does not know (energy, on a machine without a meter) is said in the place of its bar.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotting
from plotting import FinishedRun, Group

import utils


class Quantity(NamedTuple):
    label: str
    of: Callable[[FinishedRun], float | None]


def _scaled(name: str, factor: float) -> Callable[[FinishedRun], float | None]:
    def of(run: FinishedRun) -> float | None:
        value = run.summary.get(name)
        return None if value is None else factor * value

    return of


QUANTITIES = {
    "accuracy": Quantity("test accuracy (%)", _scaled("final_accuracy", 100)),
    "hours": Quantity("training time (h)", _scaled("train_seconds", 1 / 3600)),
    "flops": Quantity("training (TFLOPs)", _scaled("train_flops", 1e-12)),
    "memory": Quantity("peak memory (GB)", _scaled("peak_memory_mb", 1e-3)),
    "energy": Quantity("energy of training (J)", _scaled("energy_joules", 1)),
}


def draw(
    groups: Sequence[Group], names: Sequence[str], stem: Path, reference: Mapping[Any, Sequence[float]] | None = None
) -> None:
    """Bars of each of `names`, keys of `QUANTITIES`; `reference`: (data, network, scheme, ρ) -> the paper's of each."""
    clusters = [*dict.fromkeys(_cluster(group) for group in groups)]
    members = {cluster: [group for group in groups if _cluster(group) == cluster] for cluster in clusters}
    labels = [*dict.fromkeys(group.label for group in groups)]
    looks = dict(
        zip([group.label for group in groups], zip(groups, plotting.colours(groups), strict=True), strict=True)
    )
    width = plotting.PAGE if len(groups) > 6 else plotting.COLUMN
    figure = plotting.new_figure(width, 0.9 + 1.7 * len(names), plotting.setting(groups))
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    rows = []
    places = np.cumsum([0, *(len(members[cluster]) + 1 for cluster in clusters)])
    for axes, name in zip(panels, names, strict=True):
        quantity, drawn = QUANTITIES[name], set()
        for cluster, begin in zip(clusters, places, strict=False):
            for place, group in enumerate(members[cluster], begin):
                mean, spread, look = group.mean(quantity.of), group.spread(quantity.of), group.look
                rows.append((*cluster, group.label, quantity.label, mean, spread, len(group.runs)))
                if np.isnan(mean):
                    axes.text(place, 0, " unknown", rotation=90, ha="center", va="bottom", fontsize=6)
                    continue
                label = None if group.label in drawn else group.label
                drawn.add(group.label)
                axes.bar(
                    place,
                    mean,
                    0.8,
                    yerr=spread or None,
                    color=looks[group.label][1],
                    hatch=look.hatch,
                    label=label,
                    edgecolor="white",
                    lw=0,
                    error_kw={"elinewidth": 0.8},
                )
                axes.annotate(f"{mean:.3g}", (place, mean), (0, 1), textcoords="offset points", ha="center", fontsize=6)
                told = (reference or {}).get(_key(group))
                if told is not None:
                    axes.hlines(told[names.index(name)], place - 0.4, place + 0.4, color="black", lw=1, alpha=0.5)
        axes.set_ylabel(quantity.label)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
    middles = [begin + (len(members[cluster]) - 1) / 2 for cluster, begin in zip(clusters, places, strict=False)]
    panels[-1].set_xticks(middles, [" on ".join(cluster) for cluster in clusters])
    if len(labels) > 1:
        plotting.legend_below(figure, panels[0] if panels[0].get_legend_handles_labels()[1] else panels[-1], 5)
    columns = ["network", "dataset", "scheme", "quantity", "mean", "standard_deviation", "seeds"]
    plotting.save(figure, stem, columns, rows)


def _cluster(group: Group) -> tuple[str, str]:
    return plotting.network(group.first), plotting.dataset(group.first)


def _key(group: Group) -> tuple[Any, ...]:
    config = group.first.config
    return (config["dataset_name"], config["model_name"], config["train_type"], group.first.summary["rho"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--quantity", nargs="+", choices=[*QUANTITIES], default=["accuracy", "hours"])
    parser.add_argument("--output", type=Path, default=Path("figures/bars"), help="figure without its ending")
    args = parser.parse_args()
    draw(plotting.group_runs(args.runs), args.quantity, args.output)


if __name__ == "__main__":
    utils.run_cli(main)
