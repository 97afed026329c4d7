"""Tensor Selector: which tensors to train so that importance is largest within a time budget (paper section 6).

The problem: maximise M·I over 0/1 masks M subject to M·t_dw + f(M)·t_dy <= budget, where f(M) marks every tensor from
the output down to the deepest selected one, because the error gradient must pass through all of them.

The paper solves it by a recursion over (deepest tensor, time) in O(N²·T_q). One observation makes it O(N·T_q) and
exact: once the deepest tensor k is fixed, the error chain costs the same whatever else is selected. What remains is a
0/1 knapsack over the tensors above k, and the prefix table of one knapsack answers it for every k:

    best = max over k of  I_k + K_{k-1}[ capacity - sum_{j<=k} t_dy(j) - t_dw(k) ]

The table needs integers, so real times are counted in steps, T_q of which make up the budget, and rounded up. So the
budget is kept whatever T_q is; T_q only decides how much importance is lost. Each of n tensors is at most one step too
long, so the result is worth at least the best selection for budget - (n + 1) steps. By default T_q is chosen so that
this is 99.5 % of the budget, closer than any prediction of a step's time.

NumPy only, so that it can be used and tested on its own. Tensors are in backward order: index 0 is next to the output.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

ROUNDING_LOSS = 0.005  # share of the budget that rounding may cost where T_q is chosen automatically
MAX_CELLS = 50_000_000  # tensors times T_q, where T_q is chosen automatically; a byte each, a fraction of a second
MAX_EXACT_UNITS = 100_000  # integer times up to this budget are solved in their own unit, without any rounding


class Solution(NamedTuple):
    """What the solver found.

    Attributes:
        importance: sum of the importances of the selected tensors.
        mask: int8 [N], 1 where the tensor is to be trained.
        time: M·t_dw + f(M)·t_dy of the mask, in the unit of the arguments, not rounded.
        time_resolution: steps that the budget was counted in (T_q), or None where nothing was rounded.
    """

    importance: float
    mask: np.ndarray
    time: float
    time_resolution: int | None


def selection_DP(t_dy: ArrayLike, t_dw: ArrayLike, I: ArrayLike, rho: float) -> tuple[float, np.ndarray]:  # noqa: E741, N802
    """The paper's plain entry: the most important tensors within the share `rho` of the complete backward time.

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
    solution = solve(t_dy, t_dw, I, rho * total)
    return solution.importance, solution.mask


def solve(
    t_dy: ArrayLike, t_dw: ArrayLike, importance: ArrayLike, budget: float, time_resolution: int | None = None
) -> Solution:
    """The selection of largest total importance that takes at most `budget` (paper section 6).

    Integer times with a budget of at most `MAX_EXACT_UNITS` are not rounded, and the result is exact. Other times are
    rounded up to `time_resolution` steps of the budget; the result never takes longer than the budget, and rounding
    costs importance only. By default there are as many steps as make it certain that the result is worth at least the
    best selection for 99.5 % of the budget; beyond 500 tensors `MAX_CELLS` allows fewer, for 98 % with 1,000. Fewer
    steps than tensors are too few for a good result.

    Among equals the shallower selection wins, always the same: the one whose mask, read from its deep end as a binary
    number, is smallest (of those that still fit when rounded).

    Args:
        t_dy: [N] time to pass the error on, backward order.
        t_dw: [N] time for the tensor's own gradient.
        importance: [N]; only tensors above 0 are ever selected.
        budget: time that may be spent, in the unit of t_dy and t_dw.
        time_resolution: number of time steps (T_q), at least 1, or None to choose it.

    Raises:
        ValueError: lengths differ, a time is negative, a number is not finite, or time_resolution is below 1.
    """
    t_dy, t_dw, importance = _checked(t_dy, t_dw, importance, budget, time_resolution)
    to_depth = np.cumsum(t_dy)
    candidates = np.flatnonzero((importance > 0) & (to_depth + t_dw <= budget))
    room, own = budget - to_depth[candidates], t_dw[candidates]
    is_integer = bool((own == np.floor(own)).all() and (to_depth == np.floor(to_depth))[candidates].all())
    if is_integer and budget <= MAX_EXACT_UNITS:
        steps = None
    else:
        steps = time_resolution or _resolution(int((own > 0).sum()))
        units = steps / (1 + 1e-12)  # slack for float summation order
        room, own = room / budget * units, np.ceil(own / budget * units)  # budget / units may be too small a float
    found = _best(np.floor(room).astype(np.int64), own.astype(np.int64), importance[candidates])
    mask = np.zeros(len(t_dw), np.int8)
    mask[candidates[found]] = 1
    time = float(t_dw[mask == 1].sum()) + (float(to_depth[candidates[found[-1]]]) if len(found) else 0.0)
    return Solution(float(importance[mask == 1].sum()), mask, time, steps)


def _checked(
    t_dy: ArrayLike, t_dw: ArrayLike, importance: ArrayLike, budget: float, time_resolution: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t_dy, t_dw and importance as float64 [N]. Raises `ValueError` as `solve`."""
    arrays = [np.asarray(array, np.float64) for array in (t_dy, t_dw, importance)]
    shapes = [array.shape for array in arrays]
    if arrays[0].ndim != 1 or len({*shapes}) > 1:
        raise ValueError(f"t_dy, t_dw and importance need one length: {', '.join(map(str, shapes))}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("t_dy, t_dw and importance must be finite")
    if not np.isfinite(budget):
        raise ValueError(f"the budget must be finite, not {budget}")
    if (arrays[0] < 0).any() or (arrays[1] < 0).any():
        raise ValueError("times must not be negative")
    if time_resolution is not None and time_resolution < 1:
        raise ValueError(f"time_resolution must be at least 1, not {time_resolution}")
    return arrays[0], arrays[1], arrays[2]


def _resolution(tensors: int) -> int:
    """Steps for this many tensors, each of which is rounded up by less than one, and the room down by one."""
    return max(min(math.ceil((tensors + 1) / ROUNDING_LOSS), MAX_CELLS // max(tensors, 1)), 1)


def _best(room: np.ndarray, t_dw: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Indices, rising, of the best selection.

    Args:
        room: int64 [n], steps left beside the error chain down to each tensor; never grows with depth.
        t_dw: int64 [n], steps.
        importance: [n], above 0.
    """
    # table[c]: largest importance of the tensors so far within c steps. It shrinks with the room.
    table = np.zeros(max(int(room[0]) + 1, 0) if len(room) else 0)
    best, deepest, is_taken = 0.0, -1, list[np.ndarray]()
    for k, (capacity, own, gain) in enumerate(zip(room.tolist(), t_dw.tolist(), importance.tolist(), strict=True)):
        table = table[: max(capacity + 1, 0)]
        with_k = table[: max(len(table) - own, 0)] + gain
        if len(with_k) and with_k[-1] > best:
            best, deepest = float(with_k[-1]), k
        is_taken.append(with_k > table[own:])
        np.maximum(with_k, table[own:], out=table[own:])
    if deepest < 0:
        return np.zeros(0, np.int64)
    found, left = [deepest], int(room[deepest] - t_dw[deepest])
    for k in range(deepest - 1, -1, -1):
        before = left - int(t_dw[k])
        if before >= 0 and is_taken[k][before]:
            found.append(k)
            left = before
    return np.array(found[::-1])
