"""Tensor Selector: which tensors to train so that importance is largest within a time budget (paper section 5).

The problem: maximise M·I over 0/1 masks M subject to M·t_dw + f(M)·t_dy <= budget, where f(M) marks every tensor from
the output down to the deepest selected one, because the error gradient must pass through all of them.

The paper solves it by a recursion over (deepest tensor, time) in O(N²·T_q). One observation makes it O(N·T_q) and
exact: once the deepest tensor k is fixed, the error chain costs the same whatever else is selected. What remains is a
0/1 knapsack over the tensors above k, and the prefix table of one knapsack answers it for every k:

    best = max over k of  I_k + K_{k-1}[ capacity - sum_{j<=k} t_dy(j) - t_dw(k) ]

The table needs integers, so real times are counted in steps, T_q of which make up the budget. Rounding up would be
safe, but each of hundreds of tensors would lose half a step. Times are rounded to the nearest step instead; errors
mostly cancel. The table is filled a little past the budget and searched for the largest room whose selection fits in
real time. The budget is therefore kept whatever T_q is; T_q only decides how much importance is lost.

That loss is bounded: each of n tensors is wrong by at most half a step, so the result is worth at least the best
selection for budget - (n/2 + 3) steps. By default T_q is chosen so that this is 99.9 % of the budget (see `solve`).

NumPy only, so that it can be used and tested on its own. Tensors are in backward order: index 0 is next to the output.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

ROUNDING_LOSS = 0.001  # share of the budget that rounding may cost where T_q is chosen automatically
MAX_CELLS = 200_000_000  # tensors times T_q, where T_q is chosen automatically; well under a second on a PC
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
    t_dy: ArrayLike,
    t_dw: ArrayLike,
    importance: ArrayLike,
    budget: float,
    time_resolution: int | None = None,
) -> Solution:
    """The selection of largest total importance that takes at most `budget` (paper section 5.2).

    Integer times with a budget of at most `MAX_EXACT_UNITS` are not rounded, and the result is exact. Other times are
    counted in `time_resolution` steps of the budget; the result never takes longer than the budget, and rounding costs
    importance only. By default there are as many steps as make it certain that the result is worth at least the best
    selection for 99.9 % of the budget. Beyond about 630 tensors `MAX_CELLS` allows fewer: then that is no longer
    certain, only measured (`scripts/benchmarks/benchmark_solver.py`). Fewer steps than tensors are too few for a good
    result.

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
    t_dy, t_dw, gains = _checked(t_dy, t_dw, importance, budget, time_resolution)
    chain = np.cumsum(t_dy)
    mask = np.zeros(len(gains), np.int8)
    candidates = np.flatnonzero((gains > 0) & (t_dw <= budget - chain))
    chains, owns = chain[candidates], t_dw[candidates]
    is_integer = bool((owns == np.floor(owns)).all() and (chains == np.floor(chains)).all())
    steps = None if is_integer and budget <= MAX_EXACT_UNITS else time_resolution or _resolution(int((owns > 0).sum()))
    chosen = candidates[_choose(chains, owns, gains[candidates], budget, steps)]
    mask[chosen] = 1
    time = float(t_dw[chosen].sum() + (chain[chosen[-1]] if len(chosen) else 0.0))
    return Solution(float(gains[chosen].sum()), mask, time, steps)


