#!/usr/bin/env python
"""The solver's time, memory and share of the optimum, over tensors (N) and steps (T_q), and the paper's recursion.

The networks are made up: convolutions, each with a batch norm; N = 214 is the size of ResNet50. Prints the importance
lost to rounding, time and memory as one JSON object, its last line, also with what the paper's recursion takes
(run_figure13.sh draws that).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import common  # first: it sets the import path
import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from tqdm import tqdm

from selection_solver_DP import solve

RHO = 0.5
RESNET50_TENSORS = 214
RESOLUTIONS = (100, 1_000, 10_000, 100_000)


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
    return SelectionProblem(t_dy, t_dw, importance / np.max(importance), RHO * float(t_dy.sum() + t_dw.sum()))


class Optimum(NamedTuple):
    """The best selection that HiGHS found, an upper bound, and whether both were proven to be equal."""

    importance: float
    upper_bound: float
    proven: bool


def milp_optimum(
    t_dy: np.ndarray, t_dw: np.ndarray, importance: np.ndarray, budget: float, time_limit_seconds: float = 60
) -> Optimum:
    """The selection problem as a mixed-integer linear program, solved by HiGHS: the optimum, without rounding of times.

    Minimise -I·M so that t_dw·M + t_dy·F <= budget, M_k <= F_k and F_{k+1} <= F_k; M is binary, F is 1 if reached.
    Arrays are [N] in backward order. F need not be declared integer: the smallest F that M allows is integer.

    Raises:
        RuntimeError: HiGHS neither solved the problem nor ran out of time.
    """
    tensors = len(t_dy)
    # HiGHS' tolerances are absolute. Half a unit separates integer times. Others are scaled until the tolerance is
    # negligible relative to the budget.
    has_integer_times = bool(np.all(t_dy == np.floor(t_dy)) and np.all(t_dw == np.floor(t_dw)))
    limit, scale = (np.floor(budget) + 0.5, 1.0) if has_integer_times else (1e4, 1e4 / budget)
    gain_scale = 1e3 / max(float(np.max(np.abs(importance))), 1e-9)
    one = sparse.identity(tensors, format="csr")
    deeper = sparse.diags_array([-np.ones(tensors), np.ones(tensors - 1)], offsets=[0, 1], format="csr")[:-1]
    cost = [sparse.csr_matrix(t_dw * scale), sparse.csr_matrix(t_dy * scale)]
    rows = sparse.bmat([cost, [one, -one], [None, deeper]], format="csr")
    upper = np.concatenate(([limit], np.zeros(2 * tensors - 1)))
    result = milp(
        np.concatenate((-importance * gain_scale, np.zeros(tensors))),
        constraints=LinearConstraint(rows, -np.inf, upper),
        integrality=np.repeat([1, 0], tensors),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": time_limit_seconds},
    )
    if result.status not in (0, 1):  # neither solved nor out of time
        raise RuntimeError(result.message)
    reached = 0.0 if result.x is None else float(importance @ np.round(result.x[:tensors]))
    bound = result.mip_dual_bound
    upper_bound = float(np.sum(np.maximum(importance, 0))) if bound is None else -float(bound) / gain_scale
    return Optimum(reached, max(upper_bound, reached), result.status == 0)


def paper_recursion(
    t_dy: Sequence[int], t_dw: Sequence[int], importance: Sequence[float], budget: int
) -> tuple[float, int]:
    """The solver as the paper describes it (section 6), without our short cuts: the reference for our solver.

    P[k][t] is the largest importance of a selection whose deepest tensor is k and that takes at most t. The next
    selected tensor is some j < k, whose selection is a smaller problem of the same kind. Extending the error chain from
    j to k costs every t_dy between them. Plain loops on purpose, since the method is compared, in O(N²·budget).

    Two details follow this project's reading of the paper: the cost includes the deepest tensor's own t_dy, as f(M)
    says, and the deepest tensor of the network can be selected.

    Args:
        t_dy, t_dw, importance: in backward order, times as integers.
        budget: an integer.

    Returns:
        The largest importance within the budget, and how many subproblems (k, t, j) were visited.
    """
    tensors = len(t_dy)
    chain = [sum(t_dy[: k + 1]) for k in range(tensors)]
    impossible = float("-inf")
    table = [[impossible] * (budget + 1) for _ in range(tensors)]
    subproblems = 0
    for k in range(tensors):
        for t in range(budget + 1):
            best = importance[k] if chain[k] + t_dw[k] <= t else impossible  # k alone
            for j in range(k):
                rest = t - t_dw[k] - (chain[k] - chain[j])
                if rest >= 0 and table[j][rest] + importance[k] > best:
                    best = table[j][rest] + importance[k]
            table[k][t] = best
            subproblems += k + 1
    return max([0.0, *(row[budget] for row in table)]), subproblems


def median_ms(function: Callable[[], Any], repeats: int, at_most_seconds: float) -> float:
    """Of up to `repeats` calls; no further call is started after `at_most_seconds`."""
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < at_most_seconds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure_recursion(tensors: int, steps: int, quick: bool) -> dict[str, Any]:
    """The paper's recursion and our solver on times rounded up to integers; both are exact there, so they must agree.

    The budget is `steps`.
    """
    real = made_up_problem(tensors)
    t_dy, t_dw = (np.ceil(times / real.budget * steps) for times in (real.t_dy, real.t_dw))
    problem = SelectionProblem(t_dy, t_dw, real.importance, float(steps))
    dy, dw = ([*map(int, times)] for times in (t_dy, t_dw))
    start = time.perf_counter()
    importance, subproblems = paper_recursion(dy, dw, real.importance.tolist(), steps)
    recursion_ms = 1e3 * (time.perf_counter() - start)
    rooms = (steps - np.cumsum(t_dy) - t_dw)[real.importance > 0]
    return {
        "tensors": tensors,
        "time_resolution": steps,
        "recursion_ms": recursion_ms,
        "solve_ms": median_ms(lambda: solve(*problem), 200, 0.3 if quick else 1.0),
        "agree": bool(abs(solve(*problem).importance - importance) < 1e-9),
        "recursion_subproblems": subproblems,
        "solve_subproblems": int(np.maximum(rooms + 1, 0).sum()),  # cells of the knapsack's table that are filled
    }


def measure_solver(problem: SelectionProblem, steps: int | None, quick: bool) -> dict[str, Any]:
    """Time, largest memory and result of `solve` at T_q = `steps`; None: at the T_q that it chooses itself."""
    call = partial(solve, *problem, time_resolution=steps)
    tracemalloc.start()
    selection = call()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "tensors": len(problem.t_dy),
        "time_resolution": selection.time_resolution,
        "automatic": steps is None,
        "solve_ms": median_ms(call, 50, 0.2 if quick else 1.0),
        "peak_memory_mb": peak_bytes / 1e6,
        "within_budget": bool(selection.time <= problem.budget),
    }


def measure_quality(tensors: int, instances: int, limit_seconds: float) -> dict[str, Any]:
    """Share of the real-valued optimum reached at each T_q, lowest and mean over the instances.

    If HiGHS did not prove the optimum in time, the share is of the upper bound; the true share can only be higher.
    """
    shares: dict[int | None, list[float]] = {choice: [] for choice in (*RESOLUTIONS, None)}
    proven = 0
    for seed in range(instances):
        problem = made_up_problem(tensors, seed)
        optimum = milp_optimum(*problem, time_limit_seconds=limit_seconds)
        proven += optimum.proven
        for choice, reached in shares.items():
            reached.append(100 * solve(*problem, time_resolution=choice).importance / optimum.upper_bound)
    rows = [
        {"time_resolution": k, "lowest_percent": min(v), "mean_percent": statistics.fmean(v)} for k, v in shares.items()
    ]
    return {"tensors": tensors, "instances": instances, "proven": proven, "shares_of_optimum": rows}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the log's page shows."""
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # HiGHS prints notes to descriptor 1, some of them only when the process ends, after our last line
    quick = args.quick
    compared = {50: 5, RESNET50_TENSORS: 3} if quick else {50: 20, RESNET50_TENSORS: 20, 1000: 5, 5000: 1}
    recursions = [measure_recursion(size, 1_000, quick) for size in (50, 100, RESNET50_TENSORS)]
    cases = [(size, steps) for size in (50, RESNET50_TENSORS, 1000, 5000) for steps in (*RESOLUTIONS, None)]
    runs = [measure_solver(made_up_problem(size), steps, quick) for size, steps in tqdm(cases, "the solver")]
    return {
        "recursions_agree": all(record["agree"] for record in recursions),
        "all_within_budget": all(run["within_budget"] for run in runs),
        "runs": runs,
        "quality": [measure_quality(size, many, 3.0 if quick else 60.0) for size, many in compared.items()],
        "recursions": recursions,
    }


if __name__ == "__main__":
    common.run_benchmark(__doc__, {}, measure, takes_network=False)
