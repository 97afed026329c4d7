"""What elastic training costs, and what that depends on, drawn from finished runs and their timing tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotting
from plotting import FinishedRun, Group, seconds
from solver_problems import RESNET50_TENSORS, measure_recursion

from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.registry import SCHEMES
from elastic_trainer.settings import PAPER
from elastic_trainer.timing.table_file import read_profile

BLUE, RED = "#0072b2", "#d55e00"


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


def draw_layers(groups: Sequence[Group], stem: Path, scale: str = "full") -> None:
    """Fig 2: accuracy and the median step over how many of the last layers train."""
    found = sorted(groups, key=_layers)
    counts = [_layers(group) for group in found]
    figure = plotting.new_figure(plotting.COLUMN, 2.6, plotting.caption(found), scale)
    left = figure.add_subplot(xlabel="trained layers, from the output", ylabel="test accuracy (%)")
    right = plotting.twin(left, "median step (ms)")
    lines, columns = list[Any](), []
    for axes, key, factor, colour, dashes in (
        (left, "final_accuracy", 100, BLUE, "o-"),
        (right, "median_step_ms", 1, RED, "s--"),
    ):
        values = [factor * group.values(key) for group in found]
        means, spreads = [one.mean() for one in values], [plotting.deviation(one) for one in values]
        lines.append(axes.errorbar(counts, means, spreads if any(spreads) else None, color=colour, fmt=dashes))
        axes.set_ylim(bottom=0)
        columns += [means, spreads]
    figure.legend(lines, ["accuracy", "step"], loc="outside lower center", ncols=2, frameon=False)
    header = ["layers", "accuracy", "accuracy_sd", "step_ms", "step_ms_sd"]
    plotting.save(figure, stem, header, [*zip(counts, *columns, strict=True)])


def _layers(group: Group) -> int:
    return int(group.first.config["trained_layers"])


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two vectors of importance."""
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def _epoch_seconds(run: FinishedRun) -> float:
    """Training time of an epoch without selecting."""
    return float(run.summary["train_seconds"] - run.summary["selection_seconds"]) / int(run.summary["epochs"])


def _by_interval(run: FinishedRun) -> list[tuple[float, float, float]]:
    """(Distance in epochs, mean similarity of importance at that distance, overhead of selecting so seldom in %)."""
    vectors = run.selections().importance
    selection_seconds = run.summary["selection_seconds"] / len(vectors)
    rows = []
    for distance in range(1, len(vectors)):
        alike = [similarity(*pair) for pair in zip(vectors, vectors[distance:], strict=False)]
        overhead = 100 * selection_seconds / (distance * _epoch_seconds(run))
        rows.append((float(distance), float(np.mean(alike)), overhead))
    return rows


def _by_images(groups: Sequence[Group], epoch_seconds: float) -> list[tuple[float, float, float]]:
    """(Images, similarity of the first importance with that of most images, overhead in %); fewest images first."""

    def first_importance(run: FinishedRun) -> np.ndarray:
        return run.selections().importance[0]

    most = {run.config["seed"]: first_importance(run) for run in groups[-1].runs}
    rows = []
    for group in groups:
        images = group.first.config["importance_batches"] * group.first.config["batch_size"]
        runs = [run for run in group.runs if run.config["seed"] in most]
        alike = [similarity(first_importance(run), most[run.config["seed"]]) for run in runs]
        share = 100 * group.mean("selection_seconds") / epoch_seconds
        rows.append((images, float(np.mean(alike)), share))
    return rows


def draw_importance(groups: Sequence[Group], stem: Path, scale: str = "full") -> None:
    """Fig 7: a from the run with a selection every epoch, b from the first selections of runs by batches.

    a: mean similarity of all pairs of vectors at each distance in epochs. b: similarity with the vector of most images.
    Overhead: time of one selection, compiling included, over the training between two.
    """
    steady = [g for g in groups if g.first.config["importance_batches"] == 1 and g.first.summary["epochs"] > 2]
    by_batches = sorted(
        (group for group in groups if group.first.config["max_steps"]),
        key=lambda group: group.first.config["importance_batches"],
    )
    if not steady or not by_batches:
        raise UserError("importance: needs a run with a selection every epoch and runs with --importance_batches")
    runs = steady[0].runs
    points = {
        "interval": np.mean([_by_interval(run) for run in runs], axis=0),
        "images": np.array(_by_images(by_batches, float(np.mean([_epoch_seconds(run) for run in runs])))),
    }
    figure = plotting.new_figure(plotting.PAGE, 2.4, plotting.caption(groups), scale)
    panels = figure.subplots(1, 2)
    for axes, label, (places, alike, overhead) in zip(
        panels, ("interval (epochs)", "images measured on"), (values.T for values in points.values()), strict=True
    ):
        axes.set(xlabel=label, ylabel="similarity", ylim=(min(0, alike.min()), 1.05))
        lines = axes.plot(places, alike, "o-", color=BLUE)
        right = plotting.twin(axes, "overhead (% of training)")
        lines += right.plot(places, overhead, "s--", color=RED)
        right.set_ylim(bottom=0)
    panels[1].set_xscale("log", base=2)
    panels[1].xaxis.set_major_formatter("{x:g}")
    figure.legend(lines, ["similarity", "overhead"], loc="outside lower center", ncols=2, frameon=False)
    rows = [(kind, *row) for kind, values in points.items() for row in values]
    rows = [(kind, int(value) if kind == "images" else value, *rest) for kind, value, *rest in rows]
    plotting.save(figure, stem, ["kind", "value", "similarity", "overhead_percent"], rows)