def _checked(
    t_dy: ArrayLike, t_dw: ArrayLike, importance: ArrayLike, budget: float, time_resolution: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t_dy, t_dw and importance as float64 [N]. Raises `ValueError` as `solve`."""
    error_times, own_times, gains = (np.asarray(array, np.float64) for array in (t_dy, t_dw, importance))
    if not (error_times.ndim == 1 and error_times.shape == own_times.shape == gains.shape):
        raise ValueError(
            f"t_dy, t_dw and importance need one length: {error_times.shape}, {own_times.shape}, {gains.shape}"
        )
    if not (np.isfinite(error_times).all() and np.isfinite(own_times).all() and np.isfinite(gains).all()):
        raise ValueError("t_dy, t_dw and importance must be finite")
    if not np.isfinite(budget):
        raise ValueError(f"the budget must be finite, not {budget}")
    if (error_times < 0).any() or (own_times < 0).any():
        raise ValueError("times must not be negative")
    if time_resolution is not None and time_resolution < 1:
        raise ValueError(f"time_resolution must be at least 1, not {time_resolution}")
    return error_times, own_times, gains


def _resolution(tensors: int) -> int:
    """Steps for this many tensors of which each is rounded: half a step each, and three for rounding their sums."""
    return max(min(math.ceil((tensors / 2 + 3) / ROUNDING_LOSS), MAX_CELLS // max(tensors, 1)), 1)


def _choose(chains: np.ndarray, owns: np.ndarray, gains: np.ndarray, budget: float, steps: int | None) -> np.ndarray:
    """Indices, rising, of the best tensors within `budget`; `steps` is T_q, or None to keep integer times as they are.

    Arrays are [n], of tensors worth looking at only: the error chain down to each, its own time, its importance.
    """
    if steps is None:
        return _Table(owns.astype(np.int64), np.floor(budget - chains).astype(np.int64), gains, 0).chosen(0)
    allowed = budget * (1 - 1e-12)  # whoever adds the times up in another order must not find them over the budget
    unrounded = owns / budget * steps
    weights = np.floor(unrounded + 0.5)
    added = np.maximum(weights - unrounded, 0).sum()
    dropped = np.maximum(unrounded - weights, 0).sum()
    # A selection that fits in real time has at most `added` steps too many, so nothing that fits lies beyond `spare`;
    # one with `dropped` steps to spare fits for certain. The search is between the two.
    spare, cuts = math.ceil(added), math.ceil(added) + math.ceil(dropped)
    rooms = np.floor((allowed - chains) / budget * steps) + spare
    table = _Table(weights.astype(np.int64), rooms.astype(np.int64), gains, cuts)
    fits, fails = cuts, -1  # the smallest cut known to fit, the largest known not to
    while fits - fails > 1:
        cut = (fits + fails) // 2
        chosen = table.chosen(cut)
        if len(chosen) and owns[chosen].sum() + chains[chosen[-1]] > allowed:
            fails = cut
        else:
            fits = cut
    return table.chosen(fits)


class _Table:
    """The knapsack of all prefixes, in integer steps, for every room from `rooms` down to `rooms` - `cuts` at once.

    Args:
        weights: int64 [n] steps of each tensor's own gradient.
        rooms: int64 [n] steps left beside the error chain down to each tensor; never grows with depth.
        gains: float64 [n] importances, above 0.
        cuts: how many steps less than `rooms` `chosen` may be asked for.
    """

    def __init__(self, weights: np.ndarray, rooms: np.ndarray, gains: np.ndarray, cuts: int) -> None:
        self._weights: list[int] = weights.tolist()
        self._rooms: list[int] = rooms.tolist()
        # table[c]: largest importance of the tensors so far within c steps. Room shrinks with depth, and the table with
        # it. taken[k]: a bit for each c, from the weight of k on, whether k belongs to that largest importance.
        self._taken: list[np.ndarray] = []
        best, self._deepest = np.zeros(cuts + 1), np.full(cuts + 1, -1)
        table: np.ndarray = np.zeros(max(self._rooms[0] + 1, 0) if self._rooms else 0)
        for k, (weight, room, gain) in enumerate(zip(self._weights, self._rooms, gains.tolist(), strict=True)):
            table = table[: max(room + 1, 0)]
            with_k = table[: max(room + 1 - weight, 0)] + gain
            as_deepest = with_k[::-1][: cuts + 1]  # the entire room used, one step less, two steps less, …
            better = np.flatnonzero(as_deepest > best[: len(as_deepest)])
            best[better], self._deepest[better] = as_deepest[better], k
            without_k = table[weight:]
            self._taken.append(np.packbits(with_k > without_k, bitorder="little"))
            np.maximum(with_k, without_k, out=without_k)

    def chosen(self, cut: int) -> np.ndarray:
        """Indices, rising, of the best tensors where every room is `cut` steps smaller."""
        deepest = int(self._deepest[cut])
        if deepest < 0:
            return np.zeros(0, np.int64)
        found = [deepest]
        room = self._rooms[deepest] - cut - self._weights[deepest]
        for k in range(deepest - 1, -1, -1):
            left = room - self._weights[k]
            if left >= 0 and self._taken[k][left >> 3] >> (left & 7) & 1:
                found.append(k)
                room = left
        return np.array(found[::-1])
