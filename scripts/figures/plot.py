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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotting  # first: it sets the import path
from plotting import COLUMN, PAGE, FinishedRun, Group, Sheet, caption, deviation, mark_paper_values, seconds

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.options import stem_to_write
from elastic_trainer.registry import SCHEMES
from elastic_trainer.settings import PAPER
from elastic_trainer.timing.table import read_profile

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
BLUE, RED = "#0072b2", "#d55e00"
Rows = list[dict[str, Any]]  # of a figure's CSV file


def table(groups: Sequence[Group]) -> str:
    """Scheme, accuracy, time, and time and step over those of full training on the same data, as text."""
    rows = [["scheme", "test accuracy", "training s", "time / full training", "rho asked", "rho measured"]]
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
    for run in (group.runs[0] for group in groups):
        other = first.setdefault(run.config["dataset_name"], run)
        for key in ALIKE:
            if run.config.get(key) != other.config.get(key):
                raise UserError(f"{run.folder}: --{key} differs from that of {other.folder}; name runs of one setting")


def curves(groups: Sequence[Group], sheet: Sheet) -> None:
    """Accuracy over loss, a column for each data set. Time is training and testing, as in the paper.

    Open markers show `reference`: (data set, network, scheme, ρ) -> the paper's final accuracy in % and hours. Faint
    lines show `recorded`.
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
        for axes, name, factor in ((above, "test/accuracy", 100), (below, "test/loss", 1)):
            points = np.array(sheet.recorded.get(group.paper_key or "", {}).get(name, []), float).reshape(-1, 2)
            label = "recorded by the authors" if len(points) and group.look.label == "ElasticTrainer" else None
            look = {"color": group.colour, "ls": group.look.dashes, "alpha": 0.4, "label": label}
            axes.plot(points[:, 0] / size, factor * points[:, 1], **look)
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
        edges = np.array([*epochs, run.summary["epochs"]])
        network, dataset = map(figure_text, group.place)
        axes.set(xlabel="epoch", title=f"{network}\n{dataset}, ρ={100 * (group.rho or 1):g}%")
        axes.pcolormesh(edges, np.arange(chosen.shape[1] + 1) - 0.5, chosen.T, cmap="Blues", vmin=0, vmax=1.25)
        axes.vlines(edges[1:-1], -0.5, chosen.shape[1] - 0.5, color="0.6", lw=0.4)
        axes.grid(visible=False)
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


def importance(groups: Sequence[Group], sheet: Sheet) -> None:
    """Left, over the interval: from the run with a selection every epoch, of all pairs of vectors at each distance.

    Right, over the images: from the first selections of runs that measure on more batches, with that of most images.
    Overhead: time of one selection, compiling included, over the training between two.
    """
    steady = [g for g in groups if g.config["importance_batches"] == 1 and g.runs[0].summary["epochs"] > 2]
    by_batches = [group for group in groups if group.config["max_steps"]]
    if not steady or not by_batches:
        raise UserError("importance: needs a run with a selection every epoch and runs with --importance_batches")
    runs = steady[0].runs
    epoch_seconds = float(np.mean([_epoch_seconds(run) for run in runs]))
    figure, rows = sheet.figure(PAGE, 2.4, caption(groups)), Rows()
    panels = figure.subplots(1, 2)
    for axes, label, kind, values in (
        (panels[0], "interval (epochs)", "interval", np.mean([_by_interval(run) for run in runs], axis=0)),
        (panels[1], "images measured on", "images", np.array(_by_images(by_batches, epoch_seconds))),
    ):
        places, alike, overhead = values.T
        axes.set(xlabel=label, ylabel="similarity", ylim=(min(0, alike.min()), 1.05))
        axes.plot(places, alike, "o-", color=BLUE, label="similarity")
        right = plotting.twin(axes, "overhead (% of training)")
        right.plot(places, overhead, "s--", color=RED, label="overhead")
        right.set_ylim(bottom=0)
        for place, one, percent in values:
            value = int(place) if kind == "images" else place
            rows.append({"kind": kind, "value": value, "similarity": one, "overhead_percent": percent})
    panels[1].set_xscale("log", base=2)
    panels[1].xaxis.set_major_formatter("{x:g}")
    sheet.save(figure, rows)


def _epoch_seconds(run: FinishedRun) -> float:
    """Training time of an epoch without selecting."""
    return float(run.summary["train_seconds"] - run.summary["selection_seconds"]) / int(run.summary["epochs"])


def _similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two vectors of importance."""
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def _by_interval(run: FinishedRun) -> list[tuple[float, float, float]]:
    """(Distance in epochs, mean similarity of importance at that distance, overhead of selecting so seldom in %)."""
    vectors = run.selections().importance
    overhead = 100 * run.summary["selection_seconds"] / len(vectors) / _epoch_seconds(run)
    rows = []
    for distance in range(1, len(vectors)):
        alike = [_similarity(*pair) for pair in zip(vectors, vectors[distance:], strict=False)]
        rows.append((float(distance), float(np.mean(alike)), overhead / distance))
    return rows


def _by_images(groups: Sequence[Group], epoch_seconds: float) -> list[tuple[float, float, float]]:
    """(Images, similarity of the first importance with that of most images, overhead in %); fewest images first."""
    groups = sorted(groups, key=lambda group: group.config["importance_batches"])
    first = [{run.config["seed"]: run.selections().importance[0] for run in group.runs} for group in groups]
    rows = []
    for group, vectors in zip(groups, first, strict=True):
        images = group.config["importance_batches"] * group.config["batch_size"]
        alike = [_similarity(vector, first[-1][seed]) for seed, vector in vectors.items() if seed in first[-1]]
        rows.append((images, float(np.mean(alike)), 100 * group.mean("selection_seconds") / epoch_seconds))
    return rows


