"""Operation times: traces of a CPU and a GPU, their iterations, counted FLOPs, and a board's trace on this network."""

import csv
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import record_trace_fixture as fixture
import tensorflow as tf
from conftest import make_small_model, make_table
from tensorflow.python.framework import ops
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  # fills TensorFlow's own registry
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import models
import profiler
from elastic_trainer.cli.commands import parse_profiler
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.reader import latest_importance
from elastic_trainer.selection.plan import plan_lines
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing import foreign_trace
from elastic_trainer.timing.attribution import attribute_times
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.flops import contraction_flops, count_flops, needed_operations
from elastic_trainer.timing.table import TimingTable, load_table, table_folder, table_settings
from elastic_trainer.timing.trace import OperationTrace, is_operation, match_op, read_op_times, read_trace
from utils import UserError

TX2 = Path(__file__).resolve().parents[3] / "shared" / "traces" / "jetson_tx2"
# Per iteration, of the operations under `gradient_tape`: what each network takes at least.
GRADIENT_MS = {"resnet50": 293.5, "mobilenetv2": 144.6, "vit": 628.4, "vgg16": 444.0}


def tx2_trace(name):
    path = TX2 / f"{name}.xplane.pb"
    if not path.is_file():
        pytest.skip("../shared/traces is not here")
    return path


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
def test_match_op(event, op):
    assert match_op(event, {"net/conv/Conv2D", "net/mul", "net/rnn/while"}) == op


# --- traces -----------------------------------------------------------------------------------------------------------


def key_of(metadata, name):
    key = next((k for k, m in metadata.items() if m.name == name), len(metadata) + 1)
    metadata[key].id = key
    metadata[key].name = name
    return key


def write_trace(path, lines, device=None):
    """An XSpace with one CPU plane; `lines` is a list of lists of (event name, milliseconds).

    `device`: line name -> list of (operation or None, step or None, milliseconds), the kernels of a GPU plane. Every
    other operation is referred to, the others are written out, as both occur.
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


def test_a_trace_is_read_event_by_event_over_all_threads(tmp_path):
    path = write_trace(
        tmp_path / "t.xplane.pb",
        [
            [("a/Conv2D:Conv2D", 2.0), ("ExecutorState::Process", 50.0), ("a/Conv2D:Conv2D", 2.2)],
            [("a/Conv2D:Conv2D", 9.0), ("b/while/MatMul:MatMul", 1.0), ("b/while/MatMul:MatMul", 1.0)],
            [("b/while:While", 30.0), ("gone/Mul:Mul", 3.0), ("b/while/MatMul:MatMul", 1.0)] * 2,
        ],
    )
    times, unmatched = read_op_times(path, {"a/Conv2D", "b/while"}, steps=3)
    # Once a step: the median of 2.0, 2.2 and 9.0. A loop's inner operations: four in three steps. The loop itself: not.
    assert times == pytest.approx({"a/Conv2D": 2.2, "b/while": 4 / 3})
    assert unmatched == pytest.approx(2.0 / (2.2 + 4 / 3 + 2.0))


def test_a_gpu_is_read_by_its_kernels_over_whole_iterations(tmp_path):
    """Two kernels of one operation add up; the host's events, repeated lines and the step cut off do not count."""
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
    # The first use of a kernel, which tries out algorithms, is an outlier.
    assert trace.op_ms == pytest.approx({"a/Conv2D": 4.0, "a/Relu": 0.5})
    assert trace.types == {"a/Conv2D": "Conv2D", "a/Relu": "Relu"}
    whole, everything = 9.0 + 4.0 + 2.0 + 30.0, 9.0 + 4.0 + 2.0 + 30.0 + 3.0
    assert trace.unnamed_ms == pytest.approx(4 * 0.2 * whole / everything / 4)
    times, unmatched = read_op_times(path, {"a/Conv2D"}, steps=4)
    assert times["a/Conv2D"] == pytest.approx((whole - 2.0 + 3.0) / 4)
    assert unmatched == pytest.approx(0.7 / (0.7 + times["a/Conv2D"]))