def draw_subproblems(stem: Path, scale: str = "full") -> None:
    """Fig 13a: subproblems of our solver and of the paper's recursion, on made-up networks."""
    rows = []
    for tensors in (50, 100, RESNET50_TENSORS):
        record = measure_recursion(tensors, 1_000, quick=True)
        rows.append((tensors, record["recursion_subproblems"], record["solve_subproblems"]))
    figure = plotting.new_figure(plotting.COLUMN, 2.4, "made-up networks, $T_q$ = 1,000", scale)
    axes = figure.add_subplot(yscale="log", xlabel="tensors", ylabel="subproblems")
    sizes, theirs, ours = zip(*rows, strict=True)
    places = np.arange(len(rows))
    for bars in (
        axes.bar(places - 0.2, theirs, 0.4, color=RED, hatch="///", edgecolor="white", label="the paper's recursion"),
        axes.bar(places + 0.2, ours, 0.4, color=BLUE, edgecolor="white", label="here"),
    ):
        axes.bar_label(bars, fmt="%.2g", fontsize=6)
    axes.set_xticks(places, [*map(str, sizes)])
    axes.margins(y=0.2)
    plotting.legend_below(figure, axes)
    plotting.save(figure, stem, ["tensors", "recursion_subproblems", "subproblems"], rows)


def _solved_again(group: Group) -> tuple[float, list[tuple[Any, ...]]]:
    """rho, and for each T_q: T_q, mean step over a full step in %, median ms of solving, its share of training in %."""
    config = group.first.config
    command = parse_training([*map(str, config["command"])]).with_choices_of(config)
    model, table = plotting.network_and_table(command.with_classes(config["num_classes"]))
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.select import select_tensors

    head, rho = head_mask(model), command.training.rho
    vectors = np.concatenate([run.selections().importance for run in group.runs])
    train_seconds = sum(run.summary["train_seconds"] for run in group.runs)
    rows: list[tuple[Any, ...]] = []
    for resolution in (10, 100, 1_000, 10_000, 100_000):
        solve_seconds, shares = [], []
        for importance in vectors:
            start = time.perf_counter()
            selection = select_tensors(table, importance, head, rho, resolution)
            solve_seconds.append(time.perf_counter() - start)
            shares.append(selection.step_ms / table.full_step_ms)
        median = float(np.median(solve_seconds))
        percent = 100 * median * len(vectors) / train_seconds
        rows.append((resolution, 100 * float(np.mean(shares)), 1e3 * median, percent))
    return rho, rows


def draw_solver(groups: Sequence[Group], stem: Path, reference: plotting.Reference = None, scale: str = "full") -> None:
    """Fig 13b: the selections of a run solved again with other T_q; `reference`: network -> the paper's two curves."""
    rho, rows = _solved_again(groups[0])
    figure = plotting.new_figure(plotting.PAGE, 2.4, plotting.caption(groups), scale)
    resolutions, shares, _, percents = np.array(rows).T
    left, right = figure.subplots(1, 2)
    left.set(xscale="log", xlabel="$T_q$", ylabel="step over full (%)")
    left.plot(resolutions, shares, "o-", color=BLUE)
    left.axhline(100 * rho, color="0.4", ls=":", lw=0.8)
    right.set(xscale="log", yscale="log", xlabel="$T_q$", ylabel="solver (% of training)")
    right.plot(resolutions, percents, "s--", color=RED)
    if reference and groups[0].paper_key:
        curves = reference.get(groups[0].first.config["model_name"], ())
        for axes, curve in zip((left, right), curves, strict=False):
            axes.plot(resolutions, curve, "_", color="black", ms=9, alpha=0.5, label="the paper's")
            axes.legend()
    columns = ["time_resolution", "step_over_full_percent", "solver_ms", "solver_percent_of_training"]
    plotting.save(figure, stem, columns, rows)


