"""From a network to its timing table: measure, attribute, fit (paper section 5). profiler.py is its command.

`profile` does it for a compiled Keras model, `profile_task` for any task.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import environment
from elastic_trainer.timing.attribution import OperationTimes, attribute
from elastic_trainer.timing.fit import depth_of, fit_wall_time, forward_sums, selection_sums
from elastic_trainer.timing.measuring import MEASURING_SECONDS, Measurement, Training, copying_ms, measure
from elastic_trainer.timing.table import TimingTable, added_up, timing_table
from elastic_trainer.timing.trace import OperationTrace, read_op_times, trace_step

if TYPE_CHECKING:
    import keras


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
        return profile_task(Training(task, model.optimizer, batch), {}, Path(folder), seconds=seconds)


def profile_task(
    training: Training,
    settings: dict[str, Any],
    folder: Path,
    seconds: float = MEASURING_SECONDS,
) -> TimingTable:
    """Measure the timing table of a task.

    Args:
        training, seconds: as of `measuring.measure`.
        settings: what the table depends on besides the network, in JSON's types; kept in the table.
        folder: where the trace is kept.

    Raises:
        UserError: TensorFlow wrote no trace, or another profiler is running.
    """
    start = time.perf_counter()
    measurement = measure(training, seconds)
    table = make_table(measurement, settings, folder)
    table.details["profiling_seconds"] = time.perf_counter() - start
    return table


def make_table(measurement: Measurement, settings: dict[str, Any], folder: Path) -> TimingTable:
    """The timing table of a measured network. Arguments as for `profile_task`."""
    op_ms, unmatched, traced_steps = _operation_times(measurement, folder)
    timed = {name: ms for name, ms in op_ms.items() if ms > 0}
    _, full, _, attribution, masks, step_ms, cached, *_ = measurement
    median_ms, cached_ms = np.median(step_ms, axis=0), np.median(measurement.cached_ms, axis=0)
    traced = attribution.times(timed)
    sums, counts = (_step_sums(each, measurement) for each in (traced, attribution.times(dict.fromkeys(timed, 1.0))))
    fit = fit_wall_time(
        sums,
        counts,
        np.concatenate([median_ms, cached_ms]),
        np.array([*range(len(masks)), *cached]),
        len(step_ms),
        MAX_UNTRACED * float(np.median([*timed.values()])),
        traced.other_ms,
    )
    times = attribution.times({name: ms + fit.untraced_ms for name, ms in timed.items()})
    reading_factor, writing_factor = copying_ms()
    low, high = np.percentile(step_ms, (25, 75), axis=0)
    on_features_ms = dict(zip(cached, cached_ms.tolist(), strict=True))
    details = {
        "timing": "trace",
        "traced_steps": traced_steps,
        "unmatched_time_percent": 100 * unmatched,
        "operations": len(timed),
        "measured_selections": [
            {
                "trained_tensors": int(mask.sum()),
                "step_ms": float(median_ms[index]),
                "cached_step_ms": on_features_ms.get(index),
            }
            for index, mask in enumerate(masks)
        ],
        "measurement_spread_percent": 100 * float(np.median((high - low) / median_ms)),
        "environment": environment(),
    }
    fit = replace(fit, reading_factor=reading_factor, writing_factor=writing_factor)
    return timing_table(measurement.task, settings, full, attribution, times, fit, measurement.wall_ms, details)


def _step_sums(times: OperationTimes, measurement: Measurement) -> np.ndarray:
    """[steps, 3], see `fit_wall_time`: of each measured step, then of those from cached features."""
    recomputed_ms, prefix_ms = forward_sums(times.t_fw_ms, times.preprocessing_ms)
    selected = [mask[measurement.attribution.positions] for mask in measurement.masks]
    backward_ms = np.array([selection_sums(one, times.t_dy_ms, times.t_dw_ms) for one in selected])
    depths = np.array([depth_of(one) for one in selected])
    computed = np.column_stack([backward_ms, recomputed_ms[depths] + prefix_ms[depths]])
    on_features = np.column_stack([backward_ms, recomputed_ms[depths]])
    return np.concatenate([computed, on_features[measurement.cached]])


def _operation_times(measurement: Measurement, folder: Path) -> tuple[dict[str, float], float, int]:
    """Time of each operation in ms (on a GPU of its kernels, untested on a live one), the share (0…1) of time that
    matched none, and the number of traced steps."""
    import tensorflow as tf

    graph, full_ms = measurement.full.graph, float(np.median(measurement.step_ms[:, -1]))
    steps = min(max(int(1e3 * TRACING_SECONDS / full_ms), MIN_TRACED), MAX_TRACED)
    with tqdm(total=steps, desc="tracing steps", unit="step") as bar:

        def run() -> None:
            measurement.run_full()
            bar.update()

        try:
            trace = trace_step(run, steps, folder)
        except tf.errors.AlreadyExistsError as error:
            raise UserError("another profiler is running, such as TensorBoard's; stop it, and profile again") from error
    return *read_op_times(trace, graph, steps), steps


def table_of_trace(training: Training, settings: dict[str, Any], trace: OperationTrace, file_name: str) -> TimingTable:
    """The timing table of the device that `trace` was recorded on; nothing is measured here.

    Operation times are added up, as a GPU's single stream runs them: that is the fit. Time that matched no operation is
    counted as part of every step. If operations run side by side, on several cores, steps are shorter than this.

    Args:
        training: of a network built like the traced one, on a batch of that size.
        settings: as of `profile_task`.
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
    attribution = attribute(full, task.model.trainable_variables)
    details = {
        "timing": "trace",
        "trace": file_name,
        "planes": list(trace.planes),
        "traced_steps": trace.iterations,
        "unmatched_time_percent": 100 * unmatched_ms / trace.total_ms,
    }
    return added_up(task, settings, full, attribution, op_ms, unmatched_ms, details)
