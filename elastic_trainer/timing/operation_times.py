"""Where the time of each operation of a traced graph comes from: a CPU trace, a GPU trace, or counted FLOPs.

A trace is an XSpace file (`*.xplane.pb`) as tf.profiler writes it. On a CPU the events of the host plane are named
"name:Type". On a GPU the host only launches: there the times are those of the device plane's kernels, which carry
"name:Type" in their `tf_op` stat. No GPU was at hand: that reader is tested on four traces from a Jetson TX2
(TensorFlow 2.7); that it reads a live trace of this TensorFlow as well is untested.

Counted FLOPs need no trace. They tell how much an operation computes, not how fast: `profiler.py --timing flops`.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils import UserError

if TYPE_CHECKING:
    import tensorflow as tf

_OP_EVENT = re.compile(r"([^:]+):(\w+)")
# Calls are left out: their time is their inner operations' own.
_CALLS = frozenset(
    ["PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf", "Case"]
)
_LAYOUT = re.compile(r"(-\d+)+-\w+-LayoutOptimizer$")
WHOLE = 0.95  # share of the fullest iteration's operations that an iteration must hold: the trace may end amid one

OUTLIER = 1.5  # an operation that takes this many times its median was disturbed


# --- traces -----------------------------------------------------------------------------------------------------------


def strip_layout(name: str) -> str:
    """The operation that a transpose `op-0-Transpose…-LayoutOptimizer` of the graph optimizer was put in for."""
    return _LAYOUT.sub("", name)


def match_op(event_name: str, known: set[str] | frozenset[str]) -> str | None:
    """The operation of the traced graph that an operation of the executed graph stands for, or None.

    The graph optimizer adds transposes named `op-0-Transpose…-LayoutOptimizer`, rewrites operations to
    `scope/ArithmeticOptimizer/Rule_op`, and inlines loops and functions to `op/inner`.
    """
    name = strip_layout(event_name)
    if name in known:
        return name
    name = re.sub(r"(?:^|(?<=/))\w*Optimizer/[A-Za-z0-9]+_", "", name)
    while name not in known:
        name, separator, _ = name.rpartition("/")
        if not separator:
            return None
    return name


@dataclass(frozen=True)
class OperationTrace:
    """What one trace says of the operations it saw, in ms per iteration (training step).

    Attributes:
        op_ms: by the operation's name in the executed graph.
        types: its type in the executed graph, by the same name.
        unnamed_ms: kernels of a GPU that belong to no operation (cuDNN clearing its buffers, say).
        iterations: whole iterations that the times are taken from.
        planes: names of the planes that were read.
    """

    op_ms: dict[str, float]
    types: dict[str, str]
    unnamed_ms: float
    iterations: int
    planes: tuple[str, ...]

    @property
    def total_ms(self) -> float:
        """All operation time of one iteration."""
        return sum(self.op_ms.values()) + self.unnamed_ms


class _Event(NamedTuple):
    """One execution: of which operation (name and type are "" for a nameless kernel), in which step, how long."""

    name: str
    type: str
    step: int | None
    ms: float


def read_trace(path: Path, steps: int | None = None) -> OperationTrace:
    """Read one XSpace file: the kernels of its GPUs, or the operations of its CPU where there is no GPU.

    Args:
        path: *.xplane.pb.
        steps: how many equal steps it holds; None to find that out from the trace itself.

    Raises:
        UserError: there is no such file, it is no XSpace or holds no operations, or the count cannot be told.
    """
    from google.protobuf.message import DecodeError
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    try:
        space.ParseFromString(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise UserError(f"{path}: not an XSpace; give a *.xplane.pb that tf.profiler wrote") from error
    for prefix, read in (("/device:GPU", _kernels), ("/host:CPU", _host_operations)):
        planes = [plane for plane in space.planes if plane.name.startswith(prefix)]
        events = [event for plane in planes for event in read(plane)]
        if any(event.name for event in events):
            return _per_iteration(events, steps, path, tuple(plane.name for plane in planes))
    raise UserError(f"{path}: holds no operations; record it with tf.profiler while a step runs")


def is_operation(event_name: str) -> bool:
    """Whether an event of the CPU is an operation whose time is its own."""
    match = _OP_EVENT.fullmatch(event_name)
    return match is not None and match[2] not in _CALLS


def _host_operations(plane: Any) -> Iterator[_Event]:
    names = {key: _OP_EVENT.fullmatch(metadata.name) for key, metadata in plane.event_metadata.items()}
    for line in plane.lines:
        for event in line.events:
            match = names.get(event.metadata_id)
            if match and match[2] not in _CALLS:
                yield _Event(match[1], match[2], None, event.duration_ps / 1e9)


def _kernels(plane: Any) -> Iterator[_Event]:
    """Of the streams only: lines such as "TensorFlow Ops" and "Steps" tell the same time once more."""
    stat_names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            op, step = "", None
            for stat in event.stats:
                kind = stat_names.get(stat.metadata_id)
                if kind == "tf_op":
                    op = stat.str_value or stat_names.get(stat.ref_value, "")
                elif kind == "group_id":
                    step = stat.int64_value or stat.uint64_value
            match = _OP_EVENT.fullmatch(op)
            yield _Event(match[1] if match else "", match[2] if match else "", step, event.duration_ps / 1e9)


def _per_iteration(events: list[_Event], steps: int | None, path: Path, planes: tuple[str, ...]) -> OperationTrace:
    types = {event.name: event.type for event in events if event.name}
    whole = _whole_steps(events) if steps is None else []
    if whole:
        by_step: dict[str, Counter[int]] = defaultdict(Counter)
        for event in events:
            if event.step is not None:
                by_step[event.name][event.step] += event.ms  # type: ignore[assignment]  # Counter adds floats as well
        op_ms = {name: _steady_mean([sums[step] for step in whole]) for name, sums in by_step.items()}
        # Nameless kernels belong to no step either; they run in cut-off ones too, so to a share of all time.
        counted = sum(event.ms for event in events if event.step in set(whole))
        grouped = sum(event.ms for event in events if event.step is not None)
        nameless = sum(event.ms for event in events if event.step is None)
        op_ms[""] = op_ms.get("", 0.0) + nameless * counted / grouped / len(whole)
        iterations = len(whole)
    else:
        durations: dict[str, list[float]] = defaultdict(list)
        for event in events:
            durations[event.name].append(event.ms)
        counts = [len(each) for name, each in durations.items() if name]
        iterations = _count_iterations(counts, path) if steps is None else steps
        op_ms = {name: _once(each, iterations, cut_off=steps is None) for name, each in durations.items()}
    unnamed_ms = op_ms.pop("", 0.0)
    return OperationTrace({name: op_ms.get(name, 0.0) for name in types}, types, unnamed_ms, iterations, planes)


def _steady_mean(each: list[float]) -> float:
    """Mean of the times but for outliers: on first use cuDNN and cuBLAS try out algorithms, which takes several times
    as long (ViT's first MatMul on the TX2: 28 ms instead of 9)."""
    median = statistics.median(each)
    return statistics.fmean(ms for ms in each if ms <= OUTLIER * median) if median else statistics.fmean(each)


def _whole_steps(events: Iterable[_Event]) -> list[int]:
    """The steps of the trace that are complete, by the steps that its kernels say they belong to (if they do)."""
    ops: dict[int, set[str]] = defaultdict(set)
    named = grouped = 0
    for event in events:
        if event.name:
            named += 1
            if event.step is not None:
                grouped += 1
                ops[event.step].add(event.name)
    if not ops or grouped < WHOLE * named:
        return []
    fullest = max(map(len, ops.values()))
    return sorted(step for step, names in ops.items() if len(names) >= WHOLE * fullest)


def _count_iterations(counts: list[int], path: Path) -> int:
    """How many iterations a trace holds, from how often each operation occurs: most run once in each."""
    count = Counter(counts).most_common(1)[0][0]
    # Some run several times in each; in a trace that begins or ends amid an iteration others run once more or less.
    fitting = sum(each % count == 0 or abs(each - count) == 1 for each in counts)
    if 2 * fitting < len(counts):
        raise UserError(f"{path}: how many steps it holds cannot be told: its operations run unequally often")
    return count


def _once(each: list[float], iterations: int, cut_off: bool) -> float:
    """Time in one iteration of an operation that took `each` of these in all."""
    if len(each) == iterations:  # the median shrugs off an iteration that was disturbed
        return statistics.median(each)
    if cut_off and len(each) % iterations:
        for neighbour in (iterations - 1, iterations + 1):
            if neighbour and len(each) % neighbour == 0:
                return sum(each) / neighbour
    return sum(each) / iterations


def read_op_times(trace: Path, known: set[str], steps: int) -> tuple[dict[str, float], float]:
    """Milliseconds a step that each operation of the graph took, from one XSpace file of a CPU or a GPU.

    Args:
        trace: *.xplane.pb of `steps` equal steps.
        known: names of the traced graph's operations.
        steps: how many steps the trace holds.

    Returns:
        Times by operation, and the share of all operation time (0…1) that matched no operation.

    Raises:
        UserError: see `read_trace`.
    """
    read = read_trace(trace, steps)
    times: dict[str, float] = defaultdict(float)
    for name, time_ms in read.op_ms.items():
        op = match_op(name, known)
        if op is not None:
            times[op] += time_ms
    return dict(times), 1 - sum(times.values()) / read.total_ms if read.total_ms else 0.0


def trace_step(run: Callable[[], object], steps: int, folder: Path) -> Path:
    """Trace `steps` calls of `run` into `folder` (as TensorBoard's profile page reads it); returns the XSpace file."""
    import tensorflow as tf

    shutil.rmtree(folder / "plugins", ignore_errors=True)
    tf.profiler.experimental.start(str(folder))
    try:
        for number in range(steps):
            with tf.profiler.experimental.Trace("step", step_num=number, _r=1):  # TensorBoard tells steps apart by it
                run()
    finally:
        tf.profiler.experimental.stop()
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise UserError(f"--logdir {folder}: TensorFlow wrote no trace there; is the disk full?")
    return files[-1]


# --- counted FLOPs ----------------------------------------------------------------------------------------------------

# TensorFlow's own registry (tensorflow.python.profiler.internal.flops_registry) knows Conv2D and its gradients,
# DepthwiseConv2dNative, MatMul and BatchMatMul, in channels-last and with known shapes alone. It lacks the depthwise
# gradients, Einsum, the fused kinds and loops, and counts a BatchMatMul whose factors are transposed over the wrong
# axis. So all contractions are counted here; a test holds these against the registry where that is right.
_CONVOLUTIONS = {  # type -> inputs that hold (the filter, what it computed or that one's gradient); None: its output
    "Conv2D": (1, None),
    "Conv3D": (1, None),
    "_FusedConv2D": (1, None),
    "Conv2DBackpropInput": (1, 2),
    "Conv3DBackpropInputV2": (1, 2),
    "Conv2DBackpropFilter": (None, 2),
    "Conv3DBackpropFilterV2": (None, 2),
    "DepthwiseConv2dNative": (1, None),
    "_FusedDepthwiseConv2dNative": (1, None),
    "DepthwiseConv2dNativeBackpropInput": (1, 2),
    "DepthwiseConv2dNativeBackpropFilter": (None, 2),
}
_PRODUCTS = {  # type -> attribute that says whether the first factor is transposed
    "MatMul": "transpose_a",
    "_FusedMatMul": "transpose_a",
    "BatchMatMul": "adj_x",
    "BatchMatMulV2": "adj_x",
    "BatchMatMulV3": "adj_x",
}
# These only name, hold or view what others made.
_FREE = frozenset(
    [
        *(
            "Const",
            "Placeholder",
            "Identity",
            "IdentityN",
            "NoOp",
            "ReadVariableOp",
            "VarHandleOp",
            "Assert",
            "Reshape",
        ),
        *("Squeeze", "ExpandDims", "Shape", "ShapeN", "StopGradient", "PreventGradient"),
    ]
)
_BRANCHES = {
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


def contraction_flops(op: tf.Operation) -> float | None:
    """FLOPs (2 a multiply-accumulate) of a convolution, a matrix product or their gradients; None for other kinds.

    Where a shape is not known the count is 0.
    """
    if op.type in _CONVOLUTIONS:
        kernel, computed = (op.outputs[0] if k is None else op.inputs[k] for k in _CONVOLUTIONS[op.type])
        weights = kernel.shape
        if weights.rank is None:
            return 0.0
        # Each value computed sums over one filter: its height, width, and depth where it is not depthwise.
        depthwise = "Depthwise" in op.type
        return 2.0 * _elements(computed) * _product(weights[:-2] if depthwise else weights[:-1])
    if op.type in _PRODUCTS:
        shape = op.inputs[0].shape
        if shape.rank is None:
            return 0.0
        summed = shape[-2] if op.get_attr(_PRODUCTS[op.type]) else shape[-1]
        return 2.0 * _elements(op.outputs[0]) * (summed or 0)
    if op.type == "Einsum":
        return _einsum_flops(op)
    return None


def _einsum_flops(op: tf.Operation) -> float:
    labels = op.get_attr("equation").decode().partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    batch = 1
    for term, tensor in zip(labels, op.inputs, strict=True):
        if tensor.shape.rank is None:
            return 0.0
        shape = [size or 0 for size in tensor.shape.as_list()]
        before, dots, after = term.strip().partition("...")
        if dots:  # an ellipsis stands for the axes in the middle, the same (or 1) in each factor
            inner = shape[len(before) : len(shape) - len(after)]
            batch = max(batch, math.prod(inner))
            shape = shape[: len(before)] + shape[len(shape) - len(after) :]
        for label, size in zip(before + after, shape, strict=True):
            sizes[label] = max(sizes.get(label, 0), size)
    return (2.0 if len(op.inputs) > 1 else 1.0) * batch * math.prod(sizes.values())


def _product(sizes: Iterable[int | None]) -> int:
    return math.prod(size or 0 for size in sizes)


def _elements(tensor: tf.Tensor) -> int:
    """How many values a tensor holds; 0 where that is not known, and for handles, which hold none."""
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    return tensor.shape.num_elements() or 0


def count_flops(graph: Any) -> dict[str, float]:
    """FLOPs of each operation of `graph`, a function's graph (FuncGraph), by name.

    Contractions as in `contraction_flops`; all others one for each element they read or write. A loop counts its body
    as often as it runs where the graph tells (`maximum_iterations`, as Keras' recurrent layers set it, also on the
    way back), else once; a branch counts its dearer side. What no result needs counts 0: it is never executed.
    """
    executed = needed_operations([*graph.outputs, *graph.control_outputs])
    return {op.name: _op_flops(op) if op.name in executed else 0.0 for op in graph.get_operations()}


def needed_operations(results: Iterable[Any]) -> set[str]:
    """Names of the operations that `results`, tensors or operations of one graph, depend on, themselves included."""
    waiting = [getattr(result, "op", result) for result in results]
    seen: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return seen


def _op_flops(op: tf.Operation) -> float:
    if op.type in _FREE:
        return 0.0
    if op.type in _BRANCHES:
        inner = [sum(count_flops(body).values()) for body in _bodies(op)]
        return _trips(op) * sum(inner) if "While" in op.type else max(inner, default=0.0)
    flops = contraction_flops(op)
    return float(sum(map(_elements, (*op.inputs, *op.outputs)))) if flops is None else flops


def _bodies(op: tf.Operation) -> Iterator[tf.Graph]:
    for attribute in _BRANCHES[op.type]:
        name, graph = op.get_attr(attribute).name, op.graph
        while graph is not None:
            function = graph._get_function(name)
            if function is not None:
                yield function.graph  # the graph as it was traced: made anew from its definition it has lost shapes
                break
            graph = getattr(graph, "outer_graph", None)


def _trips(loop: tf.Operation) -> int:
    """How often a loop runs: its second input is the most that it may, forward and on the way back (-1: no limit)."""
    import tensorflow as tf

    limit = loop.inputs[1] if len(loop.inputs) > 1 else None
    while limit is not None and limit.op.type in ("Max", "Cast", "Identity"):  # Keras: the maximum of one constant
        limit = limit.op.inputs[0]
    value = None if limit is None else tf.get_static_value(limit)
    return int(value) if value is not None and value.ndim == 0 and value.dtype.kind == "i" and value > 0 else 1
