"""The selection: importance, timing table and budget are put to the Tensor Selector (paper sections 3.3 and 6).

Here and in the table alone are tensors in backward order: whatever asks for a selection, and the selection that it
gets, has them in the order of `model.trainable_variables`.

The table knows the time of a step on the device as it was when the table was measured, "table time". A `Plan` is in
table time. A `Selection` is what trains, in wall time: a scheme makes it of a plan and of the speed measured now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

import selection_solver_DP
from elastic_trainer.timing.table import TimingTable

# Of the budget: the current upper part is kept if it takes at most SHORTFALL less than the best one, and at most
# OVERRUN beyond the budget.
SHORTFALL, OVERRUN = 0.05, 0.01
# Importance (1 is the largest) of a filler: a tensor whose update would raise the loss now. It trains where the budget
# has room, as in full training, and before no other. Not in the paper, which never selects such tensors.
# Without a gradient, importance is 0: training it would change nothing.
FILLER = 1e-6
# Parts of `Selection.seconds`: importance with the gradient passes before the first selection, the solver, tracing the
# new step, and its first call, which trains too (TensorFlow optimises the graph in it).
SELECTION_PARTS = ("importance", "solve", "trace", "first_call")


class Plan(NamedTuple):
    """The tensors that fit a budget, and what their steps take, in ms of table time (`timing.table.StepPrediction`)."""

    mask: np.ndarray  # bool [N] over `model.trainable_variables`
    importance: np.ndarray | None  # [N]; None for a selector that does not use it
    step_ms: float
    caching_ms: float
    uses_features: bool
    budget_ms: float  # what step_ms and caching_ms may be together


@dataclass
class Selection:
    """The tensors that train from now on, why, and what was measured since.

    Times are wall time; None: there is no budget, or they are unknown.
    """

    mask: np.ndarray  # bool [N] over `model.trainable_variables`
    importance: np.ndarray | None = None  # [N], normalised; None for a scheme that does not measure it
    predicted_step_ms: float | None = None  # without making features
    budget_step_ms: float | None = None
    uses_features: bool = False  # its steps take as long as predicted only if features are cached
    epoch: float = 0  # when it was made, in epochs since the start
    rho: float | None = None  # as of `budget.RhoBudget`, like the next two
    slowdown: float | None = None
    correction: float | None = None
    memory_mb: float | None = None  # what the process is expected to take at most, resident; None: not known
    seconds: dict[str, float] = field(default_factory=dict)  # what it took, by SELECTION_PARTS
    step: int = 0  # number of its first step; 0 is the run's first
    step_ms: list[float] = field(default_factory=list)  # their measured times
    slowdowns: list[float] = field(default_factory=list)  # by each gradient pass among them, see `selection.budget`

    @property
    def predicted_share(self) -> float:
        """Predicted step time over that of full training; 1 without a budget."""
        full_ms = self.full_step_ms
        return (self.predicted_step_ms or 0.0) / full_ms if full_ms else 1.0

    def text(self, used: np.ndarray) -> str:
        """What trains, in a line; bool [N] `used` as of `task.StepVariables`."""
        count, share = (self.mask & used).sum(), self.predicted_share
        line = f"{count} of {used.sum()} tensors train"
        if self.full_step_ms and not self.mask[used].all():
            line += f", predicted {share:.2f} of plain fit's step time"
        return line if used.all() else f"{line}; the loss does not depend on {(~used).sum()} others"

    @property
    def full_step_ms(self) -> float | None:
        """Full training's step as it would have run when this was selected, or None without a budget."""
        return self.budget_step_ms / self.rho if self.budget_step_ms and self.rho else None


