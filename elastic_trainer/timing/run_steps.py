"""A timing table from a run's own steps: FLOPs, scaled to measured steps. No step runs for it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.system.machine import environment
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.profiling import added_up
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    import keras

    from elastic_trainer.engine.task import Task


def table_of_steps(
    task: Task, optimizer: keras.optimizers.Optimizer, batch_size: int, full_ms: float, settings: dict[str, Any]
) -> TimingTable:
    """The timing table by which a step that trains everything takes `full_ms`, and each FLOP as long as any other.

    The step is traced, which takes a second or two, and not compiled. Where shapes say nothing of FLOPs, operations
    take the same time each. `sharpened` corrects the table by further steps; `settings` as of `profile_task`.
    """
    from elastic_trainer.engine.step import TrainStep

    full = TrainStep(task, optimizer, batch_size)
    flops = count_flops(full.graph)
    if not any(flops.values()):
        flops = dict.fromkeys(flops, 1.0)
    total = sum(flops.values())
    op_ms = {name: full_ms / total * count for name, count in flops.items()}
    attribution = attribute(full, task.model.trainable_variables)
    details = {"timing": "flops", "traced_steps": 0, "environment": environment()}
    return added_up(task, settings, full, attribution, op_ms, 0.0, details)


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
        **{name: inside * getattr(table, name) for name in ("t_fw_ms", "preprocessing_ms", "forward_ms")},
        fit=replace(table.fit, constant_ms=inside * table.fit.constant_ms),
    )
