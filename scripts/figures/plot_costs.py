#!/usr/bin/env python
"""What elastic training costs and what drives it, from finished runs and their timing tables.

layers            accuracy and step time over how many of the last layers train (the paper's Fig 2)
importance        similarity of importance and overhead, over interval and batch size (Fig 7)
solver            time reached and solver's overhead over T_q (Fig 13b), subproblems (Fig 13a)
profiling         seconds of profiling over those of an epoch (Table 1)
time_to_accuracy  speedup over the best baseline at equal accuracy (Table 2)

python scripts/plot_costs.py importance logs/a logs/b
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotting
from plot_accuracy_time import seconds
from plot_epochs import read_selections
from plotting import FinishedRun, Group

import utils
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.settings import PAPER
from utils import UserError


def draw_layers(groups: Sequence[Group], stem: Path) -> None:
    """Fig 2: last layers that train against accuracy, and against the median step."""
    found = sorted(groups, key=_layers)
    figure = plotting.new_figure(plotting.COLUMN, 2.6, plotting.setting(found))
    left = figure.add_subplot(xlabel="trained layers, from the output", ylabel="test accuracy (%)")
    right = left.twinx()
    right.set_ylabel("median step (ms)")
    right.grid(visible=False)
    counts = [_layers(group) for group in found]
    accuracy, step_ms = (
        [(group.mean(of), group.spread(of)) for group in found]
        for of in (lambda run: 100 * run.summary["final_accuracy"], lambda run: run.summary["median_step_ms"])
    )
    for axes, values, colour, marker, dashes, label in (
        (left, accuracy, "#0072b2", "o", "-", "accuracy"),
        (right, step_ms, "#d55e00", "s", "--", "step"),
    ):
        means, spreads = np.array(values).T
        axes.errorbar(
            counts, means, spreads if spreads.any() else None, color=colour, marker=marker, ls=dashes, label=label
        )
        axes.set_ylim(bottom=0)
    handles = [axes.get_legend_handles_labels() for axes in (left, right)]
    figure.legend(
        handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], loc="outside lower center", ncols=2, frameon=False
    )
    rows = [(count, *one, *two) for count, one, two in zip(counts, accuracy, step_ms, strict=True)]
    plotting.save(figure, stem, ["layers", "accuracy", "accuracy_sd", "step_ms", "step_ms_sd"], rows)


def _layers(group: Group) -> int:
    return int(group.first.config["trained_layers"])


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two vectors of importance."""
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def _training_seconds(run: FinishedRun) -> float:
    """Of an epoch, without selecting."""
    return float(run.summary["train_seconds"] - run.summary["selection_seconds"]) / int(run.summary["epochs"])


def _by_interval(run: FinishedRun) -> list[tuple[float, float, float]]:
    """Epochs apart, mean similarity of the importance so far apart, overhead in % of selecting so seldom."""
    _, _, vectors = read_selections(run)
    once = run.summary["selection_seconds"] / len(vectors)
    rows = []
    for apart in range(1, len(vectors)):
        pairs = [similarity(vectors[k], vectors[k + apart]) for k in range(len(vectors) - apart)]
        rows.append((float(apart), float(np.mean(pairs)), 100 * once / (apart * _training_seconds(run))))
    return rows


def draw_importance(groups: Sequence[Group], stem: Path) -> None:
    """Fig 7: a from the run with a selection every epoch, b from the first selections of runs by batches.

    a: similarity of vectors so many epochs apart (mean over all such pairs). b: similarity with the vector of most
    images. Overhead: one selection, compiling included, over the training between two.
    """
    steady = [g for g in groups if g.first.config["importance_batches"] == 1 and g.first.summary["epochs"] > 2]
    by_batches = sorted(
        (group for group in groups if group.first.config["max_steps"]),
        key=lambda group: group.first.config["importance_batches"],
    )
    if not steady or not by_batches:
        raise UserError("importance: needs a run with a selection every epoch and runs with --importance_batches")
    rows: list[tuple[Any, ...]] = [("interval", *row) for row in np.mean([*map(_by_interval, steady[0].runs)], axis=0)]
    training = float(np.mean([_training_seconds(run) for run in steady[0].runs]))
    first = {id(run): read_selections(run)[2][0] for group in by_batches for run in group.runs}
    most = {run.config["seed"]: first[id(run)] for run in by_batches[-1].runs}
    for group in by_batches:
        images = group.first.config["importance_batches"] * group.first.config["batch_size"]
        alike = [
            similarity(first[id(run)], most[run.config["seed"]]) for run in group.runs if run.config["seed"] in most
        ]
        share = 100 * group.mean(lambda run: run.summary["selection_seconds"]) / training
        rows.append(("images", images, float(np.mean(alike)), share))
    figure = plotting.new_figure(plotting.PAGE, 2.4, plotting.setting(groups))
    for index, (kind, label) in enumerate((("interval", "interval (epochs)"), ("images", "images measured on"))):
        values = np.array([row[1:] for row in rows if row[0] == kind])
        axes = figure.add_subplot(
            1, 2, index + 1, xlabel=label, ylabel="similarity", ylim=(min(0, values[:, 1].min()), 1.05)
        )
        axes.plot(values[:, 0], values[:, 1], "o-", color="#0072b2", label="similarity")
        overhead = axes.twinx()
        overhead.plot(values[:, 0], values[:, 2], "s--", color="#d55e00", label="overhead")
        overhead.set_ylabel("overhead (% of training)")
        overhead.set_ylim(bottom=0)
        overhead.grid(visible=False)
        if kind == "images":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
    lines = [*axes.get_lines(), *overhead.get_lines()]
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside lower center", ncols=2, frameon=False)
    plotting.save(figure, stem, ["kind", "value", "similarity", "overhead_percent"], rows)


