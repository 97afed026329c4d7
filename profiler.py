"""Tensor Timing Profiler: what each tensor of a network costs to train (paper section 4).

    t_dw  time for the tensor's own gradient, and for applying its update
    t_dy  time to pass the error gradient on to where this tensor is reached

The step that training runs is traced with tf.profiler. Each operation's time is read off the trace, event by event, and
given to a tensor by the data flow of the traced graph alone, whatever the layers are:

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
"""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

import options
import utils
from timing_table import TABLE_SETTINGS, TimingTable, chain_and_own, fit_wall_time, table_folder
from utils import UserError

if TYPE_CHECKING:
    import keras

    from train import TrainStep

TRACED_STEPS = 10
WARM_UP_STEPS = 3
MIN_ROUNDS, MAX_ROUNDS, MEASURING_SECONDS = 8, 40, 15  # small networks have noisy steps, but many fit into the time
# Event names of operations are "name:Type"; those whose time is their inner operations' own are left out.
_OP_EVENT = re.compile(r"([^:]+):([A-Za-z_]\w*)")
_CALLS = frozenset(
    ["PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf", "Case"]
)


# --- the trace --------------------------------------------------------------------------------------------------------


def match_op(event_name: str, known: set[str] | frozenset[str]) -> str | None:
    """The operation of the traced graph that an operation of the executed graph stands for, or None.

    The graph optimizer adds transposes named `op-0-Transpose…-LayoutOptimizer`, rewrites operations to
    `scope/ArithmeticOptimizer/Rule_op`, and inlines loops and functions to `op/inner`.
    """
    name = re.sub(r"(-\d+)+-\w+-LayoutOptimizer$", "", event_name)
    if name in known:
        return name
    name = re.sub(r"(?:^|(?<=/))\w*Optimizer/[A-Za-z0-9]+_", "", name)
    while name not in known:
        name, separator, _ = name.rpartition("/")
        if not separator:
            return None
    return name


