"""Tensor Selector: which tensors to train so that importance is largest within a time budget (paper section 5).

The problem: maximise M·I over 0/1 masks M subject to M·t_dw + f(M)·t_dy <= budget, where f(M) marks every tensor from
the output down to the deepest selected one, because the error gradient must pass through all of them.

The paper solves it by a recursion over (deepest tensor, time) in O(N²·T_q). One observation makes it O(N·T_q) and
exact: once the deepest tensor k is fixed, the error chain costs the same whatever else is selected. What remains is a
0/1 knapsack over the tensors above k, and the prefix table of one knapsack answers it for every k:

    best = max over k of  I_k + K_{k-1}[ capacity - sum_{j<=k} t_dy(j) - t_dw(k) ]

A tensor may take longer by itself than together with one other, its partner: the scale of a batch norm that can be
multiplied into a kernel only if the kernel trains, too. Such a pair enters the table at once, at the deeper of the two,
as one of four choices; for deepest tensors between them, the shallower one is combined with the table by itself. So the
result is exact for pairs as well.

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
from collections.abc import Sequence
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
    partners: ArrayLike | None = None,
    extra: ArrayLike | None = None,
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
        partners: int [N], of a tensor the index of its partner, else -1; a tensor is in one pair at most.
        extra: [N] time that is added to the t_dw of a tensor unless its partner is selected, too.

    Raises:
        ValueError: lengths differ, a time is negative, a number is not finite, time_resolution is below 1, or a tensor
            is in two pairs.
    """
    t_dy, t_dw, gains = _checked(t_dy, t_dw, importance, budget, time_resolution)
    pairs, extra = _checked_pairs(partners, extra, len(gains))
    chain = np.cumsum(t_dy)
    mask = np.zeros(len(gains), np.int8)
    candidates = np.flatnonzero((gains > 0) & (t_dw <= budget - chain))
    items = _items(candidates, chain, t_dw, gains, pairs, extra)
    times = np.concatenate([items.chains, items.alone, items.both])
    is_integer = bool((times == np.floor(times)).all())
    count = int((items.alone > 0).sum())
    steps = None if is_integer and budget <= MAX_EXACT_UNITS else time_resolution or _resolution(count)
    chosen = _choose(items, budget, steps)
    mask[candidates[chosen]] = 1
    return Solution(float(items.gains[chosen].sum()), mask, items.time(chosen), steps)


class _Items(NamedTuple):
    """The tensors worth looking at, by rising depth; arrays are [n].

    Attributes:
        chains: the error chain down to each.
        gains: importances, above 0.
        alone: own time where the tensor's partner, if it has one, is not taken.
        first: of the deeper tensor of a pair the index of the other one, else -1.
        both: own time of the pair if both are taken, else 0.
    """

    chains: np.ndarray
    gains: np.ndarray
    alone: np.ndarray
    first: np.ndarray
    both: np.ndarray

    def own_time(self, chosen: np.ndarray) -> float:
        """Of the tensors with these indices, which rise."""
        is_chosen = np.zeros(len(self.gains), bool)
        is_chosen[chosen] = True
        deeper = np.flatnonzero(is_chosen & (self.first >= 0) & is_chosen[self.first])
        saved = self.alone[deeper] + self.alone[self.first[deeper]] - self.both[deeper]
        return float(self.alone[chosen].sum() - saved.sum())

    def time(self, chosen: np.ndarray) -> float:
        """The same with the error chain."""
        return self.own_time(chosen) + (float(self.chains[chosen[-1]]) if len(chosen) else 0.0)


def _items(
    candidates: np.ndarray,
    chain: np.ndarray,
    t_dw: np.ndarray,
    gains: np.ndarray,
    pairs: list[tuple[int, int]],
    extra: np.ndarray,
) -> _Items:
    place = {tensor: index for index, tensor in enumerate(candidates.tolist())}
    first, both = np.full(len(candidates), -1), np.zeros(len(candidates))
    for pair in pairs:
        if place.keys() >= set(pair):
            shallow, deep = sorted(place[tensor] for tensor in pair)
            first[deep], both[deep] = shallow, t_dw[list(pair)].sum()
    return _Items(chain[candidates], gains[candidates], (t_dw + extra)[candidates], first, both)