def select_tensors(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    misses: float = 1.0,
    max_depth: int | None = None,
    *,
    time_resolution: int | None = None,
    has_fillers: bool = False,
) -> Plan:
    """Solve for the tensors of largest importance whose predicted step time is at most `rho` of a full step.

    A gamma whose batch norm is folded into a kernel trains only with that kernel: alone it costs nearly as much, since
    its batch norm then runs as a layer.

    Args:
        table: timing table of the network.
        importance, head: [N] over `model.trainable_variables`; the head is always selected, its cost comes first.
        rho: step time over a full step's, both in table time; 1 sets no limit, whatever the fit's error.
        misses: of cached features, see `timing.fit`; making them is part of the step time.
        max_depth: how many tensors of the backward order may train, the last of which is the deepest; None: all.
        time_resolution: T_q, see `selection_solver_DP.solve`.
        has_fillers: tensors of negative importance train where the budget has room.
    """
    budget_ms = _budget_ms(table, rho, misses)
    if rho >= 1 and max_depth in (None, len(head)):  # full training, whatever the tensors gain
        return plan_of(table, np.ones(len(head), bool), importance, budget_ms, misses)
    # In backward order. What always trains gains nothing; it and the chain to it are paid for.
    always, kernels = head[table.positions], table.kernels
    t_dy_ms = table.wall_t_dy_ms(misses)
    t_dy_ms[: table.depth(head)] = 0.0
    t_dw_ms = np.where(always, 0.0, table.wall_t_dw_ms)
    gains = np.where(always, 0.0, importance[table.positions])
    # A gamma and its kernel are one tensor, at the place of the deeper one; the other gains and costs nothing.
    gammas = np.flatnonzero((kernels >= 0) & ~always & ~always[kernels])
    pairs = [sorted((int(gamma), int(kernels[gamma]))) for gamma in gammas]
    for shallow, deep in pairs:
        for each in (t_dw_ms, gains):
            each[deep] += each[shallow]
            each[shallow] = 0.0
    if has_fillers:
        gains[gains < 0] = FILLER
    left_ms = budget_ms - table.predict_ms(head, misses)
    t_dy_ms, t_dw_ms, gains = (part[:max_depth] for part in (t_dy_ms, t_dw_ms, gains))
    found = selection_solver_DP.solve(t_dy_ms, t_dw_ms, gains, left_ms, time_resolution).mask
    selected = always.copy()
    selected[: len(found)] |= found == 1
    for shallow, deep in pairs:
        selected[[shallow, deep]] = selected[deep]
    mask = np.empty_like(selected)
    mask[table.positions] = selected
    return plan_of(table, mask, importance, budget_ms, misses)


def select_upper_part(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    misses: float = 1.0,
    max_depth: int | None = None,
) -> Plan:
    """All tensors from the output down to some depth, the largest such part within the budget. No importance counts.

    One tensor more may cost less where smaller features pass the cut. So every depth is tried.

    Args as for `select_tensors`; `importance` has no effect.
    """
    budget_ms = _budget_ms(table, rho, misses)
    best = plan_of(table, head, None, budget_ms, misses)
    for mask in islice(table.upper_parts(head), max_depth):
        plan = plan_of(table, mask, None, budget_ms, misses)
        if plan.step_ms + plan.caching_ms <= budget_ms:
            best = plan
    return best


def keep_if_close(table: TimingTable, plan: Plan, current: np.ndarray, misses: float, changing_ms: float = 0.0) -> Plan:
    """The plan of bool [N] `current` if it is that of `plan`, or nearly as large and nearly fits; else `plan`.

    A new selection needs a new graph and new features. Where no importance counts, a few tensors more or less are not
    worth them. A change takes `changing_ms` for each step that is left of the run; `misses` are those of the features
    that `current` has already (`timing.fit`).
    """
    current_ms, plan_ms = table.predict_ms(current, misses), plan.step_ms + plan.caching_ms
    is_close = plan_ms - SHORTFALL * plan.budget_ms <= current_ms <= (1 + OVERRUN) * plan.budget_ms
    is_close |= abs(plan_ms - current_ms) <= changing_ms
    is_free = plan.importance is None and not plan.mask.all()
    if (is_free and is_close) or (plan.mask == current).all():
        return plan_of(table, current, plan.importance, plan.budget_ms, misses)
    return plan


def _budget_ms(table: TimingTable, rho: float, misses: float) -> float:
    """What a step may take in table time; all tensors fit into rho 1, whatever the fit's error."""
    if rho < 1:
        return rho * table.full_step_ms
    all_ms = table.predict_ms(np.ones(len(table.names), bool), misses)
    return max(table.full_step_ms, 1.03 * all_ms)  # more than the solver loses by rounding


def plan_of(
    table: TimingTable, mask: np.ndarray, importance: np.ndarray | None, budget_ms: float, misses: float
) -> Plan:
    """Bool [N] `mask` with what its steps take; importance [N], or None where none was measured."""
    return Plan(mask, importance, *table.predict(mask, misses), budget_ms)
