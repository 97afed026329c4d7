"""Figures of what profiling, measuring importance and solving take: Fig 7, Fig 13 and Table 1 of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotting  # first: it sets the import path
from plotting import BLUE, COLUMN, PAGE, RED, FinishedRun, Group, Rows, Sheet, caption, mark_paper_values
from resolutions import PREFIX

from elastic_trainer.settings import PRESETS
from elastic_trainer.system.errors import UserError, figure_text
from elastic_trainer.system.files import read_record


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
    epoch_seconds = float(np.mean([_epoch_seconds(run, without_selecting=True) for run in runs]))
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


def _similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two vectors of importance."""
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def _by_interval(run: FinishedRun) -> list[tuple[float, float, float]]:
    """(Distance in epochs, mean similarity of importance at that distance, overhead of selecting so seldom in %)."""
    vectors = run.selections().importance
    overhead = 100 * run.summary["selection_seconds"] / len(vectors) / _epoch_seconds(run, without_selecting=True)
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
    """Training time and the solver's part in it over T_q, as measured; `reference`: network -> the paper's two curves.

    Time is that of an epoch, over that of full training.
    """
    by_resolution = {
        int(group.train_type.removeprefix(PREFIX)): group for group in groups if group.train_type.startswith(PREFIX)
    }
    ones = [by_resolution[resolution] for resolution in sorted(by_resolution)]
    full = [group for group in groups if group.train_type == "full_training"]
    if not ones or not full:
        raise UserError("solver: needs runs with several T_q and one of full_training")
    figure, rows = sheet.figure(PAGE, 2.4, caption(groups)), Rows()
    full_seconds = full[0].values(_epoch_seconds).mean()
    for resolution, group in sorted(by_resolution.items()):
        shares = 100 * group.values(_epoch_seconds) / full_seconds
        percents = 100 * group.values(lambda run: run.summary["selection_part_seconds"]["solve"] / _seconds(run))
        about = {"time_resolution": resolution, "time_over_full_percent": shares.mean()}
        rows.append({**about, "solver_percent_of_training": percents.mean()})
    resolutions, shares, percents = np.array([[*row.values()] for row in rows]).T
    left, right = figure.subplots(1, 2)
    left.set(xscale="log", xlabel="$T_q$", ylabel="training time / full (%)")
    left.plot(resolutions, shares, "o-", color=BLUE)
    left.axhline(100 * (ones[0].rho or 1), color="0.4", ls=":", lw=0.8)
    right.set(xscale="log", yscale="log", xlabel="$T_q$", ylabel="solver (% of training)")
    right.plot(resolutions, percents, "s--", color=RED)
    if full[0].paper_key:
        paper = sheet.reference.get(groups[0].config["model_name"], ())
        for axes, curve in zip((left, right), paper, strict=False):
            axes.plot(resolutions, curve, "_", color="black", ms=9, alpha=0.5, label="the paper's")
    sheet.save(figure, rows)


def _seconds(run: FinishedRun) -> float:
    """Training time."""
    return float(run.summary["train_seconds"])


def _epoch_seconds(run: FinishedRun, without_selecting: bool = False) -> float:
    """Training time of an epoch."""
    selecting = float(run.summary["selection_seconds"]) if without_selecting else 0.0
    return (_seconds(run) - selecting) / int(run.summary["epochs"])


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
        record = read_record(folder / "profile.json")
        spent, epoch = record["profiling_seconds"], count * record["full_step_ms"] / 1e3
        about = {"table": folder.name, "profiling_seconds": spent, "epoch_seconds": epoch}
        percent = 100 * spent / epoch
        rows.append({**about, "percent": percent})
        drawn = axes.barh(figure_text(folder.name), percent, color=BLUE)
        axes.bar_label(drawn, [f"{percent:.0f}" if percent >= 100 else f"{percent:.2g}"], fontsize=6, padding=2)
        if record.get("model_name") in sheet.reference and record["input_size"] == PRESETS["paper"].input_size:
            mark_paper_values(axes.vlines, {place: sheet.reference[record["model_name"]][0]})
    axes.margins(x=0.15)
    axes.invert_yaxis()
    sheet.save(figure, rows)
