"""Tensor Timing Profiler: what each tensor of a network costs to train (paper section 4).

    t_dw  time for the tensor's own gradient, and for applying its update
    t_dy  time to pass the error gradient on to where this tensor is reached

The step that training runs is traced with tf.profiler. Each operation's time is read off the trace, event by event (or
stands in for it by its FLOPs, or comes from a trace recorded on a board: `operation_times`, `board`), and given to a
tensor by the data flow of the traced graph alone, whatever the layers are:

    F     the operations the loss depends on
    B_k   the operations the gradient of tensor k depends on, less F
    order by depth: |B_k| ascending, output first; among equals the tensor created later comes first
    t_dw  operations of B_k in no other B_j, and the update of tensor k
    t_dy  operations of B_k shared with others, if k is the first in the order to need them

So the chain sum over t_dy down to the deepest selected tensor plus t_dw of the selected ones is never below the time of
the operations really needed. Independent operations overlap in time, so the sum is turned into wall time by a linear
model that is fitted to the measured steps of a few selections (`timing_table.Fit`).

Command line: `python profiler.py --model_name … --input_size … --batch_size …` writes
logs/profiles/<model>_<input>_<classes>_<batch>/ with table.csv, profile.json, a chart, and the trace for TensorBoard.
With `--from_trace FILE` it measures nothing here, and plans for the board that FILE was recorded on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

import utils
from elastic_trainer.cli import options
from elastic_trainer.machine import environment
from elastic_trainer.runs.reader import latest_importance
from elastic_trainer.selection.plan import plan_lines
from elastic_trainer.timing.attribution import Attribution, attribute_times
from elastic_trainer.timing.fit import Fit, chain_and_own, fit_wall_time
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.measuring import MEASURING_SECONDS, Measurement, idle_optimizer, measure
from elastic_trainer.timing.table import TimingTable, table_folder, table_settings
from elastic_trainer.timing.trace import OperationTrace, read_op_times, read_trace, trace_step

if TYPE_CHECKING:
    import keras


# Small networks have noisy steps, but many of them fit into the time.
MIN_TRACED, MAX_TRACED, TRACING_SECONDS = 8, 40, 10


def _operation_times(measurement: Measurement, timing: str, folder: Path) -> tuple[Attribution, float, int]:
    """Operation times given to tensors, the share (0…1) that matched no operation, and the number of traced steps."""
    full, variables = measurement.full, measurement.model.trainable_variables
    if timing == "flops":
        flops = count_flops(full.graph)
        full_ms = float(np.median(measurement.step_ms[:, -1]))
        return attribute_times(full, variables, flops).scaled(full_ms / sum(flops.values())), 0.0, 0
    steps = min(max(int(1e3 * TRACING_SECONDS / np.median(measurement.step_ms[:, -1])), MIN_TRACED), MAX_TRACED)
    with tqdm(total=steps, desc="tracing steps", unit="step") as bar:

        def run() -> None:
            measurement.run_full()
            bar.update()

        trace = trace_step(run, steps, folder)
    op_ms, unmatched = read_op_times(trace, {op.name for op in full.graph.get_operations()}, steps)
    return attribute_times(full, variables, op_ms), unmatched, steps


def make_table(measurement: Measurement, folder: Path, timing: str = "trace") -> TimingTable:
    """The timing table of a measured network. Arguments as for `profile`."""
    from elastic_trainer.networks.tensors import tensor_names

    costs, unmatched, traced_steps = _operation_times(measurement, timing, folder)
    masks, step_ms = measurement.masks, measurement.step_ms
    names, variables = tensor_names(measurement.model), measurement.model.trainable_variables
    median_ms = np.median(step_ms, axis=0)
    sums = np.array([chain_and_own(mask[costs.positions], costs.t_dy_ms, costs.t_dw_ms) for mask in masks])
    with_forward = np.vstack([[0.0, 0.0], sums])  # the forward pass is a step that trains nothing
    forward_and_steps = np.append(measurement.forward_ms, median_ms)
    fit = fit_wall_time(with_forward[:, 0], with_forward[:, 1], forward_and_steps, len(step_ms))
    full_step_ms = float(median_ms[-1])
    low, high = np.percentile(step_ms, (25, 75), axis=0)
    return TimingTable(
        names=[names[k] for k in costs.positions],
        shapes=[tuple(variables[k].shape) for k in costs.positions],
        positions=costs.positions,
        t_dw_ms=costs.t_dw_ms,
        t_dy_ms=costs.t_dy_ms,
        forward_ms=measurement.forward_ms,
        full_step_ms=full_step_ms,
        # Not measured: its few rounds would be off by more than all that it differs from a full step by.
        gradient_pass_ms=full_step_ms - fit.own_factor * float(costs.update_ms.sum()),
        fit=fit,
        settings=measurement.settings,
        details={
            "timing": timing,
            "traced_steps": traced_steps,
            "unmatched_time_percent": 100 * unmatched,
            "operation_ms": _sums(costs),
            "measured_selections": [
                {"trained_tensors": int(mask.sum()), "chain_ms": chain, "own_ms": own, "step_ms": float(median)}
                for mask, (chain, own), median in zip(masks, sums.tolist(), median_ms, strict=True)
            ],
            "measurement_spread_percent": 100 * float(np.median((high - low) / median_ms)),
            "tensors_without_gradient": [names[k] for k in costs.positions if measurement.full.gradients[k] is None],
            "environment": environment(),
        },
    )


def profile(
    model: keras.Model,
    settings: dict[str, Any],
    folder: Path,
    timing: str = "trace",
    seconds: float = MEASURING_SECONDS,
) -> TimingTable:
    """Measure the timing table of `model`. Its weights do not change.

    Args:
        model: network to be trained.
        settings: the options in `TABLE_SETTINGS`.
        folder: where the trace is kept.
        timing: "trace", or "flops" to count each operation's FLOPs and scale them to add up to the measured full step.
            Either way the fit is to measured steps. On a GPU the trace is its kernels' (untested: no GPU was at hand).
        seconds: for measuring steps, of which five rounds are made in any case.
    """
    begin = time.perf_counter()
    table = make_table(measure(model, settings, seconds), folder, timing)
    table.details["profiling_seconds"] = time.perf_counter() - begin
    return table


def _sums(costs: Attribution) -> dict[str, float]:
    return {
        "forward": costs.forward_ms,
        "error_chain": float(costs.t_dy_ms.sum()),
        "weight_gradients": float((costs.t_dw_ms - costs.update_ms).sum()),
        "updates": float(costs.update_ms.sum()),
        "other": costs.other_ms,
    }


def table_of_trace(model: keras.Model, settings: dict[str, Any], trace: OperationTrace, file_name: str) -> TimingTable:
    """The timing table of the device that `trace` was recorded on; nothing is measured here.

    Operation times are added up, as a GPU's one stream takes them: that is the fit. Time that matched no operation is
    counted to what every step does. Where operations run side by side, on several cores, steps are shorter than this.

    Args:
        model: network built as the traced one was.
        settings: the options in `TABLE_SETTINGS`.
        trace: of full steps of that network; may lack the updates, whose time is then 0.
        file_name: what profile.json calls the trace.

    Raises:
        UserError: the trace is not of this network.
    """
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.timing import foreign_trace
    from elastic_trainer.training.step import TrainStep

    variables, names = model.trainable_variables, tensor_names(model)
    full = TrainStep(model, idle_optimizer(model, settings), settings["batch_size"])
    op_ms, unmatched_ms = foreign_trace.match_operations(trace, full, model)
    costs = attribute_times(full, variables, op_ms)
    constant_ms = costs.forward_ms + costs.other_ms + unmatched_ms
    full_step_ms = constant_ms + float(costs.t_dy_ms.sum() + costs.t_dw_ms.sum())
    return TimingTable(
        names=[names[k] for k in costs.positions],
        shapes=[tuple(variables[k].shape) for k in costs.positions],
        positions=costs.positions,
        t_dw_ms=costs.t_dw_ms,
        t_dy_ms=costs.t_dy_ms,
        forward_ms=constant_ms,
        full_step_ms=full_step_ms,
        gradient_pass_ms=full_step_ms - float(costs.update_ms.sum()),
        fit=Fit(constant_ms, 1.0, 1.0, None, None, selections=0, rounds=0),
        settings=settings,
        details={
            "timing": "trace",
            "trace": file_name,
            "planes": list(trace.planes),
            "traced_steps": trace.iterations,
            "unmatched_time_percent": 100 * unmatched_ms / trace.total_ms,
            "operation_ms": _sums(costs),
            "tensors_without_gradient": [names[k] for k in costs.positions if full.gradients[k] is None],
        },
    )


def draw_table(table: TimingTable, stem: Path) -> None:
    """Bar chart of t_dw and t_dy over the tensors in backward order, as `stem`.pdf and .png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    order = np.arange(len(table.names))
    for axes, times, label, colour in (
        (upper, table.t_dw_ms, "$t_{dw}$: own gradient and update", "tab:blue"),
        (lower, table.t_dy_ms, "$t_{dy}$: passing the error on", "tab:orange"),
    ):
        axes.bar(order, times, width=0.9, color=colour)
        axes.set_ylabel("ms a step")
        axes.set_title(f"{label} ({times.sum():.1f} ms in all)", fontsize="medium")
    lower.set_xlabel("tensor, in backward order (0 is next to the output)")
    name, size, batch = (table.settings[key] for key in ("model_name", "input_size", "batch_size"))
    figure.suptitle(f"{name}, {size}×{size}, batch {batch}: operation times")
    utils.save_figure(figure, stem)


