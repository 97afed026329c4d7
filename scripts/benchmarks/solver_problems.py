"""Selection problems of made-up networks, their exact optimum, and the paper's recursion, measured on them.

`benchmark_solver.py` uses them, and the paper's Fig 13a (scripts/figures/plot_costs.py). A network consists of
convolutions, each with a batch norm. Its times are real-valued.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

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
    rows = sparse.bmat(
        [
            [sparse.csr_matrix(t_dw * scale), sparse.csr_matrix(t_dy * scale)],
            [one, -one],
            [None, deeper],
        ],
        format="csr",
    )
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


class Recursion(NamedTuple):
    """Largest importance within the budget, and how many subproblems (deepest k, time t, next j) were visited."""

    importance: float
    subproblems: int


def paper_recursion(t_dy: Sequence[int], t_dw: Sequence[int], importance: Sequence[float], budget: int) -> Recursion:
    """The solver as the paper describes it (section 5.2), without our short cuts: the reference for our solver.

    P[k][t] is the largest importance of a selection whose deepest tensor is k and that takes at most t. The next
    selected tensor is some j < k, whose selection is a smaller problem of the same kind. Extending the error chain from
    j to k costs every t_dy between them. Plain loops on purpose, since the method is compared, in O(N²·budget).

    Times are integers in backward order; selecting k costs every t_dy from the output to k.

    Two details follow this project's reading of the paper: the cost includes the deepest tensor's own t_dy, as f(M)
    says, and the deepest tensor of the network can be selected.
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
    return Recursion(max([0.0, *(row[budget] for row in table)]), subproblems)


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
