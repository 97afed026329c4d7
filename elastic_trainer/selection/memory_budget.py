"""What a limit of memory leaves for selections, and for measuring importance."""

from __future__ import annotations

from math import inf

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData, part_rows
from elastic_trainer.engine.memory import MemoryBudget
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable

MEMORY_SHARE = 0.98  # of a limit, for selections: the costs of single tensors are off by that much
# Copies of all weights while importance is measured: gradients, their sums, updates, what is restored afterwards.
MEASURED_WEIGHTS = 5


def selection_room_mb(
    memory: MemoryBudget, table: TimingTable, head: np.ndarray, rows: int, parts: int = 1, can_split: bool = False
) -> float:
    """MB that a selection, with `head` in it, may take by the costs of its tensors; infinity without a limit.

    `table` is of steps on a batch in `parts` of `rows` examples each; `can_split`: there can be smaller parts.

    Raises:
        UserError: training the head alone takes more than there is.
    """
    if not memory.has_limit:
        return inf
    if not memory.fits(table.predict_mb(head)):
        fixed_mb, by_rows_mb = table.parts_mb(head)
        sums_mb = table.tensors_mb(head)  # of gradients, over the parts of a batch
        fixed_mb -= sums_mb if parts > 1 else 0.0

        def needed(batch_size: int, micro_batch: int) -> float:
            part = part_rows(batch_size, micro_batch)
            return fixed_mb + (sums_mb if part < batch_size else 0.0) + by_rows_mb * part / rows

        raise memory.refuse("training the head alone", needed, rows * parts, rows, can_split)
    return MEMORY_SHARE * memory.limit_mb - (memory.start_mb or 0.0)


def feature_batches(data: ShuffledData, settings: Settings) -> float:
    """How many batches all features of `data` are in float32, as which those of the test examples are kept."""
    views = (data.view_count or 1) / (2 if settings.feature_cache == "float16" else 1)
    return (data.train_count * views + data.test_count) / data.full_batch


def fitting_rows(table: TimingTable, batch_size: int, room_mb: float) -> tuple[int, float]:
    """In parts of how many examples the gradients of all tensors fit, and the MB that they then take.

    The largest divisor of the table's `batch_size` that fits into `room_mb`, or 1.
    """
    everything = np.ones(len(table.names), bool)
    fixed_mb, by_rows_mb = table.parts_mb(everything)
    fixed_mb += MEASURED_WEIGHTS * table.tensors_mb(everything)
    divisors = [rows for rows in range(batch_size, 0, -1) if batch_size % rows == 0]
    needed_mb = {rows: fixed_mb + by_rows_mb * rows / batch_size for rows in divisors}
    rows = next((rows for rows in divisors if needed_mb[rows] <= room_mb), 1)
    return rows, needed_mb[rows]
