"""Operation times from a trace: an XSpace file (`*.xplane.pb`) as tf.profiler writes it, of a CPU or a GPU.

On a CPU the events of the host plane are named "name:Type". On a GPU the host only launches kernels; their times are in
the device plane, with "name:Type" in their `tf_op` stat. The GPU reader is tested on four traces from a Jetson TX2
(TensorFlow 2.7). No GPU was available, so it is untested on a live trace of this TensorFlow.

TensorFlow's own table of operations is cut at 500 rows; here every event is read.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from elastic_trainer.networks.graphs import BRANCHES
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import reading

if TYPE_CHECKING:
    import tensorflow as tf

_OP_EVENT = re.compile(r"([^:]+):(\w+)")
_CALLS = {*BRANCHES, "Case"}  # left out: their time is that of their inner operations
_LAYOUT = re.compile(r"(-\d+)+-\w+-LayoutOptimizer$")
MAX_TRACE_MB = 500  # of a file; in memory it takes several times as much


def general_type(kind: str) -> str:
    """The type in the traced graph of an operation with a kernel `_Mkl…` of a CPU; of a fused one, that of its first.

    The graph optimizer names a convolution that it fuses with bias, residual and activation after the last of them.
    """
    return re.sub(r"^_(Mkl|Native|Fused)+", "", kind)


def strip_layout(name: str) -> str:
    """The operation that a transpose `op-0-Transpose…-LayoutOptimizer` of the graph optimizer was added for."""
    return _LAYOUT.sub("", name)


def match_op(event_name: str, known: Container[str]) -> str | None:
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
    """The operations of one trace, in ms per iteration (training step).

    Attributes:
        op_ms: by the operation's name in the executed graph.
        types: its type in the executed graph, by the same name.
        iterations: complete iterations that the times are taken from.
        planes: names of the planes that were read.
    """

    op_ms: dict[str, float]
    types: dict[str, str]
    iterations: int
    planes: tuple[str, ...]

    @property
    def total_ms(self) -> float:
        """All operation time of one iteration."""
        return sum(self.op_ms.values())


class _Event(NamedTuple):
    """One execution of an operation, or of one of its kernels."""

    name: str
    type: str
    step: int | None
    ms: float


def read_trace(path: Path, steps: int | None = None) -> OperationTrace:
    """Read one XSpace file: the kernels of its GPUs, or the operations of its CPU where there is no GPU.

    `steps` says how many equal steps it holds; None to find out from the trace.

    Raises:
        UserError: there is no such file, it is too large, is no XSpace, or holds no operations or an unclear number of
            steps.
    """
    from google.protobuf.message import DecodeError
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    with reading(path):
        megabytes = path.stat().st_size / 1e6
        if megabytes > MAX_TRACE_MB:
            raise ValueError(f"has {megabytes:,.0f} MB, and the limit is {MAX_TRACE_MB} MB; trace fewer steps")
        try:
            space.ParseFromString(path.read_bytes())
        except DecodeError as error:
            raise ValueError("not an XSpace; give a *.xplane.pb that tf.profiler wrote") from error
        for prefix, events_of in (("/device:GPU", _kernels), ("/host:CPU", _host_operations)):
            planes = [plane for plane in space.planes if plane.name.startswith(prefix)]
            events = [event for plane in planes for event in events_of(plane)]
            if events:
                return _per_iteration(events, steps, tuple(plane.name for plane in planes))
        raise ValueError("holds no operations; record it with tf.profiler while a step runs")


def is_operation(event_name: str) -> bool:
    """Whether an event of the CPU is an operation whose time is its own."""
    match = _OP_EVENT.fullmatch(event_name)
    return match is not None and match[2] not in _CALLS


def _host_operations(plane: Any) -> Iterator[_Event]:
    names = {key: metadata.name for key, metadata in plane.event_metadata.items() if is_operation(metadata.name)}
    for event in (event for line in plane.lines for event in line.events if event.metadata_id in names):
        name, _, kind = names[event.metadata_id].partition(":")
        yield _Event(name, kind, None, event.duration_ps / 1e9)


def _kernels(plane: Any) -> Iterator[_Event]:
    """Of the streams only: lines such as "TensorFlow Ops" and "Steps" repeat the same time."""
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
            if (match := _OP_EVENT.fullmatch(op)) is not None:  # others, as of cuDNN, take hardly any time
                yield _Event(match[1], match[2], step, event.duration_ps / 1e9)


def _per_iteration(events: list[_Event], steps: int | None, planes: tuple[str, ...]) -> OperationTrace:
    """The median execution of each operation, times how often an iteration runs it.

    Kernels of an operation in one step, if the trace says which, are one execution of it. The median is robust to
    disturbed iterations, and to the first, in which cuDNN tries out algorithms.
    """
    executions: dict[str, dict[object, float]] = defaultdict(lambda: defaultdict(float))
    for number, event in enumerate(events):
        executions[event.name][(number,) if event.step is None else event.step] += event.ms
    iterations = _count_iterations([*map(len, executions.values())]) if steps is None else steps
    op_ms = {
        name: statistics.median(each.values()) * max(len(each) // iterations, 1) for name, each in executions.items()
    }
    return OperationTrace(op_ms, {event.name: event.type for event in events}, iterations, planes)


def _count_iterations(counts: list[int]) -> int:
    """The number of complete iterations in a trace, from how often each operation occurs: nearly all run in each."""
    count = sorted(counts)[len(counts) // 10]
    # Some run several times in each. If a trace starts or ends inside an iteration, others run once more or less.
    fitting = sum(each % count == 0 or abs(each - count) == 1 for each in counts)
    if 2 * fitting < len(counts):
        raise ValueError("the number of its steps is unclear: its operations run unequally often")
    return count


def matched_operations(trace: OperationTrace, graph: tf.Graph) -> dict[str, str]:
    """The operation of `graph` that each operation of `trace` stands for, by name; without those that match none."""
    operations = {op.name: op for op in graph.get_operations()}
    matched = {name: op for name in trace.op_ms if (op := match_op(name, operations)) is not None}
    return {name: _first_fused(operations[op], trace.types[name], trace) for name, op in matched.items()}


def _first_fused(last: tf.Operation, kind: str, trace: OperationTrace) -> str:
    """The name of the first operation that one of type `kind` stands for: `last`, unless several were fused into it."""
    first_type, nearest_first = general_type(kind), [last]
    if first_type == kind or last.type in _CALLS:  # such a one stands for all that runs within it
        return last.name
    for op in nearest_first:
        if op.type == first_type:
            return op.name
        # What the trace has was not fused.
        nearest_first += [tensor.op for tensor in op.inputs if tensor.op.name not in trace.types]
    return last.name


def read_op_times(trace: Path, graph: tf.Graph, steps: int) -> tuple[dict[str, float], float]:
    """Milliseconds a step that each operation of the graph took, from an XSpace file of `steps` equal steps.

    With the share of all operation time (0…1) that matched no operation. Raises `UserError` as `read_trace`.
    """
    read = read_trace(trace, steps)
    times: dict[str, float] = defaultdict(float)
    for name, op in matched_operations(read, graph).items():
        times[op] += read.op_ms[name]
    return dict(times), 1 - sum(times.values()) / read.total_ms if read.total_ms else 0.0


def trace_step(run: Callable[[], object], steps: int, folder: Path) -> Path:
    """Trace `steps` calls of `run` into `folder` (as TensorBoard's profile page reads it); returns the XSpace file.

    Raises:
        UserError: another profiler is running, or TensorFlow wrote no trace.
    """
    import tensorflow as tf

    shutil.rmtree(folder / "plugins", ignore_errors=True)
    try:
        tf.profiler.experimental.start(str(folder))
    except tf.errors.AlreadyExistsError as error:
        raise UserError("another profiler is running, such as TensorBoard's; stop it, and profile again") from error
    try:
        for number in tqdm(range(steps), desc="tracing steps", unit="step"):
            with tf.profiler.experimental.Trace("step", step_num=number, _r=1):  # TensorBoard recognises steps by it
                run()
    finally:
        tf.profiler.experimental.stop()
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise UserError(f"--logdir {folder}: TensorFlow wrote no trace there; is the disk full?")
    return files[-1]
