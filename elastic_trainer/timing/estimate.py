"""A timing table without a measurement: FLOPs and bytes of the operations, along the data flow. No step runs for it.

It says what share of a full step each tensor takes. How long a step takes here, its user measures: the time budget by
gradient passes and by the steps of a selection (`selection.budget`), `ElasticTraining` by the steps of `fit`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.timing.flops import count_bytes, count_flops
from elastic_trainer.timing.table import TimingTable, added_up

if TYPE_CHECKING:
    import keras

    from elastic_trainer.engine.task import Task

# Of moving a byte, in FLOPs: shares of steps of five networks are predicted alike by 1 to 20 (docs/log/time_model.md).
FLOPS_OF_BYTE = 3.0
NOMINAL_FLOPS = 5e7  # a ms, of a device that nothing has measured; only shares of a step count then


def estimated_table(
    task: Task, optimizer: keras.optimizers.Optimizer, batch_size: int, full_ms: float | None = None
) -> TimingTable:
    """The timing table by FLOPs and bytes. A step that trains everything takes `full_ms`, if that is known.

    The step is traced, which takes a second or two, and not compiled. Where shapes say nothing, operations take the
    same time each. `sharpened` corrects the table by further steps.
    """
    from elastic_trainer.engine.step import TrainStep

    full = TrainStep(task, optimizer, batch_size)
    flops, moved = count_flops(full.graph, contractions_alone=True), count_bytes(full.graph)
    costs = {name: flops[name] + FLOPS_OF_BYTE * moved[name] for name in flops}
    if not any(costs.values()):
        costs = dict.fromkeys(costs, 1.0)
    scale = 1 / NOMINAL_FLOPS if full_ms is None else full_ms / sum(costs.values())
    op_ms = {name: scale * cost for name, cost in costs.items()}
    table = added_up(task, full, op_ms, {"is_estimate": full_ms is None})
    copying_ms = 2e6 * FLOPS_OF_BYTE * scale  # of a MB of features, which is read and written
    return replace(table, fit=replace(table.fit, copying_factor=copying_ms))


def sharpened(table: TimingTable, mask: np.ndarray, step_ms: float) -> TimingTable:
    """`table`, corrected by the measured time of steps that train `mask`, bool [N] over `model.trainable_variables`.

    All that such a step computes is scaled to `step_ms`, and all that a full step computes besides to the rest of what
    it takes. Where a step is not shorter than a full one, or computes all of it, the table says nothing that is wrong.
    """
    everything = np.ones(len(table.names), bool)
    predicted_ms, full_ms = table.predict_ms(mask), table.predict_ms(everything)
    if not predicted_ms < full_ms or not 0 < step_ms < full_ms:
        return table
    inside, outside = step_ms / predicted_ms, (full_ms - step_ms) / (full_ms - predicted_ms)
    selected, is_passed = mask[table.positions], np.arange(len(mask)) < table.depth(mask)
    return replace(
        table,
        t_dw_ms=table.t_dw_ms * np.where(selected, inside, outside),
        t_dy_ms=table.t_dy_ms * np.where(is_passed, inside, outside),
        **{name: inside * getattr(table, name) for name in ("t_fw_ms", "preprocessing_ms")},
        fit=replace(table.fit, constant_ms=inside * table.fit.constant_ms),
    )
