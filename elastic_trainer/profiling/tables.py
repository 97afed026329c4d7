"""Timing tables of a full step, from the times of its operations, or without a measurement.

Without one, FLOPs and bytes of the operations stand in for times: they say what share of a full step each tensor takes.
How long a step takes here, its user measures: the time budget by gradient passes and by the steps of a selection
(`selection.budget`), `ElasticTraining` by the steps of `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_trainer.engine.memory import step_memory
from elastic_trainer.timing.attribution import Attribution, OperationTimes, attribute
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.flops import count_bytes, count_flops
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:  # so that a mistake on the command line is answered without TensorFlow
    import keras

    from elastic_trainer.engine.step import TrainStep
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


def added_up(
    task: Task, full: TrainStep, op_ms: Mapping[str, float], details: dict[str, Any], rest_ms: float = 0.0
) -> TimingTable:
    """The timing table by which `full`, which trains everything, takes the times of its operations and `rest_ms`."""
    attribution = attribute(full, task.model.trainable_variables)
    times = attribution.times(op_ms)
    forward_ms = times.forward_ms + times.other_ms + rest_ms
    full_step_ms = forward_ms + float(times.t_dy_ms.sum() + times.t_dw_ms.sum())
    constant_ms = forward_ms - float(times.t_fw_ms.sum()) - times.preprocessing_ms
    fit = Fit(constant_ms, 1.0, 1.0, 1.0, None, None, selections=0, rounds=0)
    wall_ms = {"full_step_ms": full_step_ms, "gradient_pass_ms": full_step_ms - float(times.update_ms.sum())}
    return timing_table(task, full, attribution, times, fit, wall_ms, details)


def timing_table(
    task: Task,
    full: TrainStep,
    attribution: Attribution,
    times: OperationTimes,
    fit: Fit,
    wall_ms: dict[str, Any],
    details: dict[str, Any],
) -> TimingTable:
    """The timing table of `full`, the step that trains everything, by the `times` of its operations."""
    from elastic_trainer.networks.tensors import tensor_names

    names, variables, positions = tensor_names(task.model), task.model.trainable_variables, attribution.positions
    details["operation_ms"] = {
        "forward": times.forward_ms,
        "error_chain": float(times.t_dy_ms.sum()),
        "weight_gradients": float((times.t_dw_ms - times.update_ms).sum()),
        "updates": float(times.update_ms.sum()),
        "other": times.other_ms,
    }
    details["tensors_without_gradient"] = [names[k] for k in positions if full.gradients[k] is None]
    return TimingTable(
        names=[names[k] for k in positions],
        shapes=[tuple(variables[k].shape) for k in positions],
        positions=positions,
        t_dw_ms=times.t_dw_ms,
        t_dy_ms=times.t_dy_ms,
        t_fw_ms=times.t_fw_ms,
        kernels=attribution.kernels,
        features_mb=attribution.features_mb,
        preprocessing_ms=times.preprocessing_ms,
        **wall_ms,
        fit=fit,
        memory=step_memory(full, attribution.places, positions),
        details=details,
    )