def test_iterations_are_counted_where_events_name_no_step(tmp_path):
    """Four iterations and the beginning of a fifth: operations of the forward pass run once more."""
    events = [("f/Mul:Mul", 1.0)] * 5 + [("f/Add:Add", 1.0)] * 10
    events += [(f"g{i}/Mul:Mul", 2.0) for i in range(6)] * 4 + [("g/Add:Add", 1.0)] * 12
    trace = read_trace(write_trace(tmp_path / "t.xplane.pb", [events]))
    assert trace.iterations == 4
    expected = {"f/Mul": 1.0, "f/Add": 2.0, "g/Add": 3.0, **{f"g{i}/Mul": 2.0 for i in range(6)}}
    assert trace.op_ms == pytest.approx(expected)


def test_a_file_that_is_no_trace_of_steps_is_refused(tmp_path):
    path = tmp_path / "t.xplane.pb"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_trace(path)
    path.write_text("name,shape\n")
    with pytest.raises(UserError, match="not an XSpace"):
        read_trace(path)
    with pytest.raises(UserError, match="holds no operations"):
        read_trace(write_trace(path, [[("ExecutorState::Process", 1.0)]]))
    uneven = [(f"a{count}/Mul:Mul", 1.0) for count in (3, 7, 11, 16, 23) for _ in range(count)]
    with pytest.raises(UserError, match="how many steps it holds cannot be told"):
        read_trace(write_trace(path, [uneven]))


@pytest.mark.parametrize("name", GRADIENT_MS)
def test_traces_of_a_jetson_tx2(name):
    trace = read_trace(tx2_trace(name))
    gradient_ms = sum(ms for op, ms in trace.op_ms.items() if op.startswith("gradient_tape/"))
    assert GRADIENT_MS[name] <= gradient_ms < trace.total_ms
    # Each holds four iterations and what was recorded of a fifth.
    assert trace.iterations == 4 and trace.planes == ("/device:GPU:0",)
    assert trace.unnamed_ms < 0.005 * trace.total_ms


# --- the committed trace ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    model = fixture.small_network()
    return model, fixture.full_step(model), read_trace(fixture.TARGET)


def test_the_committed_trace_is_small_and_says_nothing_of_its_machine():
    assert fixture.TARGET.stat().st_size < 60_000
    space = xplane_pb2.XSpace()
    space.ParseFromString(fixture.TARGET.read_bytes())
    assert not space.hostnames and [plane.name for plane in space.planes] == ["/host:CPU"]
    assert all(is_operation(m.name) for p in space.planes for m in p.event_metadata.values())


def test_the_committed_trace_is_read_and_matches_its_network(small):
    model, step, trace = small
    assert trace.iterations == fixture.STEPS and trace.planes == ("/host:CPU",)
    op_ms, unmatched_ms = foreign_trace.match_operations(trace, step, model)
    assert sum(op_ms.values()) + unmatched_ms == pytest.approx(trace.total_ms)
    assert unmatched_ms < 0.02 * trace.total_ms
    costs = attribute_times(step, model.trainable_variables, op_ms)
    assert (
        costs.forward_ms > 0 and costs.t_dy_ms.sum() > 0 and (costs.t_dw_ms > 0).all() and (costs.update_ms > 0).all()
    )


# --- counted FLOPs ----------------------------------------------------------------------------------------------------


def graph_of(function, *shapes):
    return tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph


