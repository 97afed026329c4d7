"""Figures of what profiling, measuring importance and solving take: Fig 7, Fig 13 and Table 1 of the paper."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotting  # first: it sets the import path
from plotting import BLUE, COLUMN, PAGE, RED, FinishedRun, Group, Rows, Sheet, caption, mark_paper_values

from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.settings import PAPER
from elastic_trainer.timing.table_file import read_profile


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
