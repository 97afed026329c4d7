#!/usr/bin/env python
"""The solver's time, memory and share of the optimum, over tensors (N) and steps (T_q), and the paper's recursion.

Prints the importance lost to rounding, time and memory as one JSON object, its last line, also with what the paper's
recursion takes (run_figure13.sh draws that). The networks are made up (`solver_problems`); N = 214 is the size
of ResNet50.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import common
from solver_problems import (
    RESNET50_TENSORS,
    RHO,
    SelectionProblem,
    made_up_problem,
    measure_recursion,
    milp_optimum,
    seconds_of,
)
from tqdm import tqdm

import utils
from selection_solver_DP import Solution, solve

RESOLUTIONS = (100, 1_000, 10_000, 100_000)


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the figure and the JSON show."""
    quick = args.quick
    sizes = (50, RESNET50_TENSORS, 1000, 5000) if quick else (50, 100, RESNET50_TENSORS, 500, 1000, 2000, 5000)
    compared = {50: 5, RESNET50_TENSORS: 3} if quick else {50: 20, RESNET50_TENSORS: 20, 1000: 5, 5000: 1}
    recursion_sizes = (50, RESNET50_TENSORS) if quick else (50, 100, RESNET50_TENSORS)
    limit_seconds = 3.0 if quick else 60.0

    def shown(parts: Iterable[Any], what: str) -> Any:
        return tqdm([*parts], desc=what, file=sys.stderr)

    cases = [(size, steps) for size in sizes for steps in (*RESOLUTIONS, None)]
    runs = [measure_solver(made_up_problem(size), steps, quick) for size, steps in shown(cases, "the solver")]
    qualities = [
        measure_quality(size, instances, limit_seconds) for size, instances in shown(compared.items(), "the optimum")
    ]
    recursions = [measure_recursion(size, 1_000, quick) for size in shown(recursion_sizes, "the paper's recursion")]
    return {
        "rho": RHO,
        "quick": quick,
        "recursion": "plain Python loops, scripts/benchmarks/solver_problems.py",
        "milp_time_limit_seconds": limit_seconds,
        "milp_unproven_tensors": [row["tensors"] for row in qualities if row["proven"] < row["instances"]],
        "recursions_agree": all(record["agree"] for record in recursions),
        "all_within_budget": all(run["within_budget"] for run in runs),
        "runs": runs,
        "quality": qualities,
        "recursions": recursions,
    }


def main() -> None:
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # HiGHS prints notes to descriptor 1, some of them only when the process ends, after our last line
    common.run_benchmark("benchmark_solver", __doc__, {}, measure, takes_network=False)


if __name__ == "__main__":
    utils.run_cli(main)
