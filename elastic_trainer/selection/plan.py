"""What elastic training would select on a board at several rho."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from elastic_trainer.timing.table import TimingTable


RHOS = tuple(np.arange(35, 71, 5) / 100)


def plan_lines(table: TimingTable, head: np.ndarray, importance: np.ndarray) -> Iterator[str]:
    """What elastic training would choose from `table` at several rho, a row each.

    Args:
        table: of a network with N trainable tensors.
        head: bool [N], the tensors that always train.
        importance: [N].
    """
    from elastic_trainer.selection.select import select_tensors
    from elastic_trainer.selection.time_budget import TimeBudget

    smallest_rho = TimeBudget(table, head).smallest_rho
    yield " rho  feasible  predicted step  over full step  trained tensors"
    for rho in RHOS:
        if rho < smallest_rho:
            yield f"{rho:.2f}  no"
            continue
        choice = select_tensors(table, importance, head, rho)
        step_ms = table.predict_ms(choice.mask)
        count = f"{int(choice.mask.sum())} of {len(head)}"
        yield f"{rho:.2f}  yes       {step_ms:11.1f} ms  {step_ms / table.full_step_ms:14.3f}  {count:>15}"
