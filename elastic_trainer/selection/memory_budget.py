"""The memory budget: what a limit for the process leaves to train in, and to measure importance in."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.machine import reachable_memory_mb
from elastic_trainer.memory.alternatives import Alternative, larger_limit, named, of_batch, of_parts, smaller_batch
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable

MEMORY_SHARE = 0.98  # of a limit, for selections: that much the costs of single tensors may be off
# Copies of all weights while importance is measured: gradients, their sums, updates, what is restored afterwards.
MEASURED_WEIGHTS = 5


def memory_room_mb(
    limit_mb: float, start_mb: float, table: TimingTable, head: np.ndarray, batch_size: int, parts: int
) -> float:
    """MB that training may take in a process that takes `limit_mb` in all, resident.

    Args:
        limit_mb: as of `--memory`.
        start_mb: what the process takes before it trains.
        table: timing table of the network.
        head: bool [N] over `model.trainable_variables`, what always trains.
        batch_size: of the table.
        parts: of a step's batch, each of `batch_size`; 0 if there can be no smaller ones.

    Raises:
        UserError: training the head alone takes more.
    """
    head_mb = table.predict_mb(head)
    if start_mb + head_mb > limit_mb:
        (fixed_mb, by_rows_mb), now_mb = table.parts_mb(head), start_mb + head_mb
        sums_mb = 0.0 if parts > 1 else table.tensors_mb(head)  # else they are in the table

        def needed_mb(rows: int, beside_mb: float = 0.0) -> float:
            return start_mb + fixed_mb + beside_mb + by_rows_mb * rows / batch_size

        in_parts = partial(needed_mb, beside_mb=sums_mb)
        fits = named(
            (
                of_batch(max(parts, 1) * batch_size, smaller_batch(needed_mb, batch_size, now_mb, limit_mb)),
                of_parts(in_parts, batch_size, now_mb, limit_mb, parts > 0),
                larger_limit(now_mb, limit_mb, reachable_memory_mb()),
            ),
            "choose a smaller --input_size or network",
        )
        raise UserError(
            f"memory: {limit_mb:,.0f} MB are too little, training the head alone takes about "
            f"{now_mb:,.0f} MB, of them {start_mb:,.0f} MB for TensorFlow, the network and the images; "
            f"{fits}"
        )
    return MEMORY_SHARE * limit_mb - start_mb


def feature_batches(data: ShuffledData, settings: Settings) -> float:
    """How many batches all features of `data` are in float32, as which those of the test examples are kept."""
    views = (data.view_count or 1) / (2 if settings.feature_cache == "float16" else 1)
    return (data.train_count * views + data.test_count) / data.full_batch


def fitting_rows(table: TimingTable, batch_size: int, room_mb: float) -> tuple[int, float]:
    """In parts of how many examples the gradients of all tensors fit, and the MB that they then take.

    The largest divisor of the batch that fits, or 1.

    Args:
        table: timing table with costs in memory.
        batch_size: of the table.
        room_mb: memory that they may take.
    """
    everything = np.ones(len(table.names), bool)
    whatever_mb, by_rows_mb = table.parts_mb(everything)
    fixed_mb = whatever_mb + MEASURED_WEIGHTS * table.tensors_mb(everything)
    divisors = [rows for rows in range(batch_size, 0, -1) if batch_size % rows == 0]
    needed_mb = {rows: fixed_mb + by_rows_mb * rows / batch_size for rows in divisors}
    rows = next((rows for rows in divisors if needed_mb[rows] <= room_mb), 1)
    return rows, needed_mb[rows]


def too_little_to_measure(needed_mb: float, limit_mb: float | None) -> UserError:
    """The error for a limit in which importance cannot be measured, not even with one example at a time."""
    others = [Alternative(math.inf, "--train_type elastic_training_upper_part, which measures none")]
    fits = named((*others, larger_limit(needed_mb, limit_mb, reachable_memory_mb())), "")
    return UserError(
        f"memory: measuring importance takes about {needed_mb:,.0f} MB even with one image at a time, and the limit is "
        f"{limit_mb:,.0f} MB; {fits}"
    )
