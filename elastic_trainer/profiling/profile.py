"""From a network to its timing table: measure, attribute, fit (paper section 5). profiler.py is its command.

`profile` does it for a compiled Keras model, `profile_task` for any task.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.profiling.measuring import (
    MEASURING_SECONDS,
    MeasuredStep,
    Training,
    compile_steps,
    copying_ms,
    measure,
)
from elastic_trainer.profiling.tables import added_up, timing_table
from elastic_trainer.system.machine import environment
from elastic_trainer.timing.attribution import OperationTimes, attribute
from elastic_trainer.timing.fit import depth_of, fit_wall_time, forward_sums, selection_sums
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.trace import OperationTrace, read_op_times, trace_step

if TYPE_CHECKING:
    import keras

    from elastic_trainer.engine.step import TrainStep

# Small networks have noisy steps, but many of them fit into the time.
MIN_TRACED, MAX_TRACED, TRACING_SECONDS = 8, 40, 10
# Times the median operation, by which the fit may lengthen each: without a bound it takes more, and predicts other
# selections worse (docs/log/time_model.md).
MAX_UNTRACED = 5
SHORT_SECONDS = 8.0  # of measuring steps, for a model that trains in the user's program


def profile(
    model: keras.Model,
    inputs: Any,
    targets: Any,
    weights: Any = None,
    *,
    seconds: float = SHORT_SECONDS,
) -> TimingTable:
    """Measure the timing table of a compiled Keras model. Its weights and its optimizer do not change.

    Args:
        model: compiled, with frozen batch norm (`freeze_batch_norm`).
        inputs, targets, weights: one batch, as `model.train_on_batch` takes it: arrays or tensors [batch, …], or
            structures of them. Times are those of a batch of this size.
        seconds: time for measuring steps; tracing and compiling them comes on top.

    Returns:
        The table, for `ElasticTraining(table=…)` and `Trainer(table=…)`.

    Raises:
        UserError: the model is not compiled, or a batch norm of it is not frozen.
    """
    import tensorflow as tf

    from elastic_trainer.datasets.batches import Batch, mapped, specs_of
    from elastic_trainer.engine.task import CompiledTask
    from elastic_trainer.networks.tensors import restored

    values = mapped(tf.convert_to_tensor, (inputs, targets, weights))
    task, batch = CompiledTask(model, *specs_of(values)), Batch(lambda: values[0], *values[1:])
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    changed = [*model.trainable_variables, *model.optimizer.variables]
    with restored(changed, task.variables.written), tempfile.TemporaryDirectory() as folder:
        return profile_task(Training(task, model.optimizer, batch), Path(folder), seconds)


def profile_task(training: Training, folder: Path, seconds: float = MEASURING_SECONDS) -> TimingTable:
    """Measure the timing table of a task.

    Args:
        training, seconds: as of `measuring.measure`.
        folder: where the trace is kept.

    Raises:
        UserError: TensorFlow wrote no trace, or another profiler is running.
    """
    start = time.perf_counter()
    [run_full] = compile_steps(training, [None])
    full: TrainStep = run_full.func  # type: ignore[assignment]
    attribution = attribute(full, training.task.model.trainable_variables)
    steps, wall_ms = measure(training, run_full, attribution, seconds)
    traced_steps = min(max(int(1e3 * TRACING_SECONDS / wall_ms["full_step_ms"]), MIN_TRACED), MAX_TRACED)
    op_ms, unmatched = read_op_times(trace_step(run_full, traced_steps, folder), full.graph, traced_steps)
    timed, median_ms = {name: ms for name, ms in op_ms.items() if ms > 0}, [float(np.median(one.ms)) for one in steps]
    traced, counted = attribution.times(timed), attribution.times(dict.fromkeys(timed, 1.0))
    fit = fit_wall_time(
        _step_sums(traced, steps, attribution.positions),
        _step_sums(counted, steps, attribution.positions),
        np.array(median_ms),
        np.array([one.selection for one in steps]),
        len(steps[0].ms),
        MAX_UNTRACED * float(np.median([*timed.values()])),
        traced.other_ms,
    )
    fit = replace(fit, copying_factor=copying_ms())
    details = {
        "traced_steps": traced_steps,
        "unmatched_time_percent": 100 * unmatched,
        "measured_steps": [
            {"trained_tensors": int(one.mask.sum()), "from_features": one.from_features, "step_ms": ms}
            for one, ms in zip(steps, median_ms, strict=True)
        ],
        "environment": environment(),
    }
    times = attribution.times({name: ms + fit.untraced_ms for name, ms in timed.items()})
    table = timing_table(training.task, full, attribution, times, fit, wall_ms, details)
    table.details["profiling_seconds"] = time.perf_counter() - start
    return table


def _step_sums(times: OperationTimes, steps: Sequence[MeasuredStep], positions: np.ndarray) -> np.ndarray:
    """[steps, 3], see `fit_wall_time`."""
    recomputed_ms, prefix_ms = forward_sums(times.t_fw_ms, times.preprocessing_ms)
    sums = []
    for step in steps:
        selected = step.mask[positions]
        depth = depth_of(selected)
        forward_ms = recomputed_ms[depth] + (0.0 if step.from_features else prefix_ms[depth])
        sums.append([*selection_sums(selected, times.t_dy_ms, times.t_dw_ms), forward_ms])
    return np.array(sums)


def table_of_trace(training: Training, trace: OperationTrace, file_name: str) -> TimingTable:
    """The timing table of the device that `trace` was recorded on; nothing is measured here.

    Operation times are added up, as a GPU's single stream runs them: that is the fit. Time that matched no operation is
    counted as part of every step. If operations run side by side, on several cores, steps are shorter than this.

    Args:
        training: of a network built like the traced one, on a batch of that size.
        trace: of full steps; may lack the updates, whose time is then 0.
        file_name: what profile.json calls the trace.

    Raises:
        UserError: the trace is not of this network.
    """
    from elastic_trainer.engine.step import TrainStep
    from elastic_trainer.timing.foreign_trace import has_folded_batch_norm, match_operations

    task, optimizer, batch = training
    full = TrainStep(task, optimizer, len(batch))
    if not has_folded_batch_norm(trace, full):
        full = TrainStep(task, optimizer, len(batch), fold=False)
    op_ms, unmatched_ms = match_operations(trace, full, task.model)
    details = {
        "trace": file_name,
        "planes": list(trace.planes),
        "traced_steps": trace.iterations,
        "unmatched_time_percent": 100 * unmatched_ms / trace.total_ms,
    }
    return added_up(task, full, op_ms, details, unmatched_ms)
