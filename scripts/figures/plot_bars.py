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
    "minutes": Quantity("training time (min)", _scaled("train_seconds", 1 / 60)),
    "flops": Quantity("training (TFLOPs)", _scaled("train_flops", 1e-12)),
    "memory": Quantity("peak memory (GB)", _scaled("peak_memory_mb", 1e-3)),
    "energy": Quantity("energy of training (J)", _scaled("energy_joules", 1)),
}


def draw(
    groups: Sequence[Group], names: Sequence[str], stem: Path, reference: Mapping[Any, Sequence[float]] | None = None
) -> None:
    """Bars of each of `names`, keys of `QUANTITIES`; `reference`: (data, network, scheme, ρ) -> the paper's of each."""
    clusters = [*dict.fromkeys(group.place for group in groups)]
    members = [[group for group in groups if group.place == cluster] for cluster in clusters]
    begins = np.cumsum([0, *(len(group) + 1 for group in members)])[:-1]
    placed = [
        (begin + k, group) for begin, cluster in zip(begins, members, strict=True) for k, group in enumerate(cluster)
    ]
    colours = {id(group): colour for group, colour in zip(groups, plotting.colours(groups), strict=True)}
    is_marked = False
    is_wide = len(groups) > 6
    figure = plotting.new_figure(
        plotting.PAGE if is_wide else plotting.COLUMN, 0.9 + 1.7 * len(names), plotting.setting(groups)
    )
    from matplotlib.lines import Line2D

    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    rows = []
    for index, (axes, name) in enumerate(zip(panels, names, strict=True)):
        quantity = QUANTITIES[name]
        means = [group.mean(quantity.of) for group in groups]
        if name == "hours" and np.nanmax(means) < 0.2:
            quantity = QUANTITIES["minutes"]
        for place, group in placed:
            mean, spread = group.mean(quantity.of), group.spread(quantity.of)
            rows.append((*group.place, group.label, quantity.label, mean, spread, len(group.runs)))
            is_known = not np.isnan(mean)
            look = {"color": colours[id(group)], "hatch": group.look.hatch, "edgecolor": "white", "lw": 0}
            axes.bar(place, mean if is_known else 0, 0.8, yerr=spread or None, error_kw={"elinewidth": 0.8}, **look)
            text = f"{mean:.3g}" if is_known else "unknown"
            how = {"ha": "center", "va": "bottom", "fontsize": 6, "rotation": 0 if is_known else 90}
            axes.annotate(text, (place, mean if is_known else 0), (0, 1), textcoords="offset points", **how)
            told = (reference or {}).get(group.paper_key)
            if told is not None and quantity is QUANTITIES[name]:
                axes.hlines(told[index], place - 0.4, place + 0.4, color="black", lw=1, alpha=0.5)
                is_marked = True
        axes.set_ylabel(quantity.label)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
        if np.isnan(means).all():
            axes.set_ylim(0, 1)
            axes.set_yticks([])
    middles = [begin + (len(cluster) - 1) / 2 for begin, cluster in zip(begins, members, strict=True)]
    panels[-1].set_xticks(middles, ["\n".join(cluster) for cluster in clusters])
    bars: dict[str, Any] = dict(zip((group.label for _, group in placed), panels[0].patches, strict=True))
    if is_marked:
        bars["the paper's"] = Line2D([], [], color="black", lw=1, alpha=0.5)
    figure.legend(
        bars.values(),
        bars.keys(),
        loc="outside lower center",
        ncols=5 if is_wide else 3,
        frameon=False,
        handlelength=1.5,
    )
    columns = ["network", "dataset", "scheme", "quantity", "mean", "standard_deviation", "seeds"]
    plotting.save(figure, stem, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--quantity", nargs="+", choices=[*QUANTITIES], default=["accuracy", "hours"])
    parser.add_argument("--output", type=Path, default=Path("figures/bars"), help="figure without its ending")
    args = parser.parse_args()
    draw(plotting.group_runs(args.runs), args.quantity, args.output)


if __name__ == "__main__":
    utils.run_cli(main)