def draw_profiling(
    steps: Mapping[Path, int], stem: Path, reference: plotting.Reference = None, scale: str = "full"
) -> None:
    """Table 1: seconds of profiling over those of an epoch of full training.

    Args:
        steps: folder of a timing table -> steps of an epoch.
        stem: of the files.
        reference: network -> the paper's percentage.
        scale: see `plotting.new_figure`.
    """
    rows, paper_percents = [], {}
    for place, (folder, count) in enumerate(steps.items()):
        record = read_profile(folder)
        epoch = count * record["full_step_ms"] / 1e3
        rows.append((folder.name, record["profiling_seconds"], epoch, 100 * record["profiling_seconds"] / epoch))
        if reference and record.get("model_name") in reference and record["input_size"] == PAPER["input_size"]:
            [paper_percents[place]] = reference[record["model_name"]]
    names = "network, pixels, classes, batch"
    title = f"time of profiling, once, over that of one epoch of full training ({names})"
    figure = plotting.new_figure(plotting.COLUMN, 2.0, title, scale)
    axes = figure.add_subplot(xlabel="% of an epoch")
    bars = axes.barh([figure_text(row[0]) for row in rows], [row[3] for row in rows], color=BLUE)
    axes.bar_label(bars, [f"{row[3]:.0f}" if row[3] >= 100 else f"{row[3]:.2g}" for row in rows], fontsize=6, padding=2)
    if plotting.mark_paper_values(axes.vlines, paper_percents):
        plotting.legend_once(axes)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    plotting.save(figure, stem, ["table", "profiling_seconds", "epoch_seconds", "percent"], rows)


def time_to(run: FinishedRun, accuracy: float) -> float:
    """Seconds of training and testing until the first epoch that reaches `accuracy`; inf if none does."""
    reached = np.flatnonzero(np.array(run.column("test_accuracy")) >= accuracy)
    return float(seconds(run)[reached[0]]) if len(reached) else np.inf


class Speedup(NamedTuple):
    """A row of Table 2: times until `accuracy`, and the speedup of elastic training over the best baseline."""

    dataset: str
    accuracy: float
    elastic_seconds: float
    best_baseline: str
    baseline_seconds: float
    speedup: float
    speedup_sd: float


def _speedup(dataset: str, accuracy: float, elastic: Group, baselines: Sequence[Group]) -> Speedup:
    """The baseline is the fastest in the mean over seeds; speedups are of equal seeds."""
    times, name = min(
        ((one.values(lambda run: time_to(run, accuracy)), one.label) for one in baselines),
        key=lambda found: found[0].mean(),
    )
    elastic_times = elastic.values(lambda run: time_to(run, accuracy))
    with np.errstate(invalid="ignore"):
        speedups = times[: len(elastic_times)] / elastic_times
    spread = plotting.deviation(speedups) if np.isfinite(speedups).all() else 0.0
    means = [float(values.mean()) for values in (elastic_times, times, speedups)]
    return Speedup(dataset, accuracy, means[0], name, means[1], means[2], spread)


def _speedups(
    dataset: str, groups: Sequence[Group], reference: Mapping[Any, Any]
) -> list[tuple[Speedup, float | None]]:
    """The speedups on one data set, each with the paper's if the setting is the paper's."""
    found = [group for group in groups if group.train_type == "elastic_training"]
    baselines = [group for group in groups if not SCHEMES[group.train_type].is_elastic]
    if len(found) != 1 or not baselines:
        raise UserError(f"time_to_accuracy: needs elastic training of one budget and a baseline on {dataset}")
    [elastic] = found
    best = min(max(run.column("test_accuracy")) for run in elastic.runs)
    paper_values = reference.get(elastic.first.config["dataset_name"]) if elastic.paper_key else None
    points = paper_values or ((0.9 * best, None), (0.95 * best, None), (best, None))
    return [(_speedup(dataset, accuracy, elastic, baselines), paper_speedup) for accuracy, paper_speedup in points]


def draw_time_to_accuracy(
    groups: Sequence[Group], stem: Path, reference: plotting.Reference = None, scale: str = "full"
) -> None:
    """Table 2: the best baseline's time over elastic training's, at three accuracies that elastic training reached.

    `reference`: data set -> the paper's (accuracy, speedup), which replace 90, 95 and 100 % of the best accuracy. A bar
    without a speedup says why.
    """
    found: list[tuple[Speedup, float | None]] = []
    for dataset in dict.fromkeys(plotting.dataset_label(group.first) for group in groups):
        here = [group for group in groups if plotting.dataset_label(group.first) == dataset]
        found += _speedups(dataset, here, reference or {})
    rows = [row for row, _ in found]
    figure = plotting.new_figure(plotting.COLUMN, 2.4, plotting.caption(groups), scale)
    axes = figure.add_subplot(ylabel="speedup over the best baseline")
    labels = [f"{figure_text(row.dataset)}\n{100 * row.accuracy:.1f} %" for row in rows]
    spreads = [row.speedup_sd for row in rows]
    heights = [row.speedup if np.isfinite(row.speedup) else 0 for row in rows]
    bars = axes.bar(labels, heights, yerr=spreads if any(spreads) else None, color=BLUE)
    why = ["no baseline" if np.isfinite(row.elastic_seconds) else "not reached" for row in rows]
    texts = [f"{height:.2f}×" if height else reason for height, reason in zip(heights, why, strict=True)]
    axes.bar_label(bars, texts, fontsize=6, padding=1)
    axes.axhline(1, color="0.4", lw=0.8, ls=":")
    axes.margins(y=0.15)
    if plotting.mark_paper_values(axes.hlines, {place: mark for place, (_, mark) in enumerate(found) if mark}):
        plotting.legend_once(axes)
    plotting.save(figure, stem, [*Speedup._fields], rows)
