"""The memory budget: what a limit for the process leaves to train in, and to measure importance in."""

from __future__ import annotations

from math import prod

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.timing.table import TimingTable

MEMORY_SHARE = 0.98  # of a limit, for selections: that much the costs of single tensors may be off
# Copies of all weights while importance is measured: gradients, their sums, updates, what is restored afterwards.
MEASURED_WEIGHTS = 5


def memory_room_mb(limit_mb: float, start_mb: float, table: TimingTable, head: np.ndarray) -> float:
    """MB that training may take in a process that takes `limit_mb` in all, resident.

    Args:
        limit_mb: as of `--memory`.
        start_mb: what the process takes before it trains.
        table: timing table of the network.
        head: bool [N] over `model.trainable_variables`, what always trains.

    Raises:
        UserError: training the head alone takes more.
    """
    head_mb = table.predict_mb(head)
    if start_mb + head_mb > limit_mb:
        raise UserError(
            f"memory: {limit_mb:,.0f} MB are too little, training the head alone takes about "
            f"{start_mb + head_mb:,.0f} MB, of them {start_mb:,.0f} MB for TensorFlow, the network and the images; "
            "give a larger --memory, or a smaller --batch_size or --input_size"
        )
    return MEMORY_SHARE * limit_mb - start_mb


def feature_batches(data: ShuffledData) -> float:
    """How many batches all features of `data` are, those of the test examples included."""
    return (data.train_count * (data.view_count or 1) + data.test_count) / data.full_batch


def fitting_rows(table: TimingTable, batch_size: int, room_mb: float) -> tuple[int, float]:
    """In parts of how many examples the gradients of all tensors fit, and the MB that they then take.

    The largest divisor of the batch that fits, or 1.

    Args:
        table: timing table with costs in memory.
        batch_size: of the table.
        room_mb: memory that they may take.
    """
    costs = table.memory
    assert costs is not None, "the table does not contain what tensors cost in memory"
    whatever_mb = costs.beside_mb + float(costs.own_mb.sum() + costs.chain_mb.sum())
    by_rows_mb = max(table.predict_mb(np.ones(len(table.positions), bool)) - whatever_mb, 0.0)
    weights_mb = sum(prod(shape) for shape in table.shapes) * 4e-6
    fixed_mb = whatever_mb + MEASURED_WEIGHTS * weights_mb
    divisors = [rows for rows in range(batch_size, 0, -1) if batch_size % rows == 0]
    needed_mb = {rows: fixed_mb + by_rows_mb * rows / batch_size for rows in divisors}
    rows = next((rows for rows in divisors if needed_mb[rows] <= room_mb), 1)
    return rows, needed_mb[rows]
