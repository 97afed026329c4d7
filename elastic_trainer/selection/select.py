"""The selection: importance, timing table and budget are put to the Tensor Selector (paper section 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import selection_solver_DP
from elastic_trainer.timing.forward_costs import COMPUTED, FeatureUse
from elastic_trainer.timing.table import TimingTable

# Shares of the budget: an upper part is kept if it takes at most SHORTER less than the best one, and at most LONGER
# beyond the budget.
SHORTER, LONGER = 0.05, 0.01
SELECTION_PARTS = ("importance", "solve", "trace", "first_call")


@dataclass
class Selection:
    """The tensors that train from now on, and why.

    Attributes:
        mask: bool [N] over `model.trainable_variables`.
        importance: [N], normalised, or None for a scheme that does not measure it.
        predicted_step_ms, budget_step_ms: by the time budget, or None. The first is without `making_ms`.
        making_ms: of computing the cached features that its steps run on, as far as they are missing, per step.
        keeps_features: whether it runs on the features that are cached already; else on new ones, or on none.
        feature_steps: for which new features are of use, 0 if none are needed; None: until the next selection.
        epoch: when it was made, in epochs since the start.
        rho, slowdown, correction: as in `time_budget.Allowance`, or None.
        seconds: what it took, by SELECTION_PARTS: importance with the gradient passes before the first selection, the
            solver, tracing the new step, and its first call, which trains too (TensorFlow optimises the graph in it).
    """

    mask: np.ndarray
    importance: np.ndarray | None = None
    predicted_step_ms: float | None = None
    budget_step_ms: float | None = None
    making_ms: float = 0.0
    keeps_features: bool = False
    feature_steps: int | None = None
    epoch: float = 0
    rho: float | None = None
    slowdown: float | None = None
    correction: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def needs_features(self) -> bool:
        """Whether its steps take as long as predicted only if features are cached."""
        return self.keeps_features or self.making_ms > 0

    @property
    def predicted_share(self) -> float:
        """Predicted step time over that of full training; 1 without a budget."""
        full_ms = self.full_step_ms
        return (self.predicted_step_ms or 0.0) / full_ms if full_ms else 1.0

    @property
    def full_step_ms(self) -> float | None:
        """Full training's step as it would have run when this was selected, or None without a budget."""
        return self.budget_step_ms / self.rho if self.budget_step_ms and self.rho else None


def select_tensors(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    time_resolution: int | None = None,
    features: FeatureUse = COMPUTED,
) -> Selection:
    """Solve for the selection of largest importance whose predicted step time is at most `rho` of a full step.

    Args:
        table: timing table of the network.
        importance, head: [N] over `model.trainable_variables`; the head is always selected, its cost comes first.
        rho: step time over a full step's, both in the table's time; 1 sets no limit, whatever the fit's error.
        time_resolution: T_q, see `selection_solver_DP.solve`.
        features: the cached features that it may use or make; making them is part of the step time.
    """
    budget_ms = step_budget_ms(table, rho, features)
    problem = problem_beside(table, importance, head, budget_ms, features)
    solution = selection_solver_DP.solve(
        problem.t_dy_ms,
        problem.t_dw_ms,
        problem.importance,
        problem.room_ms,
        time_resolution,
        problem.kernels,
        problem.unfolded_ms,
    )
    return selection_of(table, with_solution(table, head, solution.mask), importance, budget_ms, features)


def select_upper_part(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    time_resolution: int | None = None,
    features: FeatureUse = COMPUTED,
) -> Selection:
    """All tensors from the output down to some depth, the largest such part that fits the budget. No importance counts.

    One tensor more may cost less: where smaller features pass the cut, or a gamma is joined by its kernel. So every
    depth is tried.

    Args as for `select_tensors`; `importance` and `time_resolution` have no effect.
    """
    budget_ms, mask, best = step_budget_ms(table, rho, features), head.copy(), head
    for position in table.positions:
        mask[position] = True
        if table.predict_ms(mask, features) <= budget_ms:
            best = mask.copy()
    return selection_of(table, best, None, budget_ms, features)


def unless_close(
    table: TimingTable, selection: Selection, present: np.ndarray | None, features: FeatureUse
) -> Selection:
    """`selection`, or bool [N] `present` again if it is nearly as large and nearly fits.

    A new selection needs a new graph and perhaps new features. Where no importance counts, a few tensors more or less
    are not worth them.
    """
    budget_ms = selection.budget_step_ms
    if selection.importance is not None or selection.mask.all() or present is None or budget_ms is None:
        return selection
    present_ms, best_ms = (table.predict_ms(mask, features) for mask in (present, selection.mask))
    if best_ms - SHORTER * budget_ms <= present_ms <= (1 + LONGER) * budget_ms:
        return selection_of(table, present, None, budget_ms, features)
    return selection


class Problem(NamedTuple):
    """What the solver is given, tensors in backward order: see `selection_solver_DP.solve`.

    Attributes:
        t_dy_ms, t_dw_ms, importance: float [N].
        room_ms: time that may be spent.
        kernels: int [N], the partner of a gamma, which takes longer unless its kernel trains, too; else -1.
        unfolded_ms: float [N], what it then takes in addition.
    """

    t_dy_ms: np.ndarray
    t_dw_ms: np.ndarray
    importance: np.ndarray
    room_ms: float
    kernels: np.ndarray
    unfolded_ms: np.ndarray


def problem_beside(
    table: TimingTable, importance: np.ndarray, head: np.ndarray, budget_ms: float, features: FeatureUse = COMPUTED
) -> Problem:
    """The problem beside bool [N] `head`, which always trains: it gains nothing, it and the way to it cost no more."""
    always = head[table.positions]
    t_dy_ms = table.wall_t_dy_ms(features)
    t_dy_ms[: table.depth(head)] = 0.0
    kernels = np.where(always[table.kernels], -1, table.kernels)  # a kernel that always trains is folded
    return Problem(
        t_dy_ms,
        np.where(always, 0.0, table.wall_t_dw_ms),
        np.where(always, 0.0, importance[table.positions]),
        budget_ms - table.predict_ms(head, features),
        kernels,
        table.unfolded_ms,
    )


def with_solution(table: TimingTable, head: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """Bool [N] `head` and what the solver selected, int [N] in backward order."""
    mask = head.copy()
    mask[table.positions[solution == 1]] = True
    return mask


def step_budget_ms(table: TimingTable, rho: float, features: FeatureUse) -> float:
    """What a step may take in the table's time; all tensors fit into rho 1, whatever the fit's error."""
    if rho < 1:
        return rho * table.full_step_ms
    all_ms = table.predict_ms(np.ones(len(table.positions), bool), features) + float(table.unfolded_ms.sum())
    return max(table.full_step_ms, 1.001 * all_ms)


def selection_of(
    table: TimingTable, mask: np.ndarray, importance: np.ndarray | None, budget_ms: float, features: FeatureUse
) -> Selection:
    """Bool [N] `mask` with what its steps take; importance [N], or None where none was measured."""
    step_ms, making_ms, cached_depth = table.predict(mask, features)
    keeps = cached_depth is not None and cached_depth == features.cached_depth
    return Selection(mask, importance, step_ms, budget_ms, making_ms, keeps)
