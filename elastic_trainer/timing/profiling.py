"""From a network to its timing table: measure, attribute, fit (paper section 5). profiler.py is its command.

`profile` does it for a compiled Keras model, `profile_task` for any task.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from elastic_trainer.system.machine import environment
from elastic_trainer.timing.attribution import Attribution, OperationTimes, attribute
from elastic_trainer.timing.fit import Fit, depth_of, fit_wall_time, forward_sums, selection_sums
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.measuring import MEASURING_SECONDS, Measurement, Training, copying_ms, measure, median_ms
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.trace import OperationTrace, read_op_times, trace_step

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.engine.step import TrainStep
    from elastic_trainer.engine.task import CompiledTask, Task

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
    with_features: bool = False,
) -> TimingTable:
    """Measure the timing table of a compiled Keras model. Its weights and its optimizer do not change.

    Args:
        model: compiled, with frozen batch norm (`freeze_batch_norm`).
        inputs, targets, weights: one batch, as `model.train_on_batch` takes it: arrays or tensors [batch, …], or
            structures of them. Times are those of a batch of this size.
        seconds: time for measuring steps; tracing and compiling them comes on top.
        with_features: measure steps from cached features, too, which `Trainer` uses. Takes about twice as long.

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
        plain, training = _plain_step(model, batch), Training(task, model.optimizer, batch)
        about = compiled_settings(task, len(batch))
        table = profile_task(training, about, Path(folder), "trace", seconds, with_features, plain)
        names, plain_ms = numbered_names(model), (table.plain_step_ms or 0.0) / model.steps_per_execution
        return replace(table, names=[names[k] for k in table.positions], plain_step_ms=plain_ms)


def plain_step_ms(task: CompiledTask, batch: Batch) -> float:
    """Wall time in ms of a step of plain `fit` on a batch that is there; the model and its optimizer do not change."""
    from elastic_trainer.networks.tensors import restored

    model = task.model
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    changed = [*model.trainable_variables, *model.optimizer.variables]
    with restored(changed, task.variables.written):
        return median_ms(_plain_step(model, batch)) / model.steps_per_execution


def numbered_names(model: keras.Model) -> list[str]:
    """Names of `model.trainable_variables` without those of layers, which Keras numbers again for each model."""
    return [f"{k}/{variable.name}" for k, variable in enumerate(model.trainable_variables)]


def _plain_step(model: keras.Model, batch: Batch) -> Callable[[], object]:
    """A call of what `model.fit` calls to train on a batch."""
    import keras
    import tensorflow as tf

    values = _as_tuples(keras.utils.pack_x_y_sample_weight(batch.inputs, batch.targets, batch.weights))
    iterator = iter(tf.data.Dataset.from_tensors(values).repeat())
    current = model.train_function
    model.make_train_function(force=True)
    plain, model.train_function = model.train_function, current
    plain(iterator)  # the first call compiles
    return lambda: next(iter(plain(iterator).values())).numpy()  # waits for the device


def _as_tuples(values: Any) -> Any:
    """`values` with tuples for lists, as Keras makes them: tf.data takes a list for one array."""
    if isinstance(values, list | tuple):
        return tuple(map(_as_tuples, values))
    return {key: _as_tuples(value) for key, value in values.items()} if isinstance(values, dict) else values


def compiled_settings(task: Task, batch_size: int) -> dict[str, Any]:
    """What the timing table of a compiled model depends on besides its graph."""
    import tensorflow as tf

    parts = [part for part in tf.nest.flatten(task.signature(batch_size)) if part is not None]
    batch = ", ".join(f"{part.dtype.name} {list(part.shape)}" for part in parts)
    policy = getattr(task.model.dtype_policy, "name", None)
    return {"optimizer": type(task.model.optimizer).__name__, "batch": batch, "precision": policy}


def profile_task(
    training: Training,
    settings: dict[str, Any],
    folder: Path,
    timing: str = "trace",
    seconds: float = MEASURING_SECONDS,
    with_features: bool = True,
    plain: Callable[[], object] | None = None,
) -> TimingTable:
    """Measure the timing table of a task.

    Args:
        training, seconds, with_features, plain: as of `measuring.measure`.
        settings: what the table depends on besides the network, in JSON's types; kept in the table.
        folder: where the trace is kept.
        timing: "trace" (on a GPU of its kernels, untested on a live one), or "flops", which are scaled to add up to the
            measured full step. Either way the fit is to measured steps.

    Raises:
        UserError: TensorFlow wrote no trace.
    """
    start = time.perf_counter()
    measurement = measure(training, seconds, with_features, plain)
    table = make_table(measurement, settings, folder, timing)
    table.details["profiling_seconds"] = time.perf_counter() - start
    return table


def make_table(measurement: Measurement, settings: dict[str, Any], folder: Path, timing: str = "trace") -> TimingTable:
    """The timing table of a measured network. Arguments as for `profile_task`."""
    op_ms, unmatched, traced_steps = _operation_times(measurement, timing, folder)
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
        "timing": timing if traced_steps else "flops",
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
    return _timing_table(measurement.task, settings, full, attribution, times, fit, measurement.wall_ms, details)


def _step_sums(times: OperationTimes, measurement: Measurement) -> np.ndarray:
    """[steps, 3], see `fit_wall_time`: of each measured step, then of those from cached features."""
    recomputed_ms, prefix_ms = forward_sums(times.t_fw_ms, times.preprocessing_ms)
    selected = [mask[measurement.attribution.positions] for mask in measurement.masks]
    backward_ms = np.array([selection_sums(one, times.t_dy_ms, times.t_dw_ms) for one in selected])
    depths = np.array([depth_of(one) for one in selected])
    computed = np.column_stack([backward_ms, recomputed_ms[depths] + prefix_ms[depths]])
    on_features = np.column_stack([backward_ms, recomputed_ms[depths]])
    return np.concatenate([computed, on_features[measurement.cached]])


def _operation_times(measurement: Measurement, timing: str, folder: Path) -> tuple[dict[str, float], float, int]:
    """Time of each operation in ms, the share (0…1) of time that matched none, and the number of traced steps.

    While another profiler runs, FLOPs are counted: two at once are not possible.
    """
    import tensorflow as tf

    graph, full_ms = measurement.full.graph, float(np.median(measurement.step_ms[:, -1]))
    if timing == "flops":
        flops = count_flops(graph)
        ms_per_flop = full_ms / sum(flops.values())
        return {name: ms_per_flop * count for name, count in flops.items()}, 0.0, 0
    steps = min(max(int(1e3 * TRACING_SECONDS / full_ms), MIN_TRACED), MAX_TRACED)
    with tqdm(total=steps, desc="tracing steps", unit="step") as bar:

        def run() -> None:
            measurement.run_full()
            bar.update()

        try:
            trace = trace_step(run, steps, folder)
        except tf.errors.AlreadyExistsError:  # another profiler is running, such as TensorBoard's
            return _operation_times(measurement, "flops", folder)
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
    return _timing_table(task, settings, full, attribution, times, fit, wall_ms, details)


def _timing_table(
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
