"""Tensor Timing Profiler: what each tensor of a network costs to train (paper section 4).

    t_dw  time for the tensor's gradient, and for applying its update
    t_dy  time to pass the error gradient on to where this tensor is reached
    t_fw  forward time between this tensor and the one before it, which a step that trains it cannot take from a cache

Four steps, each a module of `elastic_trainer.timing`:

    measure    the steps of a few selections (`measuring`), and a trace of full steps by tf.profiler (`trace`); or FLOPs
               stand in for the trace (`flops`), or a trace that another board recorded (`foreign_trace`)
    attribute  each operation's time to a tensor, by the data flow of the traced graph alone (`attribution`)
    fit        independent operations overlap, so a linear model turns operation times into wall time (`fit`)
    table      what the time budget asks later (`table`)

Command line: `python profiler.py --model_name … --input_size … --batch_size …` writes
logs/profiles/<model>_<input>_<classes>_<batch>/ with table.csv, profile.json, a chart, and the trace for TensorBoard.
With `--from_trace FILE` it measures nothing here, and plans for the board that FILE was recorded on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

import utils
from elastic_trainer.cli.commands import ProfileCommand, parse_profiler
from elastic_trainer.errors import figure_text
from elastic_trainer.files import save_figure, writing
from elastic_trainer.machine import environment, load_tensorflow
from elastic_trainer.runs.reader import latest_importance
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing.attribution import Attribution, attribute_times
from elastic_trainer.timing.fit import Fit, StepSums, depth_of, fit_wall_time, selection_sums, unfolded
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.forward_costs import CACHED, forward_sums
from elastic_trainer.timing.measuring import MEASURING_SECONDS, Measurement, copying_ms, idle_optimizer, measure
from elastic_trainer.timing.table import TimingTable, table_folder, table_settings
from elastic_trainer.timing.trace import OperationTrace, read_op_times, read_trace, trace_step

if TYPE_CHECKING:
    import keras

    from elastic_trainer.training.step import TrainStep

# Small networks have noisy steps, but many of them fit into the time.
MIN_TRACED, MAX_TRACED, TRACING_SECONDS = 8, 40, 10
# Times the median operation, by which the fit may lengthen each: without a bound it takes more, and predicts other
# selections worse (docs/log.md).
LONGEST_UNTRACED = 5


def profile(
    model: keras.Model,
    network: NetworkSettings,
    folder: Path,
    timing: str = "trace",
    seconds: float = MEASURING_SECONDS,
) -> TimingTable:
    """Measure the timing table of `model`. Its weights do not change.

    Args:
        model: network to be trained.
        network: its settings.
        folder: where the trace is kept.
        timing: "trace", or "flops" to count each operation's FLOPs and scale them to add up to the measured full step.
            Either way the fit is to measured steps. On a GPU the trace is its kernels' (untested on a live GPU).
        seconds: time for measuring steps; at least five rounds are measured, however long they take.

    Raises:
        UserError: TensorFlow wrote no trace.
    """
    start = time.perf_counter()
    table = make_table(measure(model, network, seconds), folder, timing)
    table.details["profiling_seconds"] = time.perf_counter() - start
    return table


def make_table(measurement: Measurement, folder: Path, timing: str = "trace") -> TimingTable:
    """The timing table of a measured network. Arguments as for `profile`."""
    op_ms, unmatched, traced_steps = _operation_times(measurement, timing, folder)
    timed = {name: 1.0 for name, ms in op_ms.items() if ms > 0}
    variables = measurement.model.trainable_variables
    costs, operations = (attribute_times(measurement.full, variables, each) for each in (op_ms, timed))
    masks, step_ms, cached = measurement.masks, measurement.step_ms, measurement.cached
    median_ms, cached_ms = np.median(step_ms, axis=0), np.median(measurement.cached_ms, axis=0)
    selections = np.array([*range(len(masks)), *cached])
    sums, counts = (_fitted_sums(each, masks, cached) for each in (costs, operations))
    counts[:, -1] = 0  # `StepSums.normalised` is no time
    measured_ms = np.concatenate([median_ms, cached_ms])
    most_untraced_ms = LONGEST_UNTRACED * float(np.median([op_ms[name] for name in timed]))
    fit = fit_wall_time(sums, counts, measured_ms, selections, len(step_ms), most_untraced_ms)
    full_step_ms = float(median_ms[-1])
    # Not measured: the error of its few rounds would exceed its whole difference from a full step. By traced times
    # alone: what the many small operations of updates take beside them is overestimated.
    gradient_pass_ms = full_step_ms - fit.own_factor * float(costs.update_ms.sum())
    costs = costs.with_untraced(operations, fit.untraced_ms)
    computed, from_features = ([_step_sums(costs, mask, share) for mask in masks] for share in (1.0, 0.0))
    reading_factor, writing_factor = copying_ms()
    fit = replace(fit, reading_factor=reading_factor, writing_factor=writing_factor)
    low, high = np.percentile(step_ms, (25, 75), axis=0)
    details = {
        "timing": timing,
        "traced_steps": traced_steps,
        "unmatched_time_percent": 100 * unmatched,
        "operation_ms": _sums(costs),
        "operations": int(sum(_sums(operations).values())),
        "measured_selections": [
            {
                "trained_tensors": int(mask.sum()),
                "chain_ms": row.t_dy_ms,
                "own_ms": row.t_dw_ms,
                "recomputed_ms": rest.forward_ms,
                "prefix_ms": row.forward_ms - rest.forward_ms,
                "normalised": row.normalised,
                "step_ms": float(median),
                "cached_step_ms": float(cached_ms[cached.index(index)]) if index in cached else None,
            }
            for index, (mask, row, rest, median) in enumerate(
                zip(masks, computed, from_features, median_ms, strict=True)
            )
        ],
        "compiling_ms": measurement.compiling_ms,
        "measurement_spread_percent": 100 * float(np.median((high - low) / median_ms)),
        "environment": environment(),
    }
    return _table(
        measurement.model,
        measurement.network,
        measurement.full,
        costs,
        measurement.forward_ms,
        full_step_ms,
        gradient_pass_ms,
        fit,
        details,
    )


def _fitted_sums(costs: Attribution, masks: Sequence[np.ndarray], cached: Sequence[int]) -> np.ndarray:
    """A row of `StepSums` for each of `masks`, then for those of `cached` from features."""
    computed = [_step_sums(costs, mask, 1.0) for mask in masks]
    return np.array([*computed, *(_step_sums(costs, masks[index], 0.0) for index in cached)])


def _step_sums(costs: Attribution, mask: np.ndarray, share: float) -> StepSums:
    """Of the step that trains `mask`, bool [N] over `model.trainable_variables`, and computes `share` of its prefix."""
    selected = mask[costs.positions]
    recomputed_ms, prefix_ms = forward_sums(costs.t_fw_ms, costs.preprocessing_ms)
    depth = depth_of(selected)
    chain_ms, own_ms = selection_sums(selected, costs.t_dy_ms, costs.t_dw_ms)
    normalised = float(costs.normalised[unfolded(selected, costs.kernels)].sum())
    return StepSums(chain_ms, own_ms, float(recomputed_ms[depth] + share * prefix_ms[depth]), normalised)


def _operation_times(measurement: Measurement, timing: str, folder: Path) -> tuple[dict[str, float], float, int]:
    """Time of each operation in ms, the share (0…1) of time that matched none, and the number of traced steps."""
    full, full_ms = measurement.full, float(np.median(measurement.step_ms[:, -1]))
    if timing == "flops":
        flops = count_flops(full.graph)
        ms_per_flop = full_ms / sum(flops.values())
        return {name: ms_per_flop * count for name, count in flops.items()}, 0.0, 0
    steps = min(max(int(1e3 * TRACING_SECONDS / full_ms), MIN_TRACED), MAX_TRACED)
    with tqdm(total=steps, desc="tracing steps", unit="step") as bar:

        def run() -> None:
            measurement.run_full()
            bar.update()

        trace = trace_step(run, steps, folder)
    return *read_op_times(trace, full.graph, steps), steps


def table_of_trace(model: keras.Model, network: NetworkSettings, trace: OperationTrace, file_name: str) -> TimingTable:
    """The timing table of the device that `trace` was recorded on; nothing is measured here.

    Operation times are added up, as a GPU's single stream runs them: that is the fit. Time that matched no operation is
    counted as part of every step. If operations run side by side, on several cores, steps are shorter than this.

    Args:
        model: network built like the traced one.
        network: its settings.
        trace: of full steps of that network; may lack the updates, whose time is then 0.
        file_name: what profile.json calls the trace.

    Raises:
        UserError: the trace is not of this network.
    """
    from elastic_trainer.timing.foreign_trace import has_folded_batch_norm, match_operations
    from elastic_trainer.training.step import TrainStep

    optimizer = idle_optimizer(model, network.optimizer, network.clips_gradients)
    full = TrainStep(model, optimizer, network.batch_size)
    if not has_folded_batch_norm(trace, full):
        full = TrainStep(model, optimizer, network.batch_size, fold=False)
    op_ms, unmatched_ms = match_operations(trace, full, model)
    costs = attribute_times(full, model.trainable_variables, op_ms)
    forward_ms = costs.forward_ms + costs.other_ms + unmatched_ms
    full_step_ms = forward_ms + float(costs.t_dy_ms.sum() + costs.t_dw_ms.sum())
    constant_ms = forward_ms - float(costs.t_fw_ms.sum()) - costs.preprocessing_ms
    details = {
        "timing": "trace",
        "trace": file_name,
        "planes": list(trace.planes),
        "traced_steps": trace.iterations,
        "unmatched_time_percent": 100 * unmatched_ms / trace.total_ms,
        "operation_ms": _sums(costs),
    }
    fit = Fit(constant_ms, 1.0, 1.0, 1.0, None, None, selections=0, rounds=0)
    gradient_pass_ms = full_step_ms - float(costs.update_ms.sum())
    return _table(model, network, full, costs, forward_ms, full_step_ms, gradient_pass_ms, fit, details)


def _table(
    model: keras.Model,
    network: NetworkSettings,
    full: TrainStep,
    costs: Attribution,
    forward_ms: float,
    full_step_ms: float,
    gradient_pass_ms: float,
    fit: Fit,
    details: dict[str, Any],
) -> TimingTable:
    """The timing table of `costs`; `full` is the step that trains everything."""
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.timing.graph_digest import graph_digest

    names, variables = tensor_names(model), model.trainable_variables
    without_gradient = [names[k] for k in costs.positions if full.gradients[k] is None]
    return TimingTable(
        names=[names[k] for k in costs.positions],
        shapes=[tuple(variables[k].shape) for k in costs.positions],
        positions=costs.positions,
        t_dw_ms=costs.t_dw_ms,
        t_dy_ms=costs.t_dy_ms,
        t_fw_ms=costs.t_fw_ms,
        kernels=costs.kernels,
        normalised=costs.normalised,
        features_mb=costs.features_mb,
        preprocessing_ms=costs.preprocessing_ms,
        forward_ms=forward_ms,
        full_step_ms=full_step_ms,
        gradient_pass_ms=gradient_pass_ms,
        fit=fit,
        settings=table_settings(network),
        details={
            **details,
            "tensors_without_gradient": without_gradient,
            "graph_digest": graph_digest(model, network.batch_size),
        },
    )


def _sums(costs: Attribution) -> dict[str, float]:
    return {
        "forward": costs.forward_ms,
        "error_chain": float(costs.t_dy_ms.sum()),
        "weight_gradients": float((costs.t_dw_ms - costs.update_ms).sum()),
        "updates": float(costs.update_ms.sum()),
        "other": costs.other_ms,
    }


def draw_table(table: TimingTable, stem: Path) -> None:
    """Bar charts of t_dw, t_dy and t_fw over the tensors in backward order, as `stem`.pdf and .png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    order = np.arange(len(table.names))
    for axes, times, label, colour in (
        (upper, table.t_dw_ms, "$t_{dw}$: own gradient and update", "tab:blue"),
        (middle, table.t_dy_ms, "$t_{dy}$: passing the error on", "tab:orange"),
        (lower, table.t_fw_ms, "$t_{fw}$: forward pass from here to the tensor before", "tab:green"),
    ):
        axes.bar(order, times, width=0.9, color=colour)
        axes.set_ylabel("ms a step")
        axes.set_title(f"{label} ({times.sum():.1f} ms in all)", fontsize="medium")
    lower.set_xlabel("tensor, in backward order (0 is next to the output)")
    name, size, batch = (table.settings[key] for key in ("model_name", "input_size", "batch_size"))
    figure.suptitle(f"{figure_text(name)}, {size}×{size}, batch {batch}: operation times")
    save_figure(figure, stem)


