"""One number for each scheme as bars, from finished runs (the paper's Figs 17, 19, 20, 22 and 23).

The figure has a panel for each quantity and a cluster of bars for each network and data set. Error bars are one
standard deviation over the seeds. A bar whose value the runs do not know, such as energy on a machine without a meter,
is marked as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotting
from plotting import Group

from elastic_trainer.errors import figure_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Quantity(NamedTuple):
    """What a panel shows: its label, and factor times what value of summary.json."""

    label: str
    name: str
    factor: float


QUANTITIES = {
    "accuracy": Quantity("test accuracy (%)", "final_accuracy", 100),
    "hours": Quantity("training time (h)", "train_seconds", 1 / 3600),
    "minutes": Quantity("training time (min)", "train_seconds", 1 / 60),
    "flops": Quantity("training (TFLOPs)", "train_flops", 1e-12),
    "memory": Quantity("peak memory (GB)", "peak_memory_mb", 1e-3),
    "energy": Quantity("energy of training (J)", "energy_joules", 1),
}
Bar = tuple[Group, int, str]  # a group, the place of its bar in every panel, and its colour


def _clusters(groups: Sequence[Group]) -> dict[tuple[str, str], list[Bar]]:
    """The bars of each network and data set, side by side, with a gap between clusters."""
    coloured = [*zip(groups, plotting.colours(groups), strict=True)]
    clusters: dict[tuple[str, str], list[Bar]] = {}
    place = 0
    for key in dict.fromkeys(group.place for group in groups):
        members = [one for one in coloured if one[0].place == key]
        clusters[key] = [(group, place + k, colour) for k, (group, colour) in enumerate(members)]
        place += len(members) + 1
    return clusters


def draw(
    groups: Sequence[Group], names: Sequence[str], stem: Path, reference: plotting.Reference = None, scale: str = "full"
) -> None:
    """Bars of each quantity.

    Args:
        groups: runs to compare.
        names: of the quantities, keys of `QUANTITIES`.
        stem: of the files.
        reference: (data set, network, scheme, ρ) -> the paper's value of each quantity.
        scale: see `plotting.new_figure`.
    """
    clusters = _clusters(groups)
    bars = [bar for cluster in clusters.values() for bar in cluster]
    is_wide = len(groups) > 6
    width = plotting.PAGE if is_wide else plotting.COLUMN
    figure = plotting.new_figure(width, 0.9 + 1.7 * len(names), plotting.caption(groups), scale)
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    rows: list[tuple[Any, ...]] = []
    handles: dict[str, Any] = {}  # of the legend
    for number, (axes, name) in enumerate(zip(panels, names, strict=True)):
        quantity = QUANTITIES[name]
        if name == "hours" and np.nanmax([group.mean("train_seconds") for group in groups]) < 720:
            quantity = QUANTITIES["minutes"]
        rows += _draw_panel(axes, quantity, bars)
        if reference and quantity is QUANTITIES[name]:
            known = [(place, reference.get(group.paper_key)) for group, place, _ in bars]
            plotting.mark_paper_values(axes.hlines, {place: values[number] for place, values in known if values})
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    middles = [float(np.mean([place for _, place, _ in cluster])) for cluster in clusters.values()]
    panels[-1].set_xticks(middles, ["\n".join(map(figure_text, cluster)) for cluster in clusters])
    look: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "handlelength": 1.5}
    figure.legend(handles.values(), handles.keys(), ncols=5 if is_wide else 3, **look)
    header = ["network", "dataset", "scheme", "quantity", "mean", "standard_deviation", "seeds"]
    plotting.save(figure, stem, header, rows)


def _draw_panel(axes: Axes, quantity: Quantity, bars: Sequence[Bar]) -> list[tuple[Any, ...]]:
    """Draw the bars of a quantity; returns a row of the CSV for each."""
    rows: list[tuple[Any, ...]] = []
    for group, place, colour in bars:
        values = quantity.factor * group.values(quantity.name)
        is_known = len(values) > 0
        mean, spread = float(values.mean()) if is_known else np.nan, plotting.deviation(values)
        rows.append((*group.place, group.label, quantity.label, mean, spread, len(group.runs)))
        height = mean if is_known else 0
        look: dict[str, Any] = {"color": colour, "hatch": group.look.hatch, "edgecolor": "white", "lw": 0}
        axes.bar(place, height, 0.8, yerr=spread or None, error_kw={"elinewidth": 0.8}, label=group.label, **look)
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