def _report(table: TimingTable, smallest_rho: float) -> Iterable[str]:
    full, details, fit = table.full_step_ms, table.details, table.fit
    yield f"full step {full:.1f} ms = forward {table.forward_ms:.1f} + backward {full - table.forward_ms:.1f}"
    sums = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in details["operation_ms"].items())
    yield f"operation times in ms{' (scaled FLOPs)' if details['timing'] == 'flops' else ''}: {sums}"
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
        yield "the trace holds no update of the weights: its time is missing from the table"
    for name in details["tensors_without_gradient"]:
        yield f"warning: {name} has no influence on the loss and will never be selected"
    yield f"smallest feasible rho (the head alone): {smallest_rho:.3f}"


def _plan(table: TimingTable, model: keras.Model, logdir: Path) -> Iterable[str]:
    """What elastic training would choose on the board, by the importance of the newest run if there is one."""
    from elastic_trainer.networks.tensors import head_mask, tensor_names

    measured = latest_importance(logdir, tensor_names(model))
    importance, source = measured or (np.ones(len(table.names)), None)
    yield (
        f"selections with the importance in {source}:" if source else "selections with equal importance of all tensors:"
    )
    yield from plan_lines(table, head_mask(model), importance)


def main() -> None:
    args = options.parse_profiler()
    utils.load_tensorflow()

    import models
    from elastic_trainer.datasets.sources import count_classes
    from elastic_trainer.networks.memory import check_memory
    from elastic_trainer.networks.tensors import head_mask

    trace = read_trace(args.from_trace) if args.from_trace else None
    if args.num_classes is None:
        args.num_classes = count_classes(args.dataset_name, args.data_dir)
    model = models.build_from_options(args)
    folder, settings = table_folder(args), table_settings(args)
    if trace:
        table = table_of_trace(model, settings, trace, args.from_trace.name)
    else:
        check_memory(model, args)
        with utils.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            seconds = MEASURING_SECONDS if args.seconds is None else args.seconds
            table = profile(model, settings, folder, args.timing, seconds)
    table.save(folder)
    draw_table(table, folder / "timing")
    if trace:
        print(f"{args.from_trace.name}: {trace.iterations} whole iterations on {', '.join(trace.planes)}")
    print("\n".join(_report(table, table.predict_ms(head_mask(model)) / table.full_step_ms)))
    if trace:
        print("\n".join(_plan(table, model, args.logdir)))
    print(f"timing table of {len(table.names)} tensors: {folder / 'table.csv'}; chart: {folder / 'timing.png'}")


if __name__ == "__main__":
    utils.run_cli(main)