def draw_subproblems(stem: Path) -> None:
    """Fig 13a: entries that the solver's table has, and the paper's recursion visits, on made-up networks."""
    import benchmark_solver

    rows = []
    for tensors in (50, 100, benchmark_solver.RESNET50):
        record = benchmark_solver.measure_recursion(tensors, 1_000, quick=True)
        rows.append((tensors, record["recursion_subproblems"], record["solve_subproblems"]))
    figure = plotting.new_figure(plotting.COLUMN, 2.4, "made-up networks, $T_q$ = 1,000")
    axes = figure.add_subplot(yscale="log", xlabel="tensors", ylabel="subproblems")
    places = np.arange(len(rows))
    for shift, index, label, colour, hatch in (
        (-0.2, 1, "the paper's recursion", "#d55e00", "///"),
        (0.2, 2, "here", "#0072b2", ""),
    ):
        bars = axes.bar(
            places + shift, [row[index] for row in rows], 0.4, color=colour, hatch=hatch, edgecolor="white", label=label
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=6)
    axes.set_xticks(places, [str(row[0]) for row in rows])
    axes.margins(y=0.2)
    plotting.legend_below(figure, axes)
    plotting.save(figure, stem, ["tensors", "recursion_subproblems", "subproblems"], rows)


def draw_solver(
    groups: Sequence[Group], stem: Path, reference: Mapping[Any, Sequence[Sequence[float]]] | None = None
) -> None:
    """Fig 13b: the selections of a run solved anew with other T_q; `reference`: network -> the paper's two curves."""
    run = groups[0].first
    args = parse_main([*map(str, run.config["command"])])
    args.num_classes = run.config["num_classes"]
    model, table = plotting.network_and_table(args)
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.select import select_tensors

    head, runs = head_mask(model), groups[0].runs
    vectors = np.concatenate([read_selections(run)[2] for run in runs])
    training = sum(run.summary["train_seconds"] for run in runs)
    rows: list[tuple[Any, ...]] = []
    for resolution in (10, 100, 1_000, 10_000, 100_000):
        took, reached = [], []
        for importance in vectors:
            begin = time.perf_counter()
            choice = select_tensors(table, importance, head, args.rho, resolution)
            took.append(time.perf_counter() - begin)
            reached.append((choice.predicted_step_ms or 0) / table.full_step_ms)
        share = 100 * float(np.median(took)) * len(vectors) / training
        rows.append((resolution, 100 * float(np.mean(reached)), 1e3 * float(np.median(took)), share))
    figure = plotting.new_figure(plotting.PAGE, 2.4, plotting.setting(groups))
    values = np.array(rows)
    reached_axes = figure.add_subplot(1, 2, 1, xscale="log", xlabel="$T_q$", ylabel="step over full (%)")
    reached_axes.plot(values[:, 0], values[:, 1], "o-", color="#0072b2")
    reached_axes.axhline(100 * args.rho, color="0.4", ls=":", lw=0.8)
    solver_axes = figure.add_subplot(
        1, 2, 2, xscale="log", yscale="log", xlabel="$T_q$", ylabel="solver (% of training)"
    )
    solver_axes.plot(values[:, 0], values[:, 3], "s--", color="#d55e00")
    if reference and groups[0].paper_key:
        for axes, curve in zip((reached_axes, solver_axes), reference.get(run.config["model_name"], ()), strict=False):
            axes.plot(values[:, 0], curve, "_", color="black", ms=9, alpha=0.5, label="the paper's")
            axes.legend()
    columns = ["time_resolution", "step_over_full_percent", "solver_ms", "solver_percent_of_training"]
    plotting.save(figure, stem, columns, rows)