def _checked_pairs(
    partners: ArrayLike | None, extra: ArrayLike | None, count: int
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The pairs of tensors, and `extra` as float64 [N]. Raises `ValueError` as `solve`."""
    if partners is None or extra is None:
        return [], np.zeros(count)
    partner, added = np.asarray(partners, np.int64), np.asarray(extra, np.float64)
    if not partner.shape == added.shape == (count,):
        raise ValueError(f"partners and extra need the length of the others, {count}: {partner.shape}, {added.shape}")
    if not np.isfinite(added).all() or (added < 0).any():
        raise ValueError("extra must be finite and not negative")
    pairs = [(tensor, int(partner[tensor])) for tensor in np.flatnonzero(partner >= 0).tolist()]
    if len({tensor for pair in pairs for tensor in pair}) < 2 * len(pairs) or (partner >= count).any():
        raise ValueError("partners: a tensor is in two pairs, or there is no such tensor")
    return pairs, np.where(partner >= 0, added, 0.0)


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


def _choose(items: _Items, budget: float, steps: int | None) -> np.ndarray:
    """Indices, rising, of the best of `items` within `budget`; `steps` is T_q, or None to keep integer times."""
    if steps is None:
        return _Table(items, np.floor(budget - items.chains).astype(np.int64), 0).chosen(0)
    allowed = budget * (1 - 1e-12)  # whoever adds the times up in another order must not find them over the budget
    unrounded = items._replace(alone=items.alone / budget * steps, both=items.both / budget * steps)
    counted = unrounded._replace(alone=np.floor(unrounded.alone + 0.5), both=np.floor(unrounded.both + 0.5))
    added, dropped = _most_over(counted, unrounded), _most_over(unrounded, counted)
    # A selection that fits in real time has at most `added` steps too many, so nothing that fits lies beyond `spare`;
    # one with `dropped` steps to spare fits for certain. The search is between the two.
    spare, cuts = math.ceil(added), math.ceil(added) + math.ceil(dropped)
    rooms = np.floor((allowed - items.chains) / budget * steps) + spare
    table = _Table(counted, rooms.astype(np.int64), cuts)
    fits, fails = cuts, -1  # the smallest cut known to fit, the largest known not to
    while fits - fails > 1:
        cut = (fits + fails) // 2
        chosen = table.chosen(cut)
        if len(chosen) and items.time(chosen) > allowed:
            fails = cut
        else:
            fits = cut
    return table.chosen(fits)


def _most_over(these: _Items, those: _Items) -> float:
    """By how much the own time of any selection may be larger in `these` than in `those`, which differ in times."""
    over = np.maximum(these.alone - those.alone, 0)
    deep = np.flatnonzero(these.first >= 0)
    shallow = these.first[deep]
    over[deep] = np.max([over[deep], over[shallow], these.both[deep] - those.both[deep]], axis=0)
    over[shallow] = 0.0
    return float(over.sum())


class _Option(NamedTuple):
    """Tensors that may be taken together: their indices, steps of their own time, and importance."""

    tensors: tuple[int, ...]
    weight: int
    gain: float


class _Choice(NamedTuple):
    """Where an option is taken.

    Attributes:
        option: which.
        start: number of steps that `taken` starts at.
        taken: a bit for each number of steps from there on, whether the option belongs to the best within them.
    """

    option: _Option
    start: int
    taken: np.ndarray

    def is_taken(self, room: int) -> bool:
        """Whether it belongs to the best within `room` steps, which must be less than the table's length."""
        left = room - self.start
        return left >= 0 and bool(self.taken[left >> 3] >> (left & 7) & 1)


def _enter(table: np.ndarray, before: np.ndarray, options: Sequence[_Option]) -> list[_Choice]:
    """Keep in `table`, in place, the larger of itself and of `before` with one of the options.

    Where several are taken, the last one counts.

    Args:
        table: largest importance within the last of `before`'s numbers of steps.
        before: the same without the options, for each number of steps from 0 on.
        options: at most one of them is taken.
    """
    first, choices = len(before) - len(table), []
    for option in options:
        start = max(first, option.weight)
        with_it = before[start - option.weight : max(len(before) - option.weight, 0)] + option.gain
        without = table[start - first :]
        choices.append(_Choice(option, start, np.packbits(with_it > without, bitorder="little")))
        np.maximum(with_it, without, out=without)
    return choices


class _Table:
    """The knapsack of all prefixes, in integer steps, for every room from `rooms` down to `rooms` - `cuts` at once.

    Args:
        items: the tensors; times are whole numbers of steps.
        rooms: int64 [n] steps left beside the error chain down to each tensor; never grows with depth.
        cuts: how many steps less than `rooms` `chosen` may be asked for.
    """

    def __init__(self, items: _Items, rooms: np.ndarray, cuts: int) -> None:
        self._rooms: list[int] = rooms.tolist()
        self._cuts = cuts
        alone, both = items.alone.astype(np.int64).tolist(), items.both.astype(np.int64).tolist()
        gains, first = items.gains.tolist(), items.first.tolist()
        has_deeper = set(first)
        single = [_Option((k,), weight, gain) for k, (weight, gain) in enumerate(zip(alone, gains, strict=True))]
        # table[c]: largest importance of the tensors so far within c steps. Room shrinks with depth, and the table with
        # it. Of a pair, the shallower tensor is pending until the deeper one is reached.
        table: np.ndarray = np.zeros(max(self._rooms[0] + 1, 0) if self._rooms else 0)
        pending: list[int] = []
        self._entered: list[list[_Choice]] = []  # at each tensor, into the table
        self._as_deepest: list[list[_Choice]] = []  # with each tensor as the deepest: its choices
        self._beside: list[list[_Choice]] = []  # and pending ones that may be taken beside it
        self._best, self._deepest = np.zeros(cuts + 1), np.full(cuts + 1, -1)
        for k, room in enumerate(self._rooms):
            table = table[: max(room + 1, 0)]
            with_k = pair = [single[k]]
            if first[k] >= 0:
                pending.remove(first[k])
                with_k = [single[k], _Option((first[k], k), both[k], gains[first[k]] + gains[k])]
                pair = [single[first[k]], *with_k]
            beside, choices = table, []
            for other in pending:
                before, beside = beside, beside.copy()
                choices += _enter(beside, before, [single[other]])
            self._beside.append(choices)
            self._try_as_deepest(k, beside, with_k)
            if k in has_deeper:
                pending.append(k)
                self._entered.append([])
            else:
                self._entered.append(_enter(table, table if len(pair) == 1 else table.copy(), pair))

    def _try_as_deepest(self, k: int, before: np.ndarray, with_k: Sequence[_Option]) -> None:
        """Keep tensor `k` as the deepest where one of the options `with_k` is better than all so far."""
        table = np.full(min(self._cuts + 1, len(before)), -np.inf)
        self._as_deepest.append(_enter(table, before, with_k))
        values = table[::-1]  # the entire room used, one step less, two steps less, …
        better = np.flatnonzero(values > self._best[: len(values)])
        self._best[better], self._deepest[better] = values[better], k

    def chosen(self, cut: int) -> np.ndarray:
        """Indices, rising, of the best tensors where every room is `cut` steps smaller."""
        deepest = int(self._deepest[cut])
        if deepest < 0:
            return np.zeros(0, np.int64)
        room, found = self._rooms[deepest] - cut, []
        exclusive = [self._as_deepest[deepest]]
        exclusive += [[choice] for choice in reversed(self._beside[deepest])]
        exclusive += [self._entered[k] for k in range(deepest - 1, -1, -1)]
        for choices in exclusive:
            for choice in reversed(choices):
                if choice.is_taken(room):
                    found += choice.option.tensors
                    room -= choice.option.weight
                    break
        return np.array(sorted(found))
