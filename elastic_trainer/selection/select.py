"""The selection: importance, timing table and budget are put to the Tensor Selector (paper sections 3.3 and 6).

A mask is bool [N] over `model.trainable_variables`. Here and in the table alone are tensors in backward order.

The table knows the time of a step on the device as it was when the table was measured, "table time". A `Selection` is
what trains, in wall time: a scheme makes it of a mask and of the speed measured now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

import selection_solver_DP
from elastic_trainer.system.memory_budget import MemoryBudget
from elastic_trainer.timing.table import TimingTable

# Importance (1 is the largest) of a filler: a tensor whose update would raise the loss now. It trains where the budget
# has room, as in full training, and before no other. Not in the paper, which never selects such tensors.
# Without a gradient, importance is 0: training it would change nothing.
FILLER = 1e-6
# Parts of `Selection.seconds`: importance with the gradient passes before the first selection, the solver, tracing the
# new step, and its first call, which trains too (TensorFlow optimises the graph in it).
SELECTION_PARTS = ("importance", "solve", "trace", "first_call")


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
) -> np.ndarray:
    """The mask of the tensors of largest importance whose predicted step time is at most `rho` of a full step.

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
    if rho >= 1 and max_depth in (None, len(head)):
        return np.ones(len(head), bool)  # full training, whatever the tensors gain
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
    left_ms = step_limit_ms(table, rho, misses) - table.predict_ms(head, misses)
    t_dy_ms, t_dw_ms, gains = (part[:max_depth] for part in (t_dy_ms, t_dw_ms, gains))
    found = selection_solver_DP.solve(t_dy_ms, t_dw_ms, gains, left_ms, time_resolution).mask
    selected = always.copy()
    selected[: len(found)] |= found == 1
    for shallow, deep in pairs:
        selected[[shallow, deep]] = selected[deep]
    mask = np.empty_like(selected)
    mask[table.positions] = selected
    return mask


def select_upper_part(
    table: TimingTable,
    importance: np.ndarray | None,
    head: np.ndarray,
    rho: float,
    misses: float = 1.0,
    max_depth: int | None = None,
) -> np.ndarray:
    """The mask of all tensors from the output down to some depth, the largest such part within the budget.

    One tensor more may cost less where smaller features pass the cut. So every depth is tried.

    Args as for `select_tensors`; `importance` has no effect.
    """
    limit_ms, best = step_limit_ms(table, rho, misses), head
    for mask in islice(table.upper_parts(head), max_depth):
        if table.predict_ms(mask, misses) <= limit_ms:
            best = mask
    return best


def deepest_within(
    memory: MemoryBudget,
    table: TimingTable,
    head: np.ndarray,
    batch_size: int,
    micro_batch: int | None,
    can_split: bool = False,
) -> int:
    """How many tensors of the backward order steps on batches of this size, in such parts, may reach back to.

    Raises:
        UserError: not even to the mask `head`. `can_split`: a batch can be taken in (smaller) parts.
    """
    assert table.memory is not None
    needed, depth = table.memory.needed_mb, table.depth(head)
    if not memory.fits(needed(batch_size, micro_batch)[depth - 1]):
        what = "training the head alone"
        raise memory.refuse(what, lambda *sizes: float(needed(*sizes)[depth - 1]), batch_size, micro_batch, can_split)
    return max(memory.deepest(needed(batch_size, micro_batch)), depth)


def step_limit_ms(table: TimingTable, rho: float, misses: float = 1.0) -> float:
    """What a step may take in table time; all tensors fit into rho 1, whatever the fit's error."""
    if rho < 1:
        return rho * table.full_step_ms
    all_ms = table.predict_ms(np.ones(len(table.names), bool), misses)
    return max(table.full_step_ms, 1.03 * all_ms)  # more than the solver loses by rounding
