#!/usr/bin/env python
"""The solver's time, memory and share of the optimum over tensors (N) and steps (T_q); the paper's recursion beside it.

Writes the picture (in the manner of the paper's Fig. 13, and more) and prints one JSON object as its last line. The
networks are made up, of convolutions each with a normalisation, with real-valued times; N = 214 is ResNet50's size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common
import numpy as np
from milp_optimum import milp_optimum
from paper_recursion import paper_recursion
from tqdm import tqdm

import utils
from elastic_trainer.machine import environment
from selection_solver_DP import Solution, solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RHO = 0.5
RESNET50 = 214
RESOLUTIONS = (100, 1_000, 10_000, 100_000)
# Colours that colour-blind readers tell apart and that differ in greyscale; each has a marker of its own besides.
STYLES = (("#000000", "o"), ("#0072b2", "s"), ("#d55e00", "^"), ("#e69f00", "D"), ("#777777", "v"))


class Case(NamedTuple):
    """What `solve` takes: [N] times in ms and importance in backward order, and the budget in ms."""

    t_dy: np.ndarray
    t_dw: np.ndarray
    importance: np.ndarray
    budget: float


def network(tensors: int, seed: int = 0) -> Case:
    """A made-up network with the pattern of ResNet50's tensors: β, γ and kernel in turn, times over two decades.

    As in the timing table, a normalisation's whole error op is its β's t_dy and a kernel's is its own; the small
    tensors' t_dw are their sums and updates. Half of the backward pass is the budget.
    """
    rng = np.random.default_rng(seed)
    kind = np.arange(tensors) % 3  # 0: β, 1: γ, 2: kernel
    t_dy = np.choose(kind, (rng.lognormal(-1, 0.5, tensors), np.zeros(tensors), rng.lognormal(0.5, 0.8, tensors)))
    t_dw = np.where(kind == 2, rng.lognormal(0.5, 0.8, tensors), rng.lognormal(-3, 0.5, tensors))
    importance = rng.exponential(1, tensors) * np.where(kind == 2, 1.0, 0.2)
    importance[rng.random(tensors) < 0.1] *= -1
    return Case(t_dy, t_dw, importance / importance.max(), RHO * float(t_dy.sum() + t_dw.sum()))


def whole_steps(case: Case, steps: int) -> Case:
    """The same with times rounded up to whole numbers of which `steps` are the budget, as the recursion needs them."""
    unit = case.budget / steps
    return Case(np.ceil(case.t_dy / unit), np.ceil(case.t_dw / unit), case.importance, float(steps))


def seconds_of(function: Callable[[], Any], repeats: int, at_most_seconds: float) -> list[float]:
    """Times of up to `repeats` calls, no further one being started after `at_most_seconds`."""
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < at_most_seconds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def peak_mb(function: Callable[[], Any]) -> float:
    """Largest memory allocated by Python and NumPy during one call."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def measure_solver(case: Case, steps: int | None, quick: bool) -> dict[str, Any]:
    """Time, memory and result of `solve` at T_q = `steps`, or at the T_q it chooses itself."""

    def call() -> Solution:
        return solve(*case, time_resolution=steps)

    selection = call()
    times = seconds_of(call, 50, 0.2 if quick else 1.0)
    return {
        "tensors": len(case.t_dy),
        "time_resolution": selection.time_resolution,
        "automatic": steps is None,
        "solve_ms": 1e3 * statistics.median(times),
        "repeats": len(times),
        "peak_memory_mb": peak_mb(call),
        "importance": selection.importance,
        "time_share_of_full_percent": 100 * selection.time / (case.t_dy.sum() + case.t_dw.sum()),
        "within_budget": bool(selection.time <= case.budget),
    }


def measure_quality(tensors: int, instances: int, limit_seconds: float) -> dict[str, Any]:
    """Share of the real-valued optimum reached at each T_q, lowest and mean over the instances.

    Where HiGHS did not prove the optimum in time, the share is of the upper bound, and the true one can only be higher.
    """
    steps = (*RESOLUTIONS, None)
    shares: dict[int | None, list[float]] = {choice: [] for choice in steps}
    chosen: list[int] = []
    proven, seconds, reaches = [], [], []
    for seed in range(instances):
        case = network(tensors, seed)
        start = time.perf_counter()
        optimum = milp_optimum(*case, time_limit_seconds=limit_seconds)
        seconds.append(time.perf_counter() - start)
        lower = milp_optimum(*case[:3], 0.999 * case.budget, time_limit_seconds=limit_seconds)
        proven.append(optimum.proven and lower.proven)
        for choice in steps:
            selection = solve(*case, time_resolution=choice)
            shares[choice].append(100 * selection.importance / optimum.upper_bound)
        chosen.append(selection.time_resolution or 0)
        # Of what HiGHS found: where that is not proven, a better selection for 99.9 % of the budget may exist.
        reaches.append(bool(selection.importance >= lower.importance - 1e-9))
    return {
        "tensors": tensors,
        "instances": instances,
        "proven": sum(proven),
        "milp_seconds": statistics.median(seconds),
        "automatic_time_resolution": statistics.median(chosen),
        "automatic_reaches_optimum_at_999_permille": sum(reaches),
        "shares": [
            {
                "time_resolution": choice,
                "lowest_share_of_optimum_percent": min(shares[choice]),
                "mean_share_of_optimum_percent": statistics.fmean(shares[choice]),
            }
            for choice in steps
        ],
    }


