#!/usr/bin/env python
"""Draw finished runs as a figure or table of the paper.

curves            accuracy and loss over time, and a table (Figs 15 and 16)
bars              one number for each scheme, see --quantity (Figs 17, 19, 20, 22 and 23)
flops             FLOPs of each epoch (Fig 18)
maps              which tensors train in which epoch (Fig 21)
layers            accuracy and step time over how many of the last layers train (Fig 2)
importance        similarity of importance and overhead, over interval and batch size (Fig 7)
solver            resulting time and the solver's overhead over T_q (Fig 13b)
time_to_accuracy  speedup over the best baseline at equal accuracy (Table 2)

    python scripts/figures/plot.py curves logs/a logs/b
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plot_costs
import plotting
from plotting import FinishedRun, Group, seconds

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.options import stem_to_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = (("h", 3600), ("min", 60), ("s", 1))  # of time, in seconds


def table(groups: Sequence[Group]) -> str:
    """Scheme, accuracy, time, and time and step over those of full training on the same data, as text."""
    rows = [["scheme", "test accuracy", "training s", "time / full training", "rho asked", "rho measured"]]
    for group in groups:
        full = [one for one in groups if one.train_type == "full_training" and one.place == group.place]
        seconds_over_full, step_over_full = (
            _ratio(group.mean(name), full[0].mean(name) if full else np.nan)
            for name in ("train_seconds", "median_step_ms")
        )
        rho, accuracy = group.first.summary["rho"], f"{group.mean('final_accuracy'):.1%}"
        cells = [group.look.label, accuracy, f"{group.mean('train_seconds'):.1f}", seconds_over_full]
        rows.append([*cells, f"{rho:.2f}" if rho else "-", step_over_full])
    return "\n".join(text_table(rows))


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


def draw_curves(groups: Sequence[Group], stem: Path, reference: plotting.Reference = None, scale: str = "full") -> None:
    """Accuracy over loss, a column for each data set. Time is training and testing, as in the paper.

    Runs that differ in their seed alone make one curve: the mean, with a band of one standard deviation.

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


def draw_bars(
    groups: Sequence[Group], names: Sequence[str], stem: Path, reference: plotting.Reference = None, scale: str = "full"
) -> None:
    """A panel for each quantity, and in it a cluster of bars for each network and data set.

    Error bars are one standard deviation over the seeds. A bar whose value the runs do not know, such as energy on a
    machine without a meter, is marked as unknown.

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


# (groups, stem, scale=…), and with reference=… if the paper's values can be marked
KINDS: dict[str, Callable[..., None]] = {
    "curves": draw_curves,
    "bars": draw_bars,
    "flops": plot_costs.draw_flops,
    "maps": plot_costs.draw_maps,
    "layers": plot_costs.draw_layers,
    "importance": plot_costs.draw_importance,
    "solver": plot_costs.draw_solver,
    "time_to_accuracy": plot_costs.draw_time_to_accuracy,
}


def draw(
    kind: str,
    groups: Sequence[Group],
    stem: Path,
    quantities: Sequence[str] = (),
    reference: plotting.Reference = None,
    scale: str = "full",
) -> None:
    """Draw a figure, and print a table beside curves.

    Args:
        kind: a key of `KINDS`.
        groups: runs to draw.
        stem: of the files.
        quantities: of bars, keys of `QUANTITIES`.
        reference: values of the paper, if they are to be marked; only kinds that can mark them take it.
        scale: see `plotting.new_figure`.
    """
    if kind == "curves":
        print(table(groups))
    marks = {} if reference is None else {"reference": reference}
    KINDS[kind](groups, *([quantities] if kind == "bars" else []), stem, scale=scale, **marks)


def main() -> None:
    parser = OneLineParser(prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--output", type=stem_to_write, metavar="STEM", help="default: figures/<kind>")
    parser.add_argument("--quantity", nargs="+", choices=[*QUANTITIES], default=["accuracy", "hours"], help="of bars")
    args = parser.parse_args()
    groups = plotting.group_runs(args.runs)
    if args.kind == "curves":
        check_alike(groups)
    draw(args.kind, groups, args.output or Path("figures") / args.kind, args.quantity)


if __name__ == "__main__":
    utils.run_cli(main)
