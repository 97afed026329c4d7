#!/usr/bin/env python
"""The solver's time, memory and share of the optimum, over tensors (N) and steps (T_q), and the paper's recursion.

Draws a figure like the paper's Fig 13, with more panels, and prints one JSON object as its last line. The networks are
made up (`made_up_networks`); N = 214 is the size of ResNet50.
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
from typing import Any

import common
from made_up_networks import (
    RESNET50_TENSORS,
    RHO,
    SelectionProblem,
    made_up_problem,
    measure_recursion,
    seconds_of,
)
from milp_optimum import milp_optimum
from solver_figure import RESOLUTIONS, draw
from tqdm import tqdm

import utils
from elastic_trainer.machine import environment
from selection_solver_DP import Solution, solve


def peak_mb(function: Callable[[], Any]) -> float:
    """Largest memory allocated by Python and NumPy during one call."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def measure_solver(problem: SelectionProblem, steps: int | None, quick: bool) -> dict[str, Any]:
    """Time, memory and result of `solve` at T_q = `steps`; None: at the T_q that it chooses itself."""

    def call() -> Solution:
        return solve(*problem, time_resolution=steps)

    selection = call()
    times = seconds_of(call, 50, 0.2 if quick else 1.0)
    return {
        "tensors": len(problem.t_dy),
        "time_resolution": selection.time_resolution,
        "automatic": steps is None,
        "solve_ms": 1e3 * statistics.median(times),
        "repeats": len(times),
        "peak_memory_mb": peak_mb(call),
        "importance": selection.importance,
        "time_share_of_full_percent": 100 * selection.time / (problem.t_dy.sum() + problem.t_dw.sum()),
        "within_budget": bool(selection.time <= problem.budget),
    }


def measure_quality(tensors: int, instances: int, limit_seconds: float) -> dict[str, Any]:
    """Share of the real-valued optimum reached at each T_q, lowest and mean over the instances.

    If HiGHS did not prove the optimum in time, the share is of the upper bound; the true share can only be higher.
    """
    steps = (*RESOLUTIONS, None)
    shares: dict[int | None, list[float]] = {choice: [] for choice in steps}
    chosen: list[int] = []
    proven, seconds, reaches = [], [], []
    for seed in range(instances):
        problem = made_up_problem(tensors, seed)
        start = time.perf_counter()
        optimum = milp_optimum(*problem, time_limit_seconds=limit_seconds)
        seconds.append(time.perf_counter() - start)
        lower = milp_optimum(*problem[:3], 0.999 * problem.budget, time_limit_seconds=limit_seconds)
        proven.append(optimum.proven and lower.proven)
        for choice in steps:
            selection = solve(*problem, time_resolution=choice)
            shares[choice].append(100 * selection.importance / optimum.upper_bound)
        chosen.append(selection.time_resolution or 0)
        # Of what HiGHS found. If that is not proven, a better selection for 99.9 % of the budget may exist.
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


def measure(quick: bool) -> dict[str, Any]:
    """Everything that the figure and the JSON show."""
    sizes = (50, RESNET50_TENSORS, 1000, 5000) if quick else (50, 100, RESNET50_TENSORS, 500, 1000, 2000, 5000)
    compared = {50: 5, RESNET50_TENSORS: 3} if quick else {50: 20, RESNET50_TENSORS: 20, 1000: 5, 5000: 1}
    recursion_sizes = (50, RESNET50_TENSORS) if quick else (50, 100, RESNET50_TENSORS)
    limit_seconds = 3.0 if quick else 60.0
    runs, qualities, recursions, over_steps = [], [], [], []
    total = len(sizes) * (len(RESOLUTIONS) + 1) + len(compared) + len(recursion_sizes) + 1
    with tqdm(total=total, desc="benchmarking the solver", unit="part", file=sys.stderr) as bar:
        for size in sizes:
            for steps in (*RESOLUTIONS, None):
                runs.append(measure_solver(made_up_problem(size), steps, quick))
                bar.update()
        for size, instances in compared.items():
            qualities.append(measure_quality(size, instances, limit_seconds))
            bar.update()
        for size in recursion_sizes:
            recursions.append(measure_recursion(size, 1_000, quick))
            bar.update()
        for steps in (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000):
            over_steps.append(measure_solver(made_up_problem(RESNET50_TENSORS), steps, quick))
        bar.update()
    return {
        "rho": RHO,
        "quick": quick,
        "recursion": "plain Python loops, scripts/benchmarks/paper_recursion.py",
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
    """The results that the project has targets for, by name."""
    at = {(run["tensors"], None if run["automatic"] else run["time_resolution"]): run for run in runs}
    against = next(record for record in recursions if record["tensors"] == RESNET50_TENSORS)
    return {
        "n214_tq1e3_ms": at[RESNET50_TENSORS, 1_000]["solve_ms"],
        "n214_automatic_ms": at[RESNET50_TENSORS, None]["solve_ms"],
        "n5000_tq1e4_ms": at[5000, 10_000]["solve_ms"],
        "n5000_tq1e4_peak_memory_mb": at[5000, 10_000]["peak_memory_mb"],
        "n214_tq1e3_times_faster_than_recursion": against["times_faster"],
        "recursions_agree": all(record["agree"] for record in recursions),
        "all_within_budget": all(run["within_budget"] for run in runs),
    }


@contextlib.contextmanager
def standard_output_apart() -> Iterator[int]:
    """Yield a descriptor of standard output while descriptor 1 leads to standard error.

    HiGHS prints notes to descriptor 1, some of them only when the process ends, after our last line.
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
