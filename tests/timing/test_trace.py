"""Traces of a CPU and of a GPU give operation times per iteration."""

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from traces import GRADIENT_MS, tx2_trace

from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.trace import match_op, read_op_times, read_trace


@pytest.mark.parametrize(
    ("event", "op"),
    [
        ("net/conv/Conv2D", "net/conv/Conv2D"),
        ("net/conv/Conv2D-0-0-TransposeNCHWToNHWC-LayoutOptimizer", "net/conv/Conv2D"),
        ("net/conv/Conv2D-0-TransposeNHWCToNCHW-LayoutOptimizer", "net/conv/Conv2D"),
        ("net/ArithmeticOptimizer/FoldTransposeIntoMatMul_mul", "net/mul"),
        ("net/rnn/while/body/_12/net/rnn/while/MatMul", "net/rnn/while"),
        ("elsewhere/MatMul", None),
    ],
)
def test_event_name_is_matched_to_its_operation(event, op):
    assert match_op(event, {"net/conv/Conv2D", "net/mul", "net/rnn/while"}) == op


def graph_of(*names):
    """A graph of operations with these names."""
    with tf.Graph().as_default() as graph:
        for name in names:
            tf.no_op(name=name)
    return graph


def key_of(metadata, name):
    key = next((k for k, m in metadata.items() if m.name == name), len(metadata) + 1)
    metadata[key].id = key
    metadata[key].name = name
    return key


def write_trace(path, lines, device=None):
    """An XSpace with one CPU plane; `lines` is a list of lists of (event name, milliseconds).

    `device`: line name -> list of (operation or None, step or None, milliseconds), the kernels of a GPU plane. Their
    operations are written in turn as a reference and as text, since real traces contain both.
    """
    space = xplane_pb2.XSpace()
    space.planes.add(name="/host:metadata")
    plane = space.planes.add(name="/host:CPU")
    for events in lines:
        line = plane.lines.add(name="thread")
        for name, ms in events:
            line.events.add(metadata_id=key_of(plane.event_metadata, name), duration_ps=round(ms * 1e9))
    plane = space.planes.add(name="/device:GPU:0")
    for name, kernels in (device or {}).items():
        line = plane.lines.add(name=name)
        for i, (op, step, ms) in enumerate(kernels):
            kernel = key_of(plane.event_metadata, op if op and not name.startswith("Stream") else "void kernel<float>")
            event = line.events.add(metadata_id=kernel, duration_ps=round(ms * 1e9))
            if op is not None:
                stat = event.stats.add(metadata_id=key_of(plane.stat_metadata, "tf_op"))
                if i % 2:
                    stat.str_value = op
                else:
                    stat.ref_value = key_of(plane.stat_metadata, op)
            if step is not None:
                event.stats.add(metadata_id=key_of(plane.stat_metadata, "group_id"), int64_value=step)
    path.write_bytes(space.SerializeToString())
    return path


def test_cpu_trace_gives_median_times_over_all_threads(tmp_path):
    path = write_trace(
        tmp_path / "t.xplane.pb",
        [
            [("a/Conv2D:Conv2D", 2.0), ("ExecutorState::Process", 50.0), ("a/Conv2D:Conv2D", 2.2)],
            [("a/Conv2D:Conv2D", 9.0), *[("b/while/MatMul:MatMul", 1.0)] * 4],
            [("b/while:While", 30.0), ("gone/Mul:Mul", 3.0), ("b/while/MatMul:MatMul", 1.0)] * 2,
        ],
    )
    times, unmatched = read_op_times(path, graph_of("a/Conv2D", "b/while"), steps=3)
    # One event a step: the median of 2.0, 2.2 and 9.0. Operations in a loop: six events in three steps. The event of
    # the loop is not counted.
    assert times == pytest.approx({"a/Conv2D": 2.2, "b/while": 2.0})
    assert unmatched == pytest.approx(3.0 / (2.2 + 2.0 + 3.0))


def test_fused_operation_stands_for_its_first_one(tmp_path):
    """Time of a convolution that ran with its bias, a residual and an activation is that of the convolution."""
    with tf.Graph().as_default() as graph:
        images, kernel = tf.zeros([1, 4, 4, 3]), tf.zeros([1, 1, 3, 3])
        before = tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME", name="a/Conv2D"), tf.zeros([3]), name="a/Bias")
        convolved = tf.nn.conv2d(before, kernel, 1, "SAME", name="b/Conv2D")
        tf.nn.relu(tf.add(before, tf.nn.bias_add(convolved, tf.zeros([3]), name="b/Bias"), name="b/Add"), name="b/Relu")
    events = [
        ("a/Bias:_MklNativeFusedConv2D", 3.0),
        ("b/Relu:_FusedConv2D", 2.0),
        ("b/Conv2D-0-TransposeNHWCToNCHW-LayoutOptimizer:Transpose", 0.5),
    ]
    times, unmatched = read_op_times(write_trace(tmp_path / "t.xplane.pb", [events]), graph, steps=1)
    assert times == pytest.approx({"a/Conv2D": 3.0, "b/Conv2D": 2.5})
    assert unmatched == pytest.approx(0)


