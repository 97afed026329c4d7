"""The builder of timing tables: from the times of operations, attributed to tensors (paper section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_trainer.timing.attribution import Attribution, OperationTimes
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    from elastic_trainer.engine.step import TrainStep
    from elastic_trainer.engine.task import Task


def added_up(
    task: Task,
    settings: dict[str, Any],
    full: TrainStep,
    attribution: Attribution,
    op_ms: Mapping[str, float],
    rest_ms: float,
    details: dict[str, Any],
) -> TimingTable:
    """The timing table by which a step takes the sum of its operations' times, by name, and `rest_ms`."""
    times = attribution.times(op_ms)
    forward_ms = times.forward_ms + times.other_ms + rest_ms
    full_step_ms = forward_ms + float(times.t_dy_ms.sum() + times.t_dw_ms.sum())
    constant_ms = forward_ms - float(times.t_fw_ms.sum()) - times.preprocessing_ms
    fit = Fit(constant_ms, 1.0, 1.0, 1.0, None, None, selections=0, rounds=0)
    pass_ms = full_step_ms - float(times.update_ms.sum())
    wall_ms = {"forward_ms": forward_ms, "full_step_ms": full_step_ms, "gradient_pass_ms": pass_ms}
    return timing_table(task, settings, full, attribution, times, fit, wall_ms, details)


def timing_table(
    task: Task,
    settings: dict[str, Any],
    full: TrainStep,
    attribution: Attribution,
    times: OperationTimes,
    fit: Fit,
    wall_ms: dict[str, Any],
    details: dict[str, Any],
) -> TimingTable:
    """The timing table of `full`, the step that trains everything, by the `times` of its operations."""
    from elastic_trainer.engine.step_memory import step_memory
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.timing.graph_digest import graph_digest

    names, variables, positions = tensor_names(task.model), task.model.trainable_variables, attribution.positions
    operation_ms = {
        "forward": times.forward_ms,
        "error_chain": float(times.t_dy_ms.sum()),
        "weight_gradients": float((times.t_dw_ms - times.update_ms).sum()),
        "updates": float(times.update_ms.sum()),
        "other": times.other_ms,
    }
    details |= {
        "operation_ms": operation_ms,
        "tensors_without_gradient": [names[k] for k in positions if full.gradients[k] is None],
        "graph_digest": graph_digest(task, full.inputs[0].shape[0]),
    }
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
        settings=settings,
        memory=step_memory(full, attribution.places, positions),
        details=details,
    )
