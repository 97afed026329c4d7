#!/usr/bin/env python
"""One number for each scheme as bars, from finished runs (the paper's Figs 17, 19, 20, 22 and 23).

The figure has a panel for each quantity and a cluster of bars for each network and data set. Error bars are one
standard deviation over the seeds. A bar whose value the runs do not know, such as energy on a machine without a meter,
is marked as unknown.

    python scripts/figures/plot_bars.py logs/a logs/b --quantity accuracy hours
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotting
from plotting import FinishedRun, Group

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import figure_text
from elastic_trainer.options import stem_to_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Quantity(NamedTuple):
    """What a panel shows: its label, and the value of a run, None if unknown."""

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


class PlacedGroup(NamedTuple):
    """A group with the place and colour of its bar in every panel."""

    group: Group
    place: float
    colour: str


def _clusters(groups: Sequence[Group]) -> dict[tuple[str, str], list[PlacedGroup]]:
    """The groups of each network and data set, side by side, with a gap between clusters."""
    colours = plotting.colours(groups)
    clusters: dict[tuple[str, str], list[PlacedGroup]] = {}
    place = 0
    for key in dict.fromkeys(group.place for group in groups):
        members = [(group, colour) for group, colour in zip(groups, colours, strict=True) if group.place == key]
        clusters[key] = [PlacedGroup(group, place + k, colour) for k, (group, colour) in enumerate(members)]
        place += len(members) + 1
    return clusters


def draw(
    groups: Sequence[Group],
    names: Sequence[str],
    stem: Path,
    reference: Mapping[Any, Sequence[float]] | None = None,
    scale: str = "full",
) -> None:
    """Bars of each quantity.

    Args:
        groups: runs to compare.
        names: of the quantities, keys of `QUANTITIES`.
        stem: of the files.
        reference: (data set, network, scheme, ρ) -> the paper's value of each quantity.
        scale: see `plotting.new_figure`.
    """
    from matplotlib.lines import Line2D

    clusters = _clusters(groups)
    placed = [one for cluster in clusters.values() for one in cluster]
    is_marked, is_wide = False, len(groups) > 6
    width = plotting.PAGE if is_wide else plotting.COLUMN
    figure = plotting.new_figure(width, 0.9 + 1.7 * len(names), plotting.caption(groups), scale)
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    rows: list[tuple[Any, ...]] = []
    for index, (axes, name) in enumerate(zip(panels, names, strict=True)):
        quantity = QUANTITIES[name]
        if name == "hours" and np.nanmax([group.mean(quantity.of) for group in groups]) < 0.2:
            quantity = QUANTITIES["minutes"]
        rows += _draw_panel(axes, quantity, placed)
        if quantity is QUANTITIES[name]:
            is_marked |= _mark_paper_values(axes, placed, reference or {}, index)
    middles = [float(np.mean([one.place for one in cluster])) for cluster in clusters.values()]
    panels[-1].set_xticks(middles, ["\n".join(map(figure_text, cluster)) for cluster in clusters])
    bars: dict[str, Any] = dict(zip((one.group.label for one in placed), panels[0].patches, strict=True))
    if is_marked:
        bars["the paper's"] = Line2D([], [], color="black", lw=1, alpha=0.5)
    columns = 5 if is_wide else 3
    figure.legend(
        bars.values(), bars.keys(), loc="outside lower center", ncols=columns, frameon=False, handlelength=1.5
    )
    header = ["network", "dataset", "scheme", "quantity", "mean", "standard_deviation", "seeds"]
    plotting.save(figure, stem, header, rows)


def _draw_panel(axes: Axes, quantity: Quantity, placed: Sequence[PlacedGroup]) -> list[tuple[Any, ...]]:
    """A bar for each group; returns a row of the CSV for each."""
    rows: list[tuple[Any, ...]] = []
    for group, place, colour in placed:
        mean, spread = group.mean(quantity.of), group.spread(quantity.of)
        rows.append((*group.place, group.label, quantity.label, mean, spread, len(group.runs)))
        is_known = not np.isnan(mean)
        height = mean if is_known else 0
        look: dict[str, Any] = {"color": colour, "hatch": group.look.hatch, "edgecolor": "white", "lw": 0}
        axes.bar(place, height, 0.8, yerr=spread or None, error_kw={"elinewidth": 0.8}, **look)
        text = f"{mean:.3g}" if is_known else "unknown"
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 6, "rotation": 0 if is_known else 90}
        axes.annotate(text, (place, height), (0, 1), textcoords="offset points", **style)
    axes.set_ylabel(quantity.label)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.15)
    if all(np.isnan(row[4]) for row in rows):
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    return rows


def _mark_paper_values(
    axes: Axes, placed: Sequence[PlacedGroup], reference: Mapping[Any, Sequence[float]], index: int
) -> bool:
    """A line at the paper's value of the quantity `index` on each bar that has one; returns whether any has."""
    is_marked = False
    for group, place, _ in placed:
        paper_values = reference.get(group.paper_key)
        if paper_values is not None:
            axes.hlines(paper_values[index], place - 0.4, place + 0.4, color="black", lw=1, alpha=0.5)
            is_marked = True
    return is_marked


def main() -> None:
    parser = OneLineParser(
        prog="plot_bars.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--quantity", nargs="+", choices=[*QUANTITIES], default=["accuracy", "hours"])
    parser.add_argument("--output", type=stem_to_write, default=Path("figures/bars"), help="figure without its ending")
    args = parser.parse_args()
    draw(plotting.group_runs(args.runs), args.quantity, args.output)


if __name__ == "__main__":
    utils.run_cli(main)