def test_fused_operation_within_a_loop_stands_for_the_loop(tmp_path):
    with tf.Graph().as_default() as graph:
        product = tf.matmul(tf.zeros([2, 2]), tf.zeros([2, 2]), name="a/MatMul")
        tf.while_loop(lambda x: True, lambda x: x, [tf.nn.relu(product, name="a/Relu")], name="b/while")
    events = [("a/Relu:_FusedMatMul", 1.0), ("b/while/body/BiasAdd:_FusedMatMul", 3.0)]
    times, _ = read_op_times(write_trace(tmp_path / "t.xplane.pb", [events]), graph, steps=1)
    assert times == pytest.approx({"a/MatMul": 1.0, "b/while": 3.0})
    # Where the loop reads a product that was constant, nothing before it counts either.
    times, _ = read_op_times(write_trace(tmp_path / "t.xplane.pb", [events[1:]]), graph, steps=1)
    assert times == pytest.approx({"b/while": 3.0})


def test_gpu_trace_gives_kernel_times_of_complete_iterations(tmp_path):
    """Kernels of one operation add up. Those of none, events of the host, repeated lines and the incomplete step do not
    count."""
    kernels: list[tuple[str | None, int | None, float]] = []
    for step, slow in ((0, 30.0), (1, 3.0), (2, 3.2), (3, 2.8)):
        kernels += [("a/Conv2D:Conv2D", step, slow), ("a/Conv2D:Conv2D", step, 1.0), ("a/Relu:Relu", step, 0.5)]
        kernels += [(None, None, 0.2)]
    kernels.append(("a/Conv2D:Conv2D", 4, 3.0))
    path = write_trace(
        tmp_path / "t.xplane.pb",
        [[("a/Conv2D:Conv2D", 70.0)] * 4],
        {"Stream #13(Compute)": kernels, "TensorFlow Ops": [("a/Conv2D:Conv2D", 0, 99.0)]},
    )
    trace = read_trace(path)
    assert (trace.iterations, trace.planes) == (4, ("/device:GPU:0",))
    # The first use of a kernel is an outlier, because it tries several algorithms.
    assert trace.op_ms == pytest.approx({"a/Conv2D": 4.0, "a/Relu": 0.5})
    assert trace.types == {"a/Conv2D": "Conv2D", "a/Relu": "Relu"}
    times, unmatched = read_op_times(path, graph_of("a/Conv2D"), steps=4)
    assert times == pytest.approx({"a/Conv2D": 4.0})
    assert unmatched == pytest.approx(0.5 / 4.5)


def test_trace_without_step_numbers_counts_its_iterations(tmp_path):
    """Four iterations and the start of a fifth: the operations of the forward pass run once more."""
    events = [("f/Mul:Mul", 1.0)] * 5 + [("f/Add:Add", 1.0)] * 10
    events += [(f"g{i}/Mul:Mul", 2.0) for i in range(6)] * 4 + [("g/Add:Add", 1.0)] * 12
    trace = read_trace(write_trace(tmp_path / "t.xplane.pb", [events]))
    assert trace.iterations == 4
    expected = {"f/Mul": 1.0, "f/Add": 2.0, "g/Add": 3.0, **{f"g{i}/Mul": 2.0 for i in range(6)}}
    assert trace.op_ms == pytest.approx(expected)


def test_file_without_traced_steps_is_refused(tmp_path):
    path = tmp_path / "t.xplane.pb"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_trace(path)
    path.write_text("name,shape\n")
    with pytest.raises(UserError, match="not an XSpace"):
        read_trace(path)
    with pytest.raises(UserError, match="holds no operations"):
        read_trace(write_trace(path, [[("ExecutorState::Process", 1.0)]]))
    uneven = [(f"a{count}/Mul:Mul", 1.0) for count in (3, 7, 11, 16, 23) for _ in range(count)]
    with pytest.raises(UserError, match="the number of its steps is unclear"):
        read_trace(write_trace(path, [uneven]))


@pytest.mark.parametrize("name", GRADIENT_MS)
def test_jetson_tx2_traces_contain_four_iterations(name):
    trace = read_trace(tx2_trace(name))
    gradient_ms = sum(ms for op, ms in trace.op_ms.items() if op.startswith("gradient_tape/"))
    assert GRADIENT_MS[name] <= gradient_ms < trace.total_ms
    # Each trace has four iterations and a part of a fifth.
    assert trace.iterations == 4 and trace.planes == ("/device:GPU:0",)
