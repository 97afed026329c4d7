"""Tensor Selector: which tensors to train so that importance is largest within a time budget (paper section 5).

The problem: maximise M·I over 0/1 masks M subject to M·t_dw + f(M)·t_dy <= budget, where f(M) marks every tensor from
the output down to the deepest selected one, because the error gradient must pass through all of them.

The paper solves it by a recursion over (deepest tensor, time) in O(N²·T_q). Here one observation makes it O(N·T_q) and
exact: once the deepest tensor k is fixed, the error chain costs the same whoever else is selected, so what is left is a
0/1 knapsack over the tensors above k, and the table of prefixes of one single knapsack answers it for every k:

    best = max over k of  I_k + K_{k-1}[ capacity - sum_{j<=k} t_dy(j) - t_dw(k) ]

NumPy only, so that it can be used and tested on its own. Tensors are in backward order: index 0 is next to the output.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

DEFAULT_TIME_RESOLUTION = 10_000
MAX_EXACT_UNITS = 100_000  # integer times up to this budget are solved in their own unit, without any rounding


class Selection(NamedTuple):
    """What the solver found.

    Attributes:
        importance: sum of the importances of the selected tensors.
        mask: int8 [N], 1 where the tensor is to be trained.
        time: M·t_dw + f(M)·t_dy of the mask, in the unit of the arguments, not rounded.
    """

    importance: float
    mask: np.ndarray
    time: float


def selection_DP(t_dy: ArrayLike, t_dw: ArrayLike, I: ArrayLike, rho: float) -> tuple[float, np.ndarray]:  # noqa: E741, N802
    """The paper's plain entry: the most important tensors within the share `rho` of the whole backward time.

    Args:
        t_dy: [N] time to pass the error on, backward order, any one unit, integers or floats.
        t_dw: [N] time for the tensor's own gradient, the same unit.
        I: [N] importance; negative ones are never selected.
        rho: share of sum(t_dy + t_dw) that may be spent.

    Returns:
        The importance reached and an int8 mask [N] in the order of the arguments.

    Raises:
        ValueError: as `solve`.
    """
    total = float(np.sum(np.asarray(t_dy, float)) + np.sum(np.asarray(t_dw, float)))
    selection = solve(t_dy, t_dw, I, rho * total)
    return selection.importance, selection.mask


def solve(
    t_dy: ArrayLike,
    t_dw: ArrayLike,
    importance: ArrayLike,
    budget: float,
    time_resolution: int = DEFAULT_TIME_RESOLUTION,
) -> Selection:
    """The selection of largest total importance that takes at most `budget`.

    Times are counted in `time_resolution` steps of the budget (T_q in the paper), each tensor's t_dw rounded up and the
    room left by the error chain rounded down, so rounding never overspends. Integer times with a budget of at most
    `MAX_EXACT_UNITS` are not rounded at all. Among equals the shallower and smaller selection wins, always the same.

    Args:
        t_dy: [N] time to pass the error on, backward order.
        t_dw: [N] time for the tensor's own gradient.
        importance: [N]; only tensors above 0 are ever selected.
        budget: time that may be spent, in the unit of t_dy and t_dw.
        time_resolution: number of time steps, at least 1.

    Raises:
        ValueError: lengths differ, a time is negative, or a number is not finite.
    """
    error_times, own_times, gain = (np.asarray(array, np.float64) for array in (t_dy, t_dw, importance))
    if not (error_times.ndim == 1 and error_times.shape == own_times.shape == gain.shape):
        raise ValueError(
            f"t_dy, t_dw and importance need one length: {error_times.shape}, {own_times.shape}, {gain.shape}"
        )
    if not (np.isfinite(error_times).all() and np.isfinite(own_times).all() and np.isfinite(gain).all()):
        raise ValueError("t_dy, t_dw and importance must be finite")
    if not np.isfinite(budget):
        raise ValueError(f"the budget must be finite, not {budget}")
    if (error_times < 0).any() or (own_times < 0).any():
        raise ValueError("times must not be negative")
    if time_resolution < 1:
        raise ValueError(f"time_resolution must be at least 1, not {time_resolution}")

    chain = np.cumsum(error_times)
    reachable = int(np.searchsorted(chain, budget, side="right"))  # tensors whose error chain fits into the budget
    weights, capacities = _in_steps(chain[:reachable], own_times[:reachable], budget, time_resolution)
    mask = _solve_in_steps(weights, capacities, gain)
    deepest = int(np.flatnonzero(mask)[-1]) if mask.any() else -1
    spent = float(own_times[mask == 1].sum() + (chain[deepest] if deepest >= 0 else 0.0))
    return Selection(float(gain[mask == 1].sum()), mask, spent)


def _in_steps(chain: np.ndarray, own: np.ndarray, budget: float, time_resolution: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the tensors and capacities left beside each error chain, both int64 [n], never too generous."""
    exact = budget <= MAX_EXACT_UNITS and (own == np.floor(own)).all() and (chain == np.floor(chain)).all()
    if exact or budget <= 0:
        unit, slack = 1.0, 0.0
    else:
        unit, slack = budget / time_resolution, 1e-12 * budget  # slack: floating-point sums must not overspend either
    weights = np.minimum(np.ceil(own / unit), np.floor(budget / unit) + 1)
    capacities = np.maximum(np.floor((budget - slack - chain) / unit), -1)
    return weights.astype(np.int64), capacities.astype(np.int64)


def _solve_in_steps(weights: np.ndarray, capacities: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """The exact dynamic program in integers; `capacities` never grows with depth. Returns the mask over all of `gain`.

    `table[c]` is the largest importance that the tensors above k reach within c steps; `taken[k][c]` remembers whether
    k belongs to it. Room shrinks with depth, so the table is cut as it goes down.
    """
    mask = np.zeros(len(gain), np.int8)
    if len(capacities) == 0:
        return mask
    table: np.ndarray = np.zeros(max(int(capacities[0]), 0) + 1)
    taken: list[np.ndarray] = []
    best, best_deepest = 0.0, -1
    for k, (weight, capacity) in enumerate(zip(weights.tolist(), capacities.tolist(), strict=True)):
        if capacity < 0:
            break
        table = table[: capacity + 1]
        better = np.zeros(len(table), bool)
        if gain[k] > 0 and weight <= capacity:
            if gain[k] + table[capacity - weight] > best:
                best, best_deepest = gain[k] + table[capacity - weight], k
            with_k = table[: len(table) - weight] + gain[k]
            better[weight:] = with_k > table[weight:]
            table[weight:] = np.maximum(with_k, table[weight:])
        taken.append(better)

    if best_deepest >= 0:
        mask[best_deepest] = 1
        room = int(capacities[best_deepest] - weights[best_deepest])
        for k in range(best_deepest - 1, -1, -1):
            if taken[k][room]:
                mask[k] = 1
                room -= int(weights[k])
    return mask
