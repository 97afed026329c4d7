"""Selection problems of made-up networks, and the paper's recursion measured on them.

`benchmark_solver.py` uses them, and the paper's Fig 13a (scripts/figures/plot_costs.py). A network consists of
convolutions, each with a batch norm. Its times are real-valued.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from paper_recursion import paper_recursion

from selection_solver_DP import solve

RHO = 0.5
RESNET50_TENSORS = 214


class SelectionProblem(NamedTuple):
    """What `solve` takes: [N] times in ms and importance, in backward order, and the budget in ms."""

    t_dy: np.ndarray
    t_dw: np.ndarray
    importance: np.ndarray
    budget: float


def made_up_problem(tensors: int, seed: int = 0) -> SelectionProblem:
    """A network with the pattern of ResNet50's tensors: β, γ and kernel in turn, times over two decades.

    As in the timing table, the β of a batch norm has the entire time of its error operation as t_dy, and a kernel has
    that of its own. The t_dw of small tensors are sums and updates. The budget is half of the backward pass.
    """
    rng = np.random.default_rng(seed)
    kind = np.arange(tensors) % 3  # 0: β, 1: γ, 2: kernel
    t_dy = np.choose(kind, (rng.lognormal(-1, 0.5, tensors), np.zeros(tensors), rng.lognormal(0.5, 0.8, tensors)))
    t_dw = np.where(kind == 2, rng.lognormal(0.5, 0.8, tensors), rng.lognormal(-3, 0.5, tensors))
    importance = rng.exponential(1, tensors) * np.where(kind == 2, 1.0, 0.2)
    importance[rng.random(tensors) < 0.1] *= -1
    return SelectionProblem(t_dy, t_dw, importance / importance.max(), RHO * float(t_dy.sum() + t_dw.sum()))


def in_integer_steps(problem: SelectionProblem, steps: int) -> SelectionProblem:
    """The same with times rounded up to integers, of which the budget is `steps`; the recursion needs integers."""
    unit = problem.budget / steps
    return SelectionProblem(
        np.ceil(problem.t_dy / unit), np.ceil(problem.t_dw / unit), problem.importance, float(steps)
    )


def seconds_of(function: Callable[[], Any], repeats: int, at_most_seconds: float) -> list[float]:
    """Times of up to `repeats` calls; no further call is started after `at_most_seconds`."""
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < at_most_seconds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def measure_recursion(tensors: int, steps: int, quick: bool) -> dict[str, Any]:
    """The paper's recursion and our solver on the same integer times; both are exact there, so they must agree."""
    problem = in_integer_steps(made_up_problem(tensors), steps)
    lists = (
        [int(value) for value in problem.t_dy],
        [int(value) for value in problem.t_dw],
        problem.importance.tolist(),
    )
    start = time.perf_counter()
    recursion = paper_recursion(*lists, steps)
    seconds = time.perf_counter() - start
    times = seconds_of(lambda: solve(*problem), 200, 0.3 if quick else 1.0)
    solution = solve(*problem)
    t_dy_down_to = np.cumsum(problem.t_dy)
    rooms = (steps - t_dy_down_to - problem.t_dw)[problem.importance > 0]
    return {
        "tensors": tensors,
        "time_resolution": steps,
        "recursion_ms": 1e3 * seconds,
        "recursion_repeats": 1,
        "solve_ms": 1e3 * statistics.median(times),
        "solve_repeats": len(times),
        "times_faster": seconds / statistics.median(times),
        "agree": bool(abs(solution.importance - recursion.importance) < 1e-9),
        "recursion_subproblems": recursion.subproblems,
        "solve_subproblems": int(np.maximum(rooms + 1, 0).sum()),  # cells of the knapsack's table that are filled
    }