def measure_recursion(tensors: int, steps: int, quick: bool) -> dict[str, Any]:
    """The paper's recursion and ours on the same whole-number times; both are exact there, so they must agree."""
    case = whole_steps(network(tensors), steps)
    lists = ([int(value) for value in case.t_dy], [int(value) for value in case.t_dw], case.importance.tolist())
    start = time.perf_counter()
    theirs = paper_recursion(*lists, steps)
    seconds = time.perf_counter() - start
    times = seconds_of(lambda: solve(*case), 200, 0.3 if quick else 1.0)
    ours = solve(*case)
    chain = np.cumsum(case.t_dy)
    rooms = (steps - chain - case.t_dw)[case.importance > 0]
    return {
        "tensors": tensors,
        "time_resolution": steps,
        "recursion_ms": 1e3 * seconds,
        "recursion_repeats": 1,
        "solve_ms": 1e3 * statistics.median(times),
        "solve_repeats": len(times),
        "times_faster": seconds / statistics.median(times),
        "agree": bool(abs(ours.importance - theirs.importance) < 1e-9),
        "recursion_subproblems": theirs.subproblems,
        "solve_subproblems": int(np.maximum(rooms + 1, 0).sum()),  # cells of the knapsack's table that are filled
    }


def measure(quick: bool) -> dict[str, Any]:
    """Everything that the picture and the JSON show."""
    sizes = (50, RESNET50, 1000, 5000) if quick else (50, 100, RESNET50, 500, 1000, 2000, 5000)
    compared = {50: 5, RESNET50: 3} if quick else {50: 20, RESNET50: 20, 1000: 5, 5000: 1}
    recursion_sizes = (50, RESNET50) if quick else (50, 100, RESNET50)
    limit_seconds = 3.0 if quick else 60.0
    runs, qualities, recursions, over_steps = [], [], [], []
    total = len(sizes) * (len(RESOLUTIONS) + 1) + len(compared) + len(recursion_sizes) + 1
    with tqdm(total=total, desc="benchmarking the solver", unit="part", file=sys.stderr) as bar:
        for size in sizes:
            for steps in (*RESOLUTIONS, None):
                runs.append(measure_solver(network(size), steps, quick))
                bar.update()
        for size, instances in compared.items():
            qualities.append(measure_quality(size, instances, limit_seconds))
            bar.update()
        for size in recursion_sizes:
            recursions.append(measure_recursion(size, 1_000, quick))
            bar.update()
        for steps in (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000):
            over_steps.append(measure_solver(network(RESNET50), steps, quick))
        bar.update()
    return {
        "rho": RHO,
        "quick": quick,
        "recursion": "plain Python loops, tests/paper_recursion.py",
        "milp_time_limit_seconds": limit_seconds,
        "milp_unproven_tensors": [row["tensors"] for row in qualities if row["proven"] < row["instances"]],
        **targets(runs, recursions),
        "runs": runs,
        "quality": qualities,
        "recursions": recursions,
        "over_time_resolution": over_steps,
        "environment": environment(),
    }


def targets(runs: list[dict[str, Any]], recursions: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the project set itself, by name."""
    at = {(run["tensors"], None if run["automatic"] else run["time_resolution"]): run for run in runs}
    against = next(record for record in recursions if record["tensors"] == RESNET50)
    return {
        "n214_tq1e3_ms": at[RESNET50, 1_000]["solve_ms"],
        "n214_automatic_ms": at[RESNET50, None]["solve_ms"],
        "n5000_tq1e4_ms": at[5000, 10_000]["solve_ms"],
        "n5000_tq1e4_peak_memory_mb": at[5000, 10_000]["peak_memory_mb"],
        "n214_tq1e3_times_faster_than_recursion": against["times_faster"],
        "recursions_agree": all(record["agree"] for record in recursions),
        "all_within_budget": all(run["within_budget"] for run in runs),
    }


def draw(record: dict[str, Any], stem: Path) -> None:
    """Six panels: against the recursion (Fig. 13a), over T_q (Fig. 13b), and over N."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    panels = [figure.add_subplot(3, 2, place) for place in range(1, 7)]
    draw_against_recursion(record, panels[0], "subproblems", "subproblems solved", "a  Work, T_q = 1,000")
    draw_against_recursion(record, panels[1], "ms", "time (ms)", "b  Time, T_q = 1,000")
    draw_trade(record, panels[2])
    draw_quality(record, panels[3])
    draw_over_tensors(record, panels[4], "solve_ms", "time (ms)", "e  Solver's time")
    draw_over_tensors(record, panels[5], "peak_memory_mb", "peak memory (MB)", "f  Solver's memory")
    utils.save_figure(figure, stem)


def draw_against_recursion(record: dict[str, Any], axes: Axes, quantity: str, label: str, title: str) -> None:
    """Bars of the paper's recursion and of ours, a pair for each N."""
    rows = record["recursions"]
    places = np.arange(len(rows))
    for shift, method, name, colour, hatch in (
        (-0.2, "recursion", "recursion of the paper", "#bbbbbb", "//"),
        (0.2, "solve", "ours", "#0072b2", ""),
    ):
        heights = [row[f"{method}_{quantity}"] for row in rows]
        bars = axes.bar(places + shift, heights, 0.4, label=name, color=colour, hatch=hatch, edgecolor="black")
        axes.bar_label(bars, [short(height) for height in heights], fontsize=8)
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 3, top * 30)  # the smallest bar to be seen, the legend above the largest
    axes.set_xticks(places, [f"N = {row['tensors']}" for row in rows])
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    axes.legend(loc="upper left", fontsize=9, ncols=2)