def draw_profiling(
    steps: Mapping[Path, int], stem: Path, reference: Mapping[Any, Sequence[float]] | None = None
) -> None:
    """Table 1: seconds of profiling over those of an epoch of full training.

    Args:
        steps: folder of a timing table -> steps of an epoch.
        stem: of the files.
        reference: network -> the paper's percentage.
    """
    rows, told = [], []
    for folder, count in steps.items():
        record = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
        epoch = count * record["full_step_ms"] / 1e3
        rows.append((folder.name, record["profiling_seconds"], epoch, 100 * record["profiling_seconds"] / epoch))
        if reference and record.get("model_name") in reference and record["input_size"] == PAPER["input_size"]:
            told.append((len(rows) - 1, *reference[record["model_name"]]))
    names = "network, pixels, classes, batch"
    figure = plotting.new_figure(
        plotting.COLUMN, 2.0, f"time of profiling, once, over that of one epoch of full training ({names})"
    )
    axes = figure.add_subplot(xlabel="% of an epoch")
    bars = axes.barh([row[0] for row in rows], [row[3] for row in rows], color="#0072b2")
    axes.bar_label(bars, [f"{row[3]:.0f}" if row[3] >= 100 else f"{row[3]:.2g}" for row in rows], fontsize=6, padding=2)
    for place, percent in told:
        axes.vlines(percent, place - 0.4, place + 0.4, color="black", alpha=0.5, label="the paper's")
    if told:
        axes.legend(*([found[0]] for found in axes.get_legend_handles_labels()))
    axes.margins(x=0.15)
    axes.invert_yaxis()
    plotting.save(figure, stem, ["table", "profiling_seconds", "epoch_seconds", "percent"], rows)


def time_to(run: FinishedRun, accuracy: float) -> float:
    """Seconds of training and testing until the first epoch that reaches `accuracy`; inf where none does."""
    reached = np.flatnonzero(np.array(run.column("test_accuracy")) >= accuracy)
    return float(seconds(run)[reached[0]]) if len(reached) else np.inf


def draw_time_to_accuracy(
    groups: Sequence[Group], stem: Path, reference: Mapping[Any, Sequence[Sequence[float]]] | None = None
) -> None:
    """Table 2: the best baseline's time over elastic training's, at three accuracies that elastic training reached.

    `reference`: data set -> the paper's three accuracies, which then take the place of 90, 95 and 100 % of the best,
    and its speedup at each. The baseline is the best by the mean over seeds; speedups are of equal seeds.
    """
    rows: list[tuple[Any, ...]] = []
    marks: list[float | None] = []
    for data in dict.fromkeys(plotting.dataset(group.first) for group in groups):
        here = [group for group in groups if plotting.dataset(group.first) == data]
        found = [group for group in here if group.first.summary["train_type"] == "elastic_training"]
        others = [group for group in here if not group.first.summary["train_type"].startswith("elastic_training")]
        if len(found) != 1 or not others:
            raise UserError(f"time_to_accuracy: needs elastic training of one budget and a baseline on {data}")
        [elastic] = found
        best = min(max(run.column("test_accuracy")) for run in elastic.runs)
        told = (reference or {}).get(elastic.first.config["dataset_name"]) if elastic.paper_key else None
        for accuracy, mark in told or ((0.9 * best, None), (0.95 * best, None), (best, None)):
            times = {id(group): np.array([time_to(run, accuracy) for run in group.runs]) for group in here}
            own, baseline = times[id(elastic)], min(others, key=lambda group: times[id(group)].mean())
            with np.errstate(invalid="ignore"):
                speedups = times[id(baseline)][: len(own)] / own
            spread = speedups.std(ddof=1) if len(own) > 1 and np.isfinite(speedups).all() else 0.0
            means = (float(value.mean()) for value in (own, times[id(baseline)], speedups))
            own_seconds, baseline_seconds, speedup = means
            rows.append((data, accuracy, own_seconds, baseline.label, baseline_seconds, speedup, float(spread)))
            marks.append(mark)
    figure = plotting.new_figure(plotting.COLUMN, 2.4, plotting.setting(groups))
    axes = figure.add_subplot(ylabel="speedup over the best baseline")
    labels = [f"{row[0]}\n{100 * row[1]:.1f} %" for row in rows]
    finite = [row[5] if np.isfinite(row[5]) else 0 for row in rows]
    spreads = [row[6] for row in rows]
    bars = axes.bar(labels, finite, yerr=spreads if any(spreads) else None, color="#0072b2")
    for place, mark in enumerate(marks):
        if mark is not None:
            axes.hlines(mark, place - 0.4, place + 0.4, color="black", alpha=0.5, label="the paper's")
    if any(marks):
        axes.legend(*([found[0]] for found in axes.get_legend_handles_labels()))
    texts = [
        f"{row[5]:.2f}×" if np.isfinite(row[5]) else "no baseline" if np.isfinite(row[2]) else "not reached"
        for row in rows
    ]
    axes.bar_label(bars, texts, fontsize=6, padding=1)
    axes.axhline(1, color="0.4", lw=0.8, ls=":")
    axes.margins(y=0.15)
    columns = ["dataset", "accuracy", "elastic_seconds", "best_baseline", "baseline_seconds", "speedup", "speedup_sd"]
    plotting.save(figure, stem, columns, rows)


KINDS = {
    "layers": draw_layers,
    "importance": draw_importance,
    "solver": draw_solver,
    "time_to_accuracy": draw_time_to_accuracy,
}


if __name__ == "__main__":
    utils.run_cli(lambda: plotting.draw_by_name(__doc__, KINDS))
