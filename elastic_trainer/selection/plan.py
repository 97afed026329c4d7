"""The plan for another board: what elastic training would select from its timing table at several rho."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastic_trainer.selection.select import select_tensors
from elastic_trainer.timing.table import TimingTable

PLANNED_RHOS = tuple(np.arange(10, 71, 5) / 100)


def plan_lines(table: TimingTable, head: np.ndarray, importance: np.ndarray) -> Iterator[str]:
    """What elastic training would select from `table`, a row for each rho, without and with cached features.

    Args:
        table: of a network with N trainable tensors.
        head: bool [N], the tensors that always train.
        importance: [N].
    """
    yield f"      {'without cached features':>34}  {'with cached features':>34}"
    columns = f"{'predicted':>12}{'over full':>11}{'tensors':>11}"
    yield f" rho  {columns}  {columns}"
    for rho in PLANNED_RHOS:
        yield f"{rho:.2f}  " + "  ".join(_planned(table, head, importance, rho, misses) for misses in (1.0, 0.0))


def _planned(table: TimingTable, head: np.ndarray, importance: np.ndarray, rho: float, misses: float) -> str:
    """Predicted step, that over a full one, and the number of tensors; or that `rho` is too small for the head."""
    if table.predict_ms(head, misses) > rho * table.full_step_ms:
        return f"{'not feasible':>34}"
    selection = select_tensors(table, importance, head, rho, misses=misses)
    step_ms = table.predict_ms(selection.mask, misses)
    count = f"{int(selection.mask.sum())} of {len(head)}"
    return f"{step_ms:9.1f} ms{step_ms / table.full_step_ms:11.3f}{count:>11}"