@pytest.mark.parametrize(
    # Keras' ResNet50 halves the size in a block's first 1×1 convolution: 3.86. The 4.1 often quoted is of the variant
    # that does so in the 3×3 (test below).
    ("name", "gmacs"),
    [("resnet50", 3.86), ("mobilenetv2", 0.30), ("vgg16", 15.5), ("vit", 17.6)],
)
def test_flops_of_a_forward_pass_are_those_of_the_literature(name, gmacs):
    model = models.build_model(name, 224, 1000, "none")
    graph = graph_of(lambda images: model(images, training=True), (1, 224, 224, 3))
    counted = sum(contraction_flops(op) or 0 for op in graph.get_operations()) / 2e9
    assert counted == pytest.approx(gmacs, rel=0.03)
    if name == "resnet50":
        # There the first convolution of three blocks still has twice the height and width.
        later = sum(depth * out * (size**2 - (size // 2) ** 2) for depth, out, size in RESNET50_HALVING) / 1e9
        assert counted + later == pytest.approx(4.1, rel=0.03)
    total = sum(count_flops(graph).values()) / 2e9
    assert counted < total < 1.1 * counted


# Depth of what that convolution reads and of what it writes, and the size before it is halved.
RESNET50_HALVING = ((256, 128, 56), (512, 256, 28), (1024, 512, 14))


def test_contractions_agree_with_those_tensorflow_counts_itself():
    kernel, depthwise, weights = (tf.Variable(tf.ones(shape)) for shape in ((3, 3, 8, 6), (3, 3, 6, 2), (12, 5)))

    def gradients(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            x = tf.nn.conv2d(images, kernel, 2, "SAME")
            x = tf.nn.depthwise_conv2d(x, depthwise, (1, 1, 1, 1), "SAME")
            x = tf.reshape(x, (2, -1, 12)) @ weights
            x = tf.einsum("bij,bkj->bik", x, x)
            x = tf.matmul(x, x, transpose_a=True)
            loss = tf.reduce_sum(tf.reshape(x, (32, 16)) @ tf.reshape(x, (16, 32)))
        return tape.gradient(loss, [images, kernel, depthwise, weights])

    graph = graph_of(gradients, (2, 8, 8, 8))
    own: dict[str, float] = {}
    both, seen, products = 0, set(), set()
    for op in graph.get_operations():
        flops = contraction_flops(op)
        if flops is None:
            continue
        seen.add(op.type)
        own.setdefault(op.type, flops)
        registered = ops.get_stats_for_node_def(graph, op.node_def, "flops").value
        transposed = op.type == "BatchMatMulV2" and (op.get_attr("adj_x") or op.get_attr("adj_y"))
        if transposed:  # TensorFlow sums over the wrong axis; [16, 12]ᵀ[16, 5] and [16, 16]ᵀ[16, 16], two of each
            products.add(flops)
        elif registered is not None:
            both += 1
            assert flops == registered, op.type
    assert both >= 6
    assert products == {2 * 2 * 12 * 5 * 16, 2 * 2 * 16**3}
    # What TensorFlow does not count: the gradients of a convolution cost what it costs itself.
    assert own["DepthwiseConv2dNativeBackpropInput"] == own["DepthwiseConv2dNative"] == 2 * 3 * 3 * (2 * 4 * 4 * 12)
    assert own["DepthwiseConv2dNativeBackpropFilter"] == own["DepthwiseConv2dNative"]
    assert own["Conv2DBackpropInput"] == own["Conv2DBackpropFilter"] == own["Conv2D"]
    assert own["Einsum"] == 2 * 2 * 16 * 16 * 5
    assert seen >= {"Conv2D", "MatMul", "BatchMatMulV2", "Einsum"}


def test_einsum_with_an_ellipsis():
    left, right = tf.ones((3, 4, 5, 6)), tf.ones((6, 7))
    graph = graph_of(lambda x: tf.raw_ops.Einsum(inputs=[x, right], equation="...ij,jk->...ik"), left.shape)
    (op,) = (op for op in graph.get_operations() if op.type == "Einsum")
    assert contraction_flops(op) == 2 * 3 * 4 * 5 * 6 * 7


def test_other_operations_cost_an_element_read_or_written_and_dead_ones_nothing():
    def function(x):
        unused = x @ tf.transpose(x)
        return tf.reshape(x + x, (-1,)), tf.stop_gradient(unused)[:0]

    counted = {}
    graph = graph_of(lambda x: function(x)[0], (4, 5))
    for op in graph.get_operations():
        counted[op.type] = count_flops(graph)[op.name]
    assert counted["AddV2"] == 3 * 20 and counted["Reshape"] == 0
    assert counted["MatMul"] == 0, "nothing needs it, so TensorFlow never runs it"


@pytest.mark.parametrize("layer", [keras.layers.GRU, keras.layers.LSTM])
def test_loops_count_as_often_as_they_run_forward_and_back(layer):
    def loops(length):
        model = keras.Sequential([keras.Input((length, 6)), layer(8)])
        weights = [variable.value for variable in model.trainable_variables]

        def gradients(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, weights)

        graph = graph_of(gradients, (2, length, 6))
        flops = count_flops(graph)
        return [flops[op.name] for op in graph.get_operations() if "While" in op.type]

    forward, backward = loops(5)
    # At least the product of 2 states [8] with all gates' weights, each of five times; two such going back.
    gates = {keras.layers.GRU: 3, keras.layers.LSTM: 4}[layer]
    assert forward > 5 * 2 * 2 * 8 * gates * 8 and backward > 2 * 5 * 2 * 2 * 8 * gates * 8
    assert loops(10) == pytest.approx([2 * forward, 2 * backward], rel=0.02)


def test_a_table_of_flops_adds_up_to_the_measured_step(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_ROUNDS", 8)
    model = make_small_model()
    network = NetworkSettings("mobilenetv2", input_size=8, batch_size=4, optimizer="sgd")
    table = profiler.profile(model, network, tmp_path, timing="flops")
    assert table.details["timing"] == "flops" and table.details["unmatched_time_percent"] == 0
    assert not list(tmp_path.iterdir()), "nothing was traced"
    sums = table.details["operation_ms"]
    assert sum(sums.values()) == pytest.approx(table.full_step_ms)
    assert table.t_dw_ms.sum() > 0 and table.t_dy_ms.sum() > 0 and table.fit.selections > 5


# --- a board's trace --------------------------------------------------------------------------------------------------


def keras2_name(name):
    """A trace's name of an operation of the small fixture, as Keras 2 would have written it."""
    for ours, theirs in (("small_classifier_1", "model"), ("head_1", "dense"), ("_1/", "/"), ("convolution", "Conv2D")):
        name = name.replace(ours, theirs)
    return name


def test_operations_are_found_by_layer_direction_and_kind(small):
    model, step, _ = small
    executed = needed_operations([*step.graph.outputs, *step.graph.control_outputs])
    wanted = {op.name: op for op in step.graph.get_operations() if op.name in executed and op.type in MATCHED_TYPES}
    assert {op.type for op in wanted.values()} == MATCHED_TYPES
    trace = OperationTrace(
        {keras2_name(name): 1.0 + i for i, name in enumerate(wanted)},
        {keras2_name(name): op.type for name, op in wanted.items()},
        0.0,
        1,
        (),
    )
    assert not {name.split("/")[0] for name in trace.op_ms} & {"small_classifier_1"}
    op_ms, unmatched_ms = foreign_trace.match_operations(trace, step, model)
    assert unmatched_ms == 0
    assert op_ms == pytest.approx({name: 1.0 + i for i, name in enumerate(wanted)})


MATCHED_TYPES = {
    *("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "BiasAdd", "BiasAddGrad", "MatMul"),
    *("FusedBatchNormV3", "FusedBatchNormGradV3", "Relu", "ReluGrad"),
}


def test_rewritten_operations_and_augmentation_find_their_place(small):
    model, step, _ = small
    cases = {
        # event, its type: the operations here that take its time
        ("model/tail/Relu", "_FusedConv2D"): {"tail_1/convolution"},
        ("model/stem_bn/FusedBatchNormV3", "_FusedBatchNormEx"): {"stem_bn_1/FusedBatchNormV3"},
        ("gradient_tape/model/tail/Conv2D/Conv2DBackpropFilter-2-TransposeNHWCToNCHW-LayoutOptimizer", "Transpose"): {
            "tail_1/convolution/Conv2DBackpropFilter"
        },
        ("gradient_tape/model/pool/truediv", "Mul"): {"pool_1/truediv"},
    }
    fill = {"model/stem/Conv2D": 100.0}  # most of the time must match for a trace to be this network's
    for (name, kind), expected in cases.items():
        types = {name: kind, "model/stem/Conv2D": "Conv2D"}
        op_ms, unmatched = foreign_trace.match_operations(
            OperationTrace({name: 1.0, **fill}, types, 0.0, 1, ()), step, model
        )
        taken = {op for op, ms in op_ms.items() if ms and not op.endswith("stem_1/convolution")}
        assert unmatched == 0
        assert {op.partition("small_classifier_1/")[2] for op in taken} == expected, name
    lost = {"model/elsewhere/Conv2D": 7.0, "gradient_tape/model/elsewhere/Softplus": 2.0, **fill}
    kinds = dict.fromkeys(lost, "Conv2D") | {"gradient_tape/model/elsewhere/Softplus": "Softplus"}
    _, unmatched = foreign_trace.match_operations(OperationTrace(lost, kinds, 0.5, 1, ()), step, model)
    assert unmatched == pytest.approx(9.5)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("model/dense/MatMul", ["head", "MatMul"]),
        ("gradient_tape/model/vit-b16/head/MatMul_1", ["head", "MatMul_1"]),
        ("model/dense_1/MatMul", ["dense_1", "MatMul"]),  # a layer of that very name is here
        ("model/block/Dense_0/Tensordot/MatMul", ["block", "Dense_0", "Tensordot", "MatMul"]),
        ("model/random_flip/Cast_1/_2", ["random_flip", "Cast_1"]),
        ("AddN_3", ["AddN_3"]),
    ],
)
def test_where_a_traced_operation_stands(name, path):
    assert foreign_trace._their_path(name, {"dense_1", "block", "Dense_0"}) == path


def test_a_trace_of_another_network_is_refused(small):
    model, step, _ = small
    types = {
        op.name.replace("stem", "first").replace("tail", "second").replace("small_classifier", "other"): op.type
        for op in step.graph.get_operations()
        if op.type in MATCHED_TYPES
    }
    foreign = {name: 10.0 if "Conv2D" in kind else 1.0 for name, kind in types.items()}
    trace = OperationTrace(foreign, types, 0.0, 1, ())
    with pytest.raises(
        UserError, match=r"--from_trace: .* of its time matches no operation of small; give the --model_"
    ):
        foreign_trace.match_operations(trace, step, model)


@pytest.mark.parametrize("name", GRADIENT_MS)
def test_a_tx2_trace_becomes_a_table(name):
    trace = read_trace(tx2_trace(name))
    model = models.build_model(name, 224, 200, "none")
    network = NetworkSettings(name, batch_size=4, optimizer="sgd")
    table = profiler.table_of_trace(model, network, trace, f"{name}.xplane.pb")
    assert table.details["unmatched_time_percent"] < 2
    assert table.full_step_ms == pytest.approx(trace.total_ms)
    assert table.predict_ms(np.ones(len(table.names), bool)) == pytest.approx(table.full_step_ms)
    gradient_ms = float(table.t_dw_ms.sum() + table.t_dy_ms.sum())
    assert gradient_ms >= GRADIENT_MS[name] and table.details["operation_ms"]["updates"] == 0
    smallest = table.predict_ms(head_mask(model)) / table.full_step_ms
    assert 0.2 < smallest < 0.45


def test_the_table_of_a_trace_is_kept_apart_and_read_back(tmp_path, small_model):
    network = NetworkSettings("resnet50", input_size=8, num_classes=3, batch_size=4, augment="none", weights="none")
    own = table_folder(network, tmp_path)
    folder = table_folder(network, tmp_path, Path("far") / "tx2.xplane.pb")
    assert folder == own.with_name(own.name + "_from_tx2")
    table = make_table(small_model)
    table.settings.update(table_settings(network))
    table.details["trace"] = "tx2.xplane.pb"  # of another machine, and not refused for that
    unknown = Fit(2.0, 1.0, 1.0, None, None, 0, 0)
    TimingTable(**{**vars(table), "fit": unknown}).save(folder)
    shapes = [tuple(variable.shape) for variable in small_model.trainable_variables]
    assert load_table(folder, network, tensor_names(small_model), shapes, "profiler.py").fit == unknown


def test_the_plan_keeps_to_each_rho_and_says_what_is_infeasible(small_model):
    head = head_mask(small_model)
    table = make_table(small_model, constant_ms=20.0)
    lines = list(plan_lines(table, head, np.ones(len(head))))
    assert len(lines) == 1 + 8
    smallest = table.predict_ms(head) / table.full_step_ms
    for line in lines[1:]:
        rho, feasible, *rest = line.split()
        assert feasible == ("yes" if float(rho) >= smallest else "no")
        if rest:
            assert float(rest[2]) <= float(rho) and int(rest[3]) >= head.sum()
    assert {line.split()[1] for line in lines[1:]} == {"yes", "no"}


def test_a_runs_importance_is_used_where_it_is_of_this_network(tmp_path):
    assert latest_importance(tmp_path, ["a", "b"]) is None
    for run, rows in (
        ("elastic", [("a", 0.1), ("b", 0.2), ("a", 0.5), ("b", 1.0)]),
        ("other", [("c", 1.0), ("d", 1.0)]),
    ):
        (tmp_path / run).mkdir()
        with (tmp_path / run / "selections.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("name", "importance"), *rows])
    found = latest_importance(tmp_path, ["a", "b"])
    assert found is not None
    importance, source = found
    assert importance.tolist() == [0.5, 1.0] and source.parent.name == "elastic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timing", "flop"], "--timing: 'flop' is not one of trace, flops; did you mean 'flops'"),
        (["--from_trace", "no/such.xplane.pb"], "--from_trace no/such.xplane.pb: no such file"),
        (["--from_trace", __file__, "--timing", "flops"], "--timing flops: --from_trace takes the times of its file"),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(UserError) as caught:
        parse_profiler(arguments)
    assert str(caught.value).startswith(message)
    with pytest.raises(UserError, match=r"is a flag of profiler\.py, not of main\.py"):
        parse_main(arguments)


def test_planning_from_a_trace_on_the_command_line(tmp_path, monkeypatch, capsys):
    """The fixture's own network in the place of ResNet50: everything else as a user runs it."""
    monkeypatch.setattr(models, "build_model", lambda *_: fixture.small_network())
    words = ["profiler.py", "--from_trace", str(fixture.TARGET), "--model_name", "resnet50", "--batch_size", "4"]
    monkeypatch.setattr("sys.argv", [*words, "--num_classes", "3", "--input_size", "16", "--logdir", str(tmp_path)])
    profiler.main()
    printed = capsys.readouterr().out
    assert "small_step.xplane.pb: 3 whole iterations on /host:CPU" in printed
    assert "not measured" in printed and "smallest feasible rho" in printed and "equal importance" in printed
    folder = tmp_path / "profiles" / "resnet50_16_3_4_from_small_step"
    profile = json.loads((folder / "profile.json").read_text())
    assert (profile["trace"], profile["traced_steps"], profile["planes"]) == ("small_step.xplane.pb", 3, ["/host:CPU"])
    assert str(fixture.TARGET.parent) not in (folder / "profile.json").read_text()
    assert profile["fit"]["median_error_percent"] is None and profile["unmatched_time_percent"] < 2
    assert (folder / "timing.png").is_file() and (folder / "table.csv").is_file()