def read_op_times(trace: Path, known: set[str], steps: int) -> tuple[dict[str, float], float]:
    """Milliseconds a step that each operation of the graph took, from one XSpace file.

    Args:
        trace: *.xplane.pb of `steps` equal steps.
        known: names of the traced graph's operations.
        steps: how many steps the trace holds.

    Returns:
        Times by operation, and the share of all operation time (0…1) that matched no operation.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(trace.read_bytes())
    durations: dict[str, list[float]] = defaultdict(list)
    for plane in space.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        names = {key: _OP_EVENT.fullmatch(metadata.name) for key, metadata in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                match = names[event.metadata_id]
                if match and match[2] not in _CALLS:
                    durations[match[1]].append(event.duration_ps / 1e9)

    times: dict[str, float] = defaultdict(float)
    unmatched = 0.0
    for name, each in durations.items():
        # Once a step: the median shrugs off a step that was disturbed. Loops run more often, or not equally often.
        time_ms = statistics.median(each) if len(each) == steps else sum(each) / steps
        op = match_op(name, known)
        if op is None:
            unmatched += time_ms
        else:
            times[op] += time_ms
    total = unmatched + sum(times.values())
    return dict(times), unmatched / total if total else 0.0


def trace_step(run: Callable[[], object], steps: int, folder: Path) -> Path:
    """Trace `steps` calls of `run` into `folder` (as TensorBoard's profile page reads it); returns the XSpace file."""
    import tensorflow as tf

    shutil.rmtree(folder / "plugins", ignore_errors=True)
    tf.profiler.experimental.start(str(folder))
    try:
        for _ in range(steps):
            run()
    finally:
        tf.profiler.experimental.stop()
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise UserError(f"--logdir {folder}: TensorFlow wrote no trace there; is the disk full?")
    return files[-1]


# --- data flow --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribution:
    """Operation times given to tensors; arrays [N] are in backward order.

    Attributes:
        positions: index into `model.trainable_variables` of each tensor of the backward order.
        t_dw_ms, t_dy_ms: as in the module's header; update_ms is the part of t_dw_ms that applies the update.
        forward_ms, other_ms: operations the loss needs, and those of no tensor (metrics, the schedule).
    """

    positions: np.ndarray
    t_dw_ms: np.ndarray
    t_dy_ms: np.ndarray
    update_ms: np.ndarray
    forward_ms: float
    other_ms: float


def attribute_times(step: TrainStep, variables: Sequence[keras.Variable], op_ms: dict[str, float]) -> Attribution:
    """Give each operation's time to a tensor by the data flow of a step that trains all of `variables`."""
    operations = step.graph.get_operations()
    number = {op.name: i for i, op in enumerate(operations)}
    times = np.array([op_ms.get(op.name, 0.0) for op in operations])
    inputs = [
        sorted({number[t.op.name] for t in op.inputs} | {number[c.name] for c in op.control_inputs})
        for op in operations
    ]
    gradient_tensors = [_dense_tensors(gradient) for gradient in step.gradients]

    in_forward = np.zeros(len(operations), bool)
    in_forward[number[step.loss.op.name]] = True
    needed_by = np.zeros((len(operations), len(variables)), bool)
    for k, tensors in enumerate(gradient_tensors):
        for tensor in tensors:
            needed_by[number[tensor.op.name], k] = True
    for i in range(len(operations) - 1, -1, -1):  # operations are created after their inputs
        in_forward[inputs[i]] |= in_forward[i]
        needed_by[inputs[i]] |= needed_by[i]
    needed_by[in_forward] = False

    depth = needed_by.sum(axis=0)
    trained = np.array([bool(tensors) for tensors in gradient_tensors])
    positions = np.array(sorted(range(len(variables)), key=lambda k: (not trained[k], depth[k], -k)))
    in_order = needed_by[:, positions]
    sharers = in_order.sum(axis=1)
    first = np.argmax(in_order, axis=1)
    own, shared = sharers == 1, sharers > 1
    count = len(variables)
    t_dw = np.bincount(first[own], times[own], count)
    t_dy = np.bincount(first[shared], times[shared], count)

    owner = _update_owners(step, variables, gradient_tensors, in_forward | (sharers > 0))
    updates = owner >= 0
    update_ms = np.bincount(owner[updates], times[updates], count)[positions]
    other = ~(in_forward | (sharers > 0) | updates)
    return Attribution(
        positions, t_dw + update_ms, t_dy, update_ms, float(times[in_forward].sum()), float(times[other].sum())
    )


def _dense_tensors(gradient: Any) -> list[Any]:
    """The tensors a gradient consists of: none, one, or the parts of an IndexedSlices."""
    if gradient is None:
        return []
    return [gradient] if not hasattr(gradient, "indices") else [gradient.values, gradient.indices]


def _update_owners(
    step: TrainStep, variables: Sequence[keras.Variable], gradient_tensors: list[list[Any]], computed: np.ndarray
) -> np.ndarray:
    """For each operation the one tensor (index into `variables`) whose update it is part of, or -1.

    An operation outside loss and gradients belongs to tensor k if, among gradients and trained variables, only k's
    reach it.
    """
    of_tensor = {t.name: k for k, tensors in enumerate(gradient_tensors) for t in tensors}
    handles = {id(variable.value.handle): k for k, variable in enumerate(variables)}
    for outside, inside in step.graph.captures:
        if id(outside) in handles:
            of_tensor[inside.name] = handles[id(outside)]
    operations = step.graph.get_operations()
    reached: dict[str, set[int]] = {}
    owner = np.full(len(operations), -1)
    for i, op in enumerate(operations):
        if computed[i] or op.type == "Placeholder":
            continue
        owners: set[int] = set()
        for tensor in op.inputs:
            if tensor.name in of_tensor:
                owners.add(of_tensor[tensor.name])
            else:
                owners |= reached.get(tensor.op.name, set())
        reached[op.name] = owners
        if len(owners) == 1:
            owner[i] = owners.pop()
    return owner


# --- measuring --------------------------------------------------------------------------------------------------------


# How deep (share of all tensors) and how densely the selections reach that the fit is measured on.
_CALIBRATION = (
    *((depth, 1.0) for depth in (0.25, 0.5, 0.75)),
    *((depth, 0.5) for depth in (0.5, 1.0)),
    *((depth, 1 / 6) for depth in (0.25, 0.5, 0.75, 1.0)),
)


def calibration_masks(positions: np.ndarray, head: np.ndarray) -> list[np.ndarray]:
    """Selections whose steps are measured for the fit: bool [N] over `model.trainable_variables`, the full one last.

    The head alone, then shares of the tensors down to different depths (`_CALIBRATION`). All train the head.
    """
    rng = np.random.default_rng(0)
    masks = [head.copy()]
    for depth, density in _CALIBRATION:
        deepest = max(int(depth * len(positions)), 1)
        chosen = rng.random(deepest) < density
        chosen[-1] = True
        mask = head.copy()
        mask[positions[:deepest][chosen]] = True
        masks.append(mask)
    return [*masks, np.ones(len(positions), bool)]


def measure_steps(runs: Sequence[Callable[[], object]]) -> np.ndarray:
    """Wall times [rounds, len(runs)] in ms of compiled steps, as many rounds as fit into `MEASURING_SECONDS`."""
    for run in runs:
        for _ in range(WARM_UP_STEPS):
            run()
    start = time.perf_counter()
    times: list[np.ndarray] = []
    with tqdm(total=MIN_ROUNDS, desc="measuring steps", unit="round") as bar:
        while len(times) < bar.total:
            times.append(utils.measure_ms(runs, rounds=1, unseen=1)[0])
            if len(times) == 1:
                rounds = int(MEASURING_SECONDS / (time.perf_counter() - start))
                bar.total = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
            bar.update()
    return np.array(times)


def profile(model: keras.Model, settings: dict[str, Any], folder: Path) -> TimingTable:
    """Measure the timing table of `model`. Its weights do not change.

    Args:
        model: network with a layer "head".
        settings: the options in `TABLE_SETTINGS`.
        folder: where the trace is kept.
    """
    import tensorflow as tf

    import models
    import train
    from optimizers import make_optimizer

    if tf.config.list_physical_devices("GPU"):
        raise UserError(
            "a GPU is in use, whose operation times this version does not read; set CUDA_VISIBLE_DEVICES=-1 to profile "
            "and train on the CPU"
        )
    variables, head, batch_size = model.trainable_variables, models.head_mask(model), settings["batch_size"]
    names = models.tensor_names(model)
    # At a rate of 0 every operation of a step runs and no weight moves.
    optimizer = make_optimizer(settings["optimizer"], learning_rate=0.0, weight_decay=5e-4, total_steps=1)
    optimizer.build(variables)
    images, labels = (spec.shape for spec in train.batch_spec(model, batch_size))
    batch = (tf.random.uniform(images, 0, 255, seed=0), tf.zeros(labels, tf.int32))
    with tqdm(total=5 + len(_CALIBRATION), unit="part") as bar:
        bar.set_description("compiling the full step")
        full = train.TrainStep(model, optimizer, variables, batch_size)
        for _ in range(WARM_UP_STEPS):
            full(*batch)
        bar.update()
        bar.set_description("tracing")
        trace = trace_step(lambda: full(*batch), TRACED_STEPS, folder)
        bar.update()
        bar.set_description("reading the trace")
        op_ms, unmatched = read_op_times(trace, {op.name for op in full.graph.get_operations()}, TRACED_STEPS)
        costs = attribute_times(full, variables, op_ms)
        bar.update()

        masks = calibration_masks(costs.positions, head)
        steps = []
        for mask in masks[:-1]:
            bar.set_description("compiling selections")
            chosen = [variable for variable, selected in zip(variables, mask, strict=True) if selected]
            steps.append(train.TrainStep(model, optimizer, chosen, batch_size))
            bar.update()
        steps.append(full)
        forward = train.forward_pass(model, batch_size)
        gradient_pass = train.ImportanceEvaluator(model, batch_size).gradient_pass
        bar.update()
    times = measure_steps([partial(step, *batch) for step in (*steps, forward, gradient_pass)])
    rounds = len(times)

    median_ms = np.median(times, axis=0)
    measured, (forward_ms, gradient_pass_ms) = median_ms[:-2], median_ms[-2:].tolist()
    sums = np.array([chain_and_own(mask[costs.positions], costs.t_dy_ms, costs.t_dw_ms) for mask in masks])
    fit = fit_wall_time(sums[:, 0], sums[:, 1], measured, rounds)
    spread = 100 * float(np.median((np.percentile(times, 75, axis=0) - np.percentile(times, 25, axis=0)) / median_ms))
    return TimingTable(
        names=[names[k] for k in costs.positions],
        shapes=[tuple(variables[k].shape) for k in costs.positions],
        positions=costs.positions,
        t_dw_ms=costs.t_dw_ms,
        t_dy_ms=costs.t_dy_ms,
        forward_ms=forward_ms,
        full_step_ms=float(measured[-1]),
        gradient_pass_ms=gradient_pass_ms,
        fit=fit,
        settings=settings,
        details={
            "traced_steps": TRACED_STEPS,
            "unmatched_time_percent": 100 * unmatched,
            "operation_ms": {
                "forward": costs.forward_ms,
                "error_chain": float(costs.t_dy_ms.sum()),
                "weight_gradients": float((costs.t_dw_ms - costs.update_ms).sum()),
                "updates": float(costs.update_ms.sum()),
                "other": costs.other_ms,
            },
            "measured_selections": [
                {"trained_tensors": int(mask.sum()), "chain_ms": chain, "own_ms": own, "step_ms": float(step_ms)}
                for mask, (chain, own), step_ms in zip(masks, sums.tolist(), measured, strict=True)
            ],
            "measurement_spread_percent": spread,
            "tensors_without_gradient": [names[k] for k in costs.positions if full.gradients[k] is None],
            "environment": utils.environment(),
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
    full, details = table.full_step_ms, table.details
    yield f"full step {full:.1f} ms = forward {table.forward_ms:.1f} + backward {full - table.forward_ms:.1f}"
    sums = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in details["operation_ms"].items())
    yield f"operation times in ms: {sums}"
    yield f"operation time that matched no operation of the network: {details['unmatched_time_percent']:.2f} %"
    yield (
        f"predicted against measured step, each of {table.fit.selections} selections left out of its fit in turn, "
        f"{table.fit.rounds} rounds: median error "
        f"{table.fit.median_error_percent:.1f} %, 95th percentile {table.fit.p95_error_percent:.1f} % "
        f"(spread of the measurements themselves {details['measurement_spread_percent']:.1f} %)"
    )
    for name in details["tensors_without_gradient"]:
        yield f"warning: {name} has no influence on the loss and will never be selected"
    yield f"smallest feasible rho (the head alone): {smallest_rho:.3f}"


def main() -> None:
    args = options.parse_profiler()
    utils.load_tensorflow()
    import keras

    import data
    import models

    if args.num_classes is None:
        args.num_classes = data.count_classes(args.dataset_name, args.data_dir)
    keras.utils.set_random_seed(args.seed)
    model = models.build_model(
        args.model_name, args.input_size, args.num_classes, args.weights, args.alpha, args.augmentation, args.seed
    )
    folder = table_folder(args)
    with utils.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        table = profile(model, {key: getattr(args, key) for key in TABLE_SETTINGS}, folder)
    table.save(folder)
    draw_table(table, folder / "timing")
    print("\n".join(_report(table, table.predict_ms(models.head_mask(model)) / table.full_step_ms)))
    print(f"timing table of {len(table.names)} tensors: {folder / 'table.csv'}; chart: {folder / 'timing.png'}")


if __name__ == "__main__":
    utils.run_cli(main)