def solver(groups: Sequence[Group], sheet: Sheet) -> None:
    """The selections of a run solved again with other T_q; `reference`: network -> the paper's two curves."""
    rho, rows = _solved_again(groups[0])
    figure = sheet.figure(PAGE, 2.4, caption(groups))
    resolutions, shares, _, percents = np.array([[*row.values()] for row in rows]).T
    left, right = figure.subplots(1, 2)
    left.set(xscale="log", xlabel="$T_q$", ylabel="step over full (%)")
    left.plot(resolutions, shares, "o-", color=BLUE)
    left.axhline(100 * rho, color="0.4", ls=":", lw=0.8)
    right.set(xscale="log", yscale="log", xlabel="$T_q$", ylabel="solver (% of training)")
    right.plot(resolutions, percents, "s--", color=RED)
    if groups[0].paper_key:
        paper = sheet.reference.get(groups[0].config["model_name"], ())
        for axes, curve in zip((left, right), paper, strict=False):
            axes.plot(resolutions, curve, "_", color="black", ms=9, alpha=0.5, label="the paper's")
    sheet.save(figure, rows)


def _solved_again(group: Group) -> tuple[float, Rows]:
    """rho, and for each T_q: mean step over a full step in %, median ms of solving, its share of training in %."""
    from runner import network_and_table

    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.select import select_tensors

    command = parse_training([*map(str, group.config["command"])]).with_choices_of(group.config)
    model, timing = network_and_table(command.with_classes(group.config["num_classes"]))
    head, rho = head_mask(model), command.training.rho
    vectors = np.concatenate([run.selections().importance for run in group.runs])
    train_seconds = sum(run.summary["train_seconds"] for run in group.runs)
    rows = Rows()
    for resolution in (10, 100, 1_000, 10_000, 100_000):
        solve_seconds, shares = [], []
        for vector in vectors:
            start = time.perf_counter()
            selection = select_tensors(timing, vector, head, rho, resolution)
            solve_seconds.append(time.perf_counter() - start)
            shares.append(selection.step_ms / timing.full_step_ms)
        median = float(np.median(solve_seconds))
        percent = 100 * median * len(vectors) / train_seconds
        of_time = {"step_over_full_percent": 100 * float(np.mean(shares)), "solver_ms": 1e3 * median}
        rows.append({"time_resolution": resolution, **of_time, "solver_percent_of_training": percent})
    return rho, rows


def subproblems(sheet: Sheet) -> None:
    """Fig 13a: subproblems of our solver and of the paper's recursion, on made-up networks."""
    from benchmark_solver import RESNET50_TENSORS, measure_recursion

    sizes = (50, 100, RESNET50_TENSORS)
    records = [measure_recursion(tensors, 1_000, quick=True) for tensors in sizes]
    figure = sheet.figure(COLUMN, 2.4, "made-up networks, $T_q$ = 1,000")
    axes = figure.add_subplot(yscale="log", xlabel="tensors", ylabel="subproblems")
    rows: Rows = [{"tensors": size} for size in sizes]
    for name, key, label, shift, colour, hatch in (
        ("recursion_subproblems", "recursion_subproblems", "the paper's recursion", -0.2, RED, "///"),
        ("subproblems", "solve_subproblems", "here", 0.2, BLUE, ""),
    ):
        for row, record in zip(rows, records, strict=True):
            row[name] = record[key]
        places, heights = np.arange(len(rows)) + shift, [row[name] for row in rows]
        drawn = axes.bar(places, heights, 0.4, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(drawn, fmt="%.2g", fontsize=6)
    axes.set_xticks(np.arange(len(rows)), [*map(str, sizes)])
    axes.margins(y=0.2)
    sheet.save(figure, rows)


def profiling(steps: Mapping[Path, int], sheet: Sheet) -> None:
    """Table 1: seconds of profiling over those of an epoch of full training; `reference`: network -> the paper's %.

    `steps`: folder of a timing table -> steps of an epoch.
    """
    names = "network, pixels, classes, batch"
    figure = sheet.figure(COLUMN, 2.0, f"time of profiling, once, over that of one epoch of full training ({names})")
    axes, rows = figure.add_subplot(xlabel="% of an epoch"), Rows()
    for place, (folder, count) in enumerate(steps.items()):
        record = read_profile(folder)
        spent, epoch = record["profiling_seconds"], count * record["full_step_ms"] / 1e3
        about = {"table": folder.name, "profiling_seconds": spent, "epoch_seconds": epoch}
        percent = 100 * spent / epoch
        rows.append({**about, "percent": percent})
        drawn = axes.barh(figure_text(folder.name), percent, color=BLUE)
        axes.bar_label(drawn, [f"{percent:.0f}" if percent >= 100 else f"{percent:.2g}"], fontsize=6, padding=2)
        if record.get("model_name") in sheet.reference and record["input_size"] == PAPER["input_size"]:
            mark_paper_values(axes.vlines, {place: sheet.reference[record["model_name"]][0]})
    axes.margins(x=0.15)
    axes.invert_yaxis()
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
        baselines = [group for group in here if not SCHEMES[group.train_type].is_elastic]
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
    parser.add_argument("--output", type=stem_to_write, metavar="STEM", help="default: figures/<kind>")
    parser.add_argument("--quantity", nargs="+", choices=[*QUANTITIES], default=["accuracy", "hours"], help="of bars")
    args = parser.parse_args()
    groups = plotting.group_runs(args.runs)
    if args.kind == "curves":
        check_alike(groups)
    quantities = args.quantity if args.kind == "bars" else []
    KINDS[args.kind](groups, Sheet(args.output or Path("figures") / args.kind), *quantities)


if __name__ == "__main__":
    utils.run_cli(main)
