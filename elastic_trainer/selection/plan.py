"""The plan for another board: what elastic training would select from its timing table at several rho."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastic_trainer.selection.select import select_tensors
from elastic_trainer.selection.time_budget import smallest_rho
from elastic_trainer.timing.table import TimingTable

PLANNED_RHOS = tuple(np.arange(35, 71, 5) / 100)


def plan_lines(table: TimingTable, head: np.ndarray, importance: np.ndarray) -> Iterator[str]:
    """What elastic training would select from `table`, a row for each rho.

    Args:
        table: of a network with N trainable tensors.
        head: bool [N], the tensors that always train.
        importance: [N].
    """
    smallest = smallest_rho(table, head)
    yield " rho  feasible  predicted step  over full step  trained tensors"
    for rho in PLANNED_RHOS:
        if rho < smallest:
            yield f"{rho:.2f}  no"
            continue
        selection = select_tensors(table, importance, head, rho)
        step_ms = table.predict_ms(selection.mask)
        count = f"{int(selection.mask.sum())} of {len(head)}"
        yield f"{rho:.2f}  yes       {step_ms:11.1f} ms  {step_ms / table.full_step_ms:14.3f}  {count:>15}"
