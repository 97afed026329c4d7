"""The tensors to train: importance, timing table and budget put to the Tensor Selector."""

from __future__ import annotations

import numpy as np

import selection_solver_DP
from elastic_trainer.selection.selection import Choice
from elastic_trainer.timing.table import TimingTable


def select_tensors(
    table: TimingTable, importance: np.ndarray, head: np.ndarray, rho: float, time_resolution: int | None = None
) -> Choice:
    """Solve for the selection of largest importance whose predicted step time is at most `rho` of a full step.

    Args:
        table: timing table of the network.
        importance, head: [N] over `model.trainable_variables`; the head is always selected, its cost comes first.
        rho: step time over a full step's, both in the table's time; 1 sets no limit, whatever the fit's error.
        time_resolution: T_q, see `selection_solver_DP.solve`.
    """
    budget_ms = rho * table.full_step_ms
    if rho >= 1:
        budget_ms = max(budget_ms, 1.001 * table.predict_ms(np.ones(len(head), bool)))
    order = table.positions
    own_ms, chain_ms = table.own_ms.copy(), table.chain_ms.copy()
    forced = head[order]
    own_ms[forced] = 0.0
    chain_ms[: np.flatnonzero(forced)[-1] + 1] = 0.0
    gain = np.where(forced, 0.0, importance[order])
    room_ms = budget_ms - table.predict_ms(head)
    solved = selection_solver_DP.solve(chain_ms, own_ms, gain, room_ms, time_resolution)
    mask = head.copy()
    mask[order[solved.mask == 1]] = True
    return Choice(mask, importance, table.predict_ms(mask), budget_ms)