def _report(table: TimingTable, head: np.ndarray) -> Iterable[str]:
    full, details, fit = table.full_step_ms, table.details, table.fit
    yield f"full step {full:.1f} ms = forward {table.forward_ms:.1f} + backward {full - table.forward_ms:.1f}"
    sums = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in details["operation_ms"].items())
    beside = f" (each with {1e3 * fit.untraced_ms:.1f} µs beside its trace)" if fit.untraced_ms else ""
    yield f"operation times in ms{' (scaled FLOPs)' if details['timing'] == 'flops' else ''}{beside}: {sums}"
    yield f"operation time that matched no operation of the network: {details['unmatched_time_percent']:.2f} %"
    if fit.median_error_percent is None or fit.p95_error_percent is None:
        yield "predicted against measured step: not measured; operation times are added up"
    else:
        yield (
            f"predicted against measured step, each of {fit.selections} selections left out of its fit in turn, "
            f"{fit.rounds} rounds: median error {fit.median_error_percent:.1f} %, 95th percentile "
            f"{fit.p95_error_percent:.1f} % (spread of the measurements themselves "
            f"{details['measurement_spread_percent']:.1f} %)"
        )
    if not details["operation_ms"]["updates"]:
        yield "the trace contains no update of the weights: its time is missing from the table"
    for name in details["tensors_without_gradient"]:
        yield f"warning: {name} has no influence on the loss and will never be selected"
    smallest = table.predict_ms(head) / full
    cached = table.predict_ms(head, CACHED) / full
    yield f"smallest feasible rho (the head alone): {smallest:.3f}; from cached features, once made: {cached:.3f}"