def short(number: float) -> str:
    """Two or more digits, as they stand on a bar."""
    if number >= 1e6:
        return f"{number / 1e6:.1f} M"
    return f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"


def draw_trade(record: dict[str, Any], axes: Axes) -> None:
    """What a finer T_q buys and costs at ResNet50's size: resulting time, and the solver's time."""
    rows = record["over_time_resolution"]
    steps = [row["time_resolution"] for row in rows]
    (share,) = axes.plot(steps, [row["time_share_of_full_percent"] for row in rows], "ko-", markersize=5)
    axes.axhline(100 * record["rho"], color="black", linestyle=":", linewidth=1)
    axes.annotate("budget", (steps[0], 100 * record["rho"]), (0, 4), textcoords="offset points")
    axes.set_ylim(0, 100)
    axes.set_xscale("log")
    axes.set_xlabel("time steps T_q")
    axes.set_ylabel("resulting time (% of full)")
    other = axes.twinx()
    (cost,) = other.plot(steps, [row["solve_ms"] for row in rows], "s--", color="#d55e00", markersize=5)
    other.set_yscale("log")
    other.set_ylim(0.1, 1000)
    other.set_ylabel("solver's time (ms)")
    axes.legend((share, cost), ("resulting time (left)", "solver's time (right)"), loc="lower right", fontsize=9)
    axes.set_title(f"c  Resolution, N = {RESNET50}", loc="left")


def draw_quality(record: dict[str, Any], axes: Axes) -> None:
    """Mean importance lost to rounding, over T_q; a large open mark is at the T_q that the solver chooses itself."""
    floor = 1e-5  # what is lost in floating point, and nothing lost at all, are drawn here
    for (colour, marker), quality in zip(STYLES, record["quality"], strict=False):
        lost = [max(100 - row["mean_share_of_optimum_percent"], floor) for row in quality["shares"]]
        size = quality["tensors"]
        label = f"N = {size:,}" + (" (upper bound)" if size in record["milp_unproven_tensors"] else "")
        axes.plot(RESOLUTIONS, lost[:-1], marker + "-", color=colour, markersize=5, label=label)
        chosen = quality["automatic_time_resolution"]
        axes.plot(chosen, lost[-1], marker, markersize=11, markerfacecolor="none", color=colour)
    axes.plot([], [], "o", markersize=11, markerfacecolor="none", color="black", label="T_q automatic")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(floor / 6, 1e6)  # room for the legend
    axes.set_yticks(
        [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100], ["0", "0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]
    )
    axes.set_xlabel("time steps T_q")
    axes.set_ylabel("importance lost (% of optimum)")
    axes.set_title("d  Against the exact optimum", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=9)


def draw_over_tensors(record: dict[str, Any], axes: Axes, key: str, label: str, title: str) -> None:
    """A quantity of `solve` over N, a line for each T_q and one for the automatic choice."""
    choices = [*((f"T_q = {steps:,}", steps) for steps in RESOLUTIONS), ("T_q automatic", None)]
    for (colour, marker), (name, steps) in zip(STYLES, choices, strict=True):
        rows = [
            run
            for run in record["runs"]
            if (run["automatic"] if steps is None else run["time_resolution"] == steps and not run["automatic"])
        ]
        line = "--" if steps is None else "-"
        values = [row[key] for row in rows]
        axes.plot([row["tensors"] for row in rows], values, marker + line, color=colour, markersize=5, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 30)  # room for the legend
    axes.set_xlabel("tensors N")
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8, ncols=2)


@contextlib.contextmanager
def standard_output_apart() -> Iterator[int]:
    """Yield a descriptor of standard output while descriptor 1 leads to standard error.

    HiGHS prints notes straight to descriptor 1, some of them only when the process ends, after our last line.
    """
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield ours
    finally:
        os.close(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, 3 s for each MILP; under 30 s")
    parser.add_argument(
        "--output", type=Path, default=common.ROOT / "figures" / "benchmark_solver", help="figure without its ending"
    )
    args = parser.parse_args()
    with standard_output_apart() as output:
        record = measure(args.quick)
        draw(record, args.output)
        print(f"figure: {args.output}.pdf and .png", file=sys.stderr)
        os.write(output, (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    utils.run_cli(main)
