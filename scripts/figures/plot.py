#!/usr/bin/env python
"""Draw finished runs as a figure or table of the paper.

curves            accuracy and loss over time, and a table (Figs 15 and 16)
bars              one number for each scheme, see --quantity (Figs 17, 19, 20, 22 and 23)
flops             FLOPs of each epoch (Fig 18)
maps              which tensors train in which epoch (Fig 21)
layers            accuracy and step time over how many of the last layers train (Fig 2)
importance        similarity of importance and overhead, over interval and batch size (Fig 7)
solver            training time and the solver's part in it over T_q (Fig 13b)
time_to_accuracy  speedup over the best baseline at equal accuracy (Table 2)

    python scripts/figures/plot.py curves logs/a logs/b
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotting  # first: it sets the import path
from plot_selecting import importance, solver
from plotting import (
    BLUE,
    COLUMN,
    PAGE,
    RED,
    FinishedRun,
    Group,
    Rows,
    Sheet,
    caption,
    deviation,
    mark_paper_values,
    seconds,
)

import utils
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.settings.flags import OneLineParser, path_to_write
from elastic_trainer.system.errors import UserError, figure_text

UNITS = (("h", 3600), ("min", 60), ("s", 1))  # of time, in seconds
ALIKE = ("model_name", "input_size", "batch_size", "num_classes", "alpha", "optimizer")  # in runs that are compared
QUANTITIES = {  # of bars: label, and factor times what value of summary.json
    "accuracy": ("test accuracy (%)", "final_accuracy", 100),
    "hours": ("training time (h)", "train_seconds", 1 / 3600),
    "minutes": ("training time (min)", "train_seconds", 1 / 60),
    "flops": ("training (TFLOPs)", "train_flops", 1e-12),
    "memory": ("peak memory (GB)", "peak_memory_mb", 1e-3),
    "energy": ("energy of training (J)", "energy_joules", 1),
}


def table(groups: Sequence[Group]) -> str:
    """Scheme, accuracy, time, and time and step over those of full training on the same data, as text."""
    rows = [["scheme", "test accuracy", "training s", "time / full training", "rho asked", "step / full step"]]
    for group in groups:
        full = [one for one in groups if one.train_type == "full_training" and one.place == group.place]
        time_ratio, step_ratio = (
            f"{group.mean(name) / full[0].mean(name):.2f}" if full and np.isfinite(group.mean(name)) else "-"
            for name in ("train_seconds", "median_step_ms")
        )
        accuracy, rho = f"{group.mean('final_accuracy'):.1%}", f"{group.rho:.2f}" if group.rho else "-"
        rows.append([group.look.label, accuracy, f"{group.mean('train_seconds'):.1f}", time_ratio, rho, step_ratio])
    return "\n".join(text_table(rows))


def check_alike(groups: Sequence[Group]) -> None:
    """Raise `UserError` if runs on one data set differ in a setting that must be the same to compare them."""
    first: dict[str, FinishedRun] = {}
    for group in groups:
        run = group.runs[0]
        other = first.setdefault(group.place[1], run)
        for key in ALIKE:
            if run.config.get(key) != other.config.get(key):
                raise UserError(f"{run.folder}: --{key} differs from that of {other.folder}; name runs of one setting")


def curves(groups: Sequence[Group], sheet: Sheet) -> None:
    """Accuracy over loss, a column for each data set. Time is training and testing, as in the paper.

    Open markers show `reference`: (data set, network, scheme, ρ) -> the paper's final accuracy in % and hours.
    """
    print(table(groups))
    datasets = [*dict.fromkeys(group.place[1] for group in groups)]
    longest = max(seconds(run)[-1] for group in groups for run in group.runs)
    unit, size = next((unit, size) for unit, size in UNITS if longest > 2 * size or size == 1)
    figure = sheet.figure(max(COLUMN, PAGE * len(datasets) / 3), 4.2, caption(groups))
    panels, rows = figure.subplots(2, len(datasets), squeeze=False, sharex="col"), Rows()
    for group in groups:
        above, below = panels[:, datasets.index(group.place[1])]
        times = np.mean([seconds(run) for run in group.runs], axis=0) / size
        for axes, name, factor in ((above, "test_accuracy", 100), (below, "test_loss", 1)):
            plotting.plot_band(axes, times, factor * np.array([run.column(name) for run in group.runs]), group)
        if group.paper_key in sheet.reference:
            percent, hours = sheet.reference[group.paper_key]
            label = "the paper's end" if group.look.label == "ElasticTrainer" else None
            look = {"marker": group.look.marker, "ls": "", "ms": 7, "mfc": "none", "mec": group.colour, "alpha": 0.5}
            above.plot(hours * 3600 / size, percent, label=label, **look)
        for run in group.runs:
            about = {"dataset": group.place[1], "scheme": group.label, "seed": run.config["seed"]}
            for row, when in zip(run.epochs, seconds(run).tolist(), strict=True):
                shown = {name: row[name] for name in ("epoch", "test_accuracy", "test_loss")}
                rows.append({**about, "seconds": when, **shown})
    for (above, below), name in zip(panels.T, datasets, strict=True):
        above.set_title(figure_text(name))
        below.set(xlabel=f"training and testing ({unit})", xlim=(0, None))
    panels[0][0].set_ylabel("test accuracy (%)")
    panels[1][0].set_ylabel("test loss")
    sheet.save(figure, rows, columns=4)


def bars(groups: Sequence[Group], sheet: Sheet, *names: str) -> None:
    """A panel for each of `names`, keys of `QUANTITIES`, and in it a cluster of bars for each network and data set.

    Error bars are one standard deviation over the seeds. A bar whose value the runs do not know, such as energy on a
    machine without a meter, is marked as unknown. `reference`: (data set, network, scheme, ρ) -> the paper's values.
    """
    clusters = [*dict.fromkeys(group.place for group in groups)]
    groups = sorted(groups, key=lambda group: clusters.index(group.place))
    places = [number + clusters.index(group.place) for number, group in enumerate(groups)]
    is_wide = len(groups) > 6
    figure = sheet.figure(PAGE if is_wide else COLUMN, 0.9 + 1.7 * len(names), caption(groups))
    panels, rows = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0], Rows()
    for number, (axes, name) in enumerate(zip(panels, names, strict=True)):
        is_short = name == "hours" and np.nanmax([group.mean("train_seconds") for group in groups]) < 720
        label, key, factor = QUANTITIES["minutes" if is_short else name]
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)
        for place, group in zip(places, groups, strict=True):
            values = factor * group.values(key)
            mean, spread = float(values.mean()) if len(values) else np.nan, deviation(values)
            look: dict[str, Any] = {"color": group.colour, "hatch": group.look.hatch, "edgecolor": "white", "lw": 0}
            height, style = np.nan_to_num(mean), {"error_kw": {"elinewidth": 0.8}, "label": group.label}
            drawn = axes.bar(place, height, 0.8, yerr=spread or None, **style, **look)
            text, turn = (f"{mean:.3g}", 0) if len(values) else ("unknown", 90)
            axes.bar_label(drawn, [text], fontsize=6, padding=1, rotation=turn)
            network, dataset = group.place
            about = {"network": network, "dataset": dataset, "scheme": group.label, "quantity": label}
            rows.append({**about, "mean": mean, "standard_deviation": spread, "seeds": len(group.runs)})
            paper = None if is_short else sheet.reference.get(group.paper_key)
            if paper:
                mark_paper_values(axes.hlines, {place: paper[number]})
        if all(np.isnan(row["mean"]) for row in rows[-len(groups) :]):
            axes.set(ylim=(0, 1), yticks=[])
    middles = [np.mean([p for p, g in zip(places, groups, strict=True) if g.place == one]) for one in clusters]
    panels[-1].set_xticks(middles, ["\n".join(map(figure_text, cluster)) for cluster in clusters])
    sheet.save(figure, rows, columns=5 if is_wide else 3)


def flops(groups: Sequence[Group], sheet: Sheet) -> None:
    """A line for each scheme and budget."""
    figure, rows = sheet.figure(COLUMN, 2.8, caption(groups)), Rows()
    axes = figure.add_subplot(xlabel="epoch", ylabel="training (TFLOPs an epoch)")
    for group in groups:
        each = np.array([np.diff([0.0, *run.column("train_flops")]) / 1e12 for run in group.runs])
        plotting.plot_band(axes, np.arange(1, each.shape[1] + 1), each, group)
        for run, values in zip(group.runs, each, strict=True):
            about = {"scheme": group.label, "seed": run.config["seed"]}
            rows += [{**about, "epoch": epoch, "tflops": value} for epoch, value in enumerate(values, 1)]
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    sheet.save(figure, rows)


def maps(groups: Sequence[Group], sheet: Sheet) -> None:
    """A map for each network, data set and budget, of its first seed."""
    groups = [replace(group, runs=group.runs[:1]) for group in groups]
    figure, rows = sheet.figure(max(COLUMN, 1.75 * len(groups)), 3.2, caption(groups)), Rows()
    for group, axes in zip(groups, figure.subplots(1, len(groups), squeeze=False)[0], strict=True):
        [run] = group.runs
        epochs, chosen, _ = run.selections()
        edges = [*epochs, run.summary["epochs"]]
        network, dataset = map(figure_text, group.place)
        axes.set(xlabel="epoch", title=f"{network}\n{dataset}, ρ={100 * (group.rho or 1):g}%")
        plotting.draw_map(axes, edges, chosen)
        for epoch, mask in zip(epochs, chosen, strict=True):
            about = {"run": run.config["run_name"], "epoch": epoch}
            rows += [{**about, "tensor": tensor, "trained": int(one)} for tensor, one in enumerate(mask)]
    figure.axes[0].set_ylabel("tensor (0 is next to the input; blue: trained)")
    sheet.save(figure, rows)


def layers(groups: Sequence[Group], sheet: Sheet) -> None:
    """Accuracy and the median step over how many of the last layers train."""
    groups = sorted(groups, key=lambda group: group.config["trained_layers"])
    counts = [group.config["trained_layers"] for group in groups]
    rows: Rows = [{"layers": count} for count in counts]
    figure = sheet.figure(COLUMN, 2.6, caption(groups))
    left = figure.add_subplot(xlabel="trained layers, from the output", ylabel="test accuracy (%)")
    right = plotting.twin(left, "median step (ms)")
    for axes, name, label, key, factor, colour, marks in (
        (left, "accuracy", "accuracy", "final_accuracy", 100, BLUE, "o-"),
        (right, "step_ms", "step", "median_step_ms", 1, RED, "s--"),
    ):
        for row, group in zip(rows, groups, strict=True):
            values = factor * group.values(key)
            row |= {name: values.mean(), f"{name}_sd": deviation(values)}
        means, spreads = zip(*((row[name], row[f"{name}_sd"]) for row in rows), strict=True)
        axes.errorbar(counts, means, spreads if any(spreads) else None, fmt=marks, color=colour, label=label)
        axes.set_ylim(bottom=0)
    sheet.save(figure, rows)


def time_to(run: FinishedRun, accuracy: float) -> float:
    """Seconds of training and testing until the first epoch that reaches `accuracy`; inf if none does."""
    reached = np.flatnonzero(np.array(run.column("test_accuracy")) >= accuracy)
    return float(seconds(run)[reached[0]]) if len(reached) else np.inf


def _speedup(dataset: str, accuracy: float, elastic: Group, baselines: Sequence[Group]) -> dict[str, Any]:
    """The baseline is the fastest in the mean over seeds; speedups are of equal seeds."""
    ours, *others = (group.values(lambda run: time_to(run, accuracy)) for group in (elastic, *baselines))
    best = int(np.argmin([times.mean() for times in others]))
    with np.errstate(invalid="ignore"):
        speedups = others[best][: len(ours)] / ours
    return {
        "dataset": dataset,
        "accuracy": accuracy,
        "elastic_seconds": float(ours.mean()),
        "best_baseline": baselines[best].label,
        "baseline_seconds": float(others[best].mean()),
        "speedup": float(speedups.mean()),
        "speedup_sd": deviation(speedups) if np.isfinite(speedups).all() else 0.0,
    }


def time_to_accuracy(groups: Sequence[Group], sheet: Sheet) -> None:
    """The best baseline's time over elastic training's, at three accuracies that elastic training reached.

    `reference`: data set -> the paper's (accuracy, speedup), which replace 90, 95 and 100 % of the best accuracy. A bar
    without a speedup says why.
    """
    rows, marks = Rows(), dict[int, float]()
    for dataset in dict.fromkeys(group.place[1] for group in groups):
        here = [group for group in groups if group.place[1] == dataset]
        found = [group for group in here if group.train_type == "elastic_training"]
        baselines = [group for group in here if group.rho is None]
        if len(found) != 1 or not baselines:
            raise UserError(f"time_to_accuracy: needs elastic training of one budget and a baseline on {dataset}")
        [elastic] = found
        best = min(max(run.column("test_accuracy")) for run in elastic.runs)
        paper = sheet.reference.get(elastic.config["dataset_name"]) if elastic.paper_key else None
        for accuracy, speedup in paper or [(share * best, None) for share in (0.9, 0.95, 1)]:
            if speedup:
                marks[len(rows)] = speedup
            rows.append(_speedup(dataset, accuracy, elastic, baselines))
    figure = sheet.figure(COLUMN, 2.4, caption(groups))
    axes = figure.add_subplot(ylabel="speedup over the best baseline")
    labels = [f"{figure_text(row['dataset'])}\n{100 * row['accuracy']:.1f} %" for row in rows]
    spreads = [row["speedup_sd"] for row in rows]
    heights = [row["speedup"] if np.isfinite(row["speedup"]) else 0 for row in rows]
    drawn = axes.bar(labels, heights, yerr=spreads if any(spreads) else None, color=BLUE)
    why = ["no baseline" if np.isfinite(row["elastic_seconds"]) else "not reached" for row in rows]
    texts = [f"{height:.2f}×" if height else reason for height, reason in zip(heights, why, strict=True)]
    axes.bar_label(drawn, texts, fontsize=6, padding=1)
    axes.axhline(1, color="0.4", lw=0.8, ls=":")
    axes.margins(y=0.15)
    mark_paper_values(axes.hlines, marks)
    sheet.save(figure, rows)


KINDS: dict[str, Callable[..., None]] = {  # take groups, a sheet, and of bars the quantities
    "curves": curves,
    "bars": bars,
    "flops": flops,
    "maps": maps,
    "layers": layers,
    "importance": importance,
    "solver": solver,
    "time_to_accuracy": time_to_accuracy,
}


def main() -> None:
    parser = OneLineParser(prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--output", type=path_to_write, metavar="STEM", help="default: figures/<kind>")
    parser.add_argument("--quantity", nargs="+", choices=[*QUANTITIES], default=["accuracy", "hours"], help="of bars")
    args = parser.parse_args()
    groups = plotting.group_runs(args.runs)
    if args.kind == "curves":
        check_alike(groups)
    quantities = args.quantity if args.kind == "bars" else []
    KINDS[args.kind](groups, Sheet(args.output or Path("figures") / args.kind), *quantities)


if __name__ == "__main__":
    utils.run_cli(main)