def _plan(table: TimingTable, model: keras.Model, logdir: Path) -> Iterable[str]:
    """What elastic training would select on the board, by the importance of the newest run if there is one."""
    from elastic_trainer.networks.tensors import head_mask, tensor_names
    from elastic_trainer.selection.plan import plan_lines

    measured = latest_importance(logdir, tensor_names(model))
    importance, source = measured or (np.ones(len(table.names)), None)
    yield (
        f"selections with the importance in {source}:" if source else "selections with equal importance of all tensors:"
    )
    yield from plan_lines(table, head_mask(model), importance)


def main() -> None:
    """Run the command line. Raises `UserError` for what the user can fix."""
    command = parse_profiler()
    load_tensorflow()

    import models
    from elastic_trainer.datasets.sources import count_classes
    from elastic_trainer.networks.tensors import head_mask

    trace = read_trace(command.from_trace) if command.from_trace else None
    network = command.network
    if network.num_classes is None:
        network = network.with_classes(count_classes(command.data.dataset_name, command.data.data_dir))
    model = models.build(network)
    folder = table_folder(network, command.logdir, command.from_trace)
    if trace is not None and command.from_trace is not None:
        table = table_of_trace(model, network, trace, command.from_trace.name)
    else:
        table = _measured_table(model, network, command, folder)
    table.save(folder)
    draw_table(table, folder / "timing")
    if trace is not None and command.from_trace is not None:
        print(f"{command.from_trace.name}: {trace.iterations} complete iterations on {', '.join(trace.planes)}")
    print("\n".join(_report(table, head_mask(model))))
    if trace:
        print("\n".join(_plan(table, model, command.logdir)))
    print(f"timing table of {len(table.names)} tensors: {folder / 'table.csv'}; chart: {folder / 'timing.png'}")


def _measured_table(model: keras.Model, network: NetworkSettings, command: ProfileCommand, folder: Path) -> TimingTable:
    """The table of this machine. Raises `UserError` if `folder` cannot be written, or memory does not suffice."""
    from elastic_trainer.networks.memory import check_memory
    from elastic_trainer.networks.tensors import all_mask

    check_memory(model, network, all_mask(model))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        seconds = MEASURING_SECONDS if command.seconds is None else command.seconds
        return profile(model, network, folder, command.timing, seconds)


if __name__ == "__main__":
    utils.run_cli(main)
