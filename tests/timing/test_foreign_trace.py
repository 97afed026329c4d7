"""A trace from another board is matched to the network that is built here."""

import pytest
import record_trace_fixture as fixture
from conftest import attribute_times
from small_networks import built_optimizer

from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.graphs import needed_operations
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing import foreign_trace
from elastic_trainer.timing.trace import OperationTrace, read_trace


@pytest.fixture(scope="module")
def small():
    model = fixture.small_network()
    return model, fixture.full_step(model), read_trace(fixture.TARGET)


def test_committed_trace_matches_its_network(small):
    model, step, trace = small
    assert trace.iterations == fixture.STEPS and trace.planes == ("/host:CPU",)
    op_ms, unmatched_ms = foreign_trace.match_operations(trace, step, model)
    assert sum(op_ms.values()) + unmatched_ms == pytest.approx(trace.total_ms)
    assert unmatched_ms < 0.02 * trace.total_ms
    costs = attribute_times(step, model.trainable_variables, op_ms)
    assert (
        costs.forward_ms > 0 and costs.t_dy_ms.sum() > 0 and (costs.t_dw_ms > 0).all() and (costs.update_ms > 0).all()
    )


def test_trace_of_a_program_that_does_not_fold_batch_norm_is_recognised(small):
    model, step, trace = small
    folded = TrainStep(ImageClassification(model), built_optimizer("sgd", model), fixture.BATCH)
    assert foreign_trace.has_folded_batch_norm(trace, step)
    assert not foreign_trace.has_folded_batch_norm(trace, folded)
    without_norm = OperationTrace({"head_1/MatMul": 1.0}, {"head_1/MatMul": "MatMul"}, 1, ())
    assert foreign_trace.has_folded_batch_norm(without_norm, folded)


def keras2_name(name):
    """The name that Keras 2 would give to an operation of the small network."""
    for ours, theirs in (("small_classifier_1", "model"), ("head_1", "dense"), ("_1/", "/"), ("convolution", "Conv2D")):
        name = name.replace(ours, theirs)
    return name


def test_keras_2_names_match_by_layer_direction_and_kind(small):
    model, step, _ = small
    executed = needed_operations([*step.graph.outputs, *step.graph.control_outputs])
    wanted = {op.name: op for op in step.graph.get_operations() if op.name in executed and op.type in MATCHED_TYPES}
    assert {op.type for op in wanted.values()} == MATCHED_TYPES
    trace = OperationTrace(
        {keras2_name(name): 1.0 + i for i, name in enumerate(wanted)},
        {keras2_name(name): op.type for name, op in wanted.items()},
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


def test_rewritten_operations_match_their_origin(small):
    model, step, _ = small
    cases = {
        # (event, its type): the operations that its time is given to
        ("model/tail/Relu", "_FusedConv2D"): {"tail_1/convolution"},
        ("model/stem_bn/FusedBatchNormV3", "_FusedBatchNormEx"): {"stem_bn_1/FusedBatchNormV3"},
        ("gradient_tape/model/tail/Conv2D/Conv2DBackpropFilter-2-TransposeNHWCToNCHW-LayoutOptimizer", "Transpose"): {
            "tail_1/convolution/Conv2DBackpropFilter"
        },
        ("gradient_tape/model/pool/truediv", "Mul"): {"pool_1/truediv"},
    }
    fill = {"model/stem/Conv2D": 100.0}  # a trace is refused unless most of its time matches
    for (name, kind), expected in cases.items():
        types = {name: kind, "model/stem/Conv2D": "Conv2D"}
        op_ms, unmatched = foreign_trace.match_operations(
            OperationTrace({name: 1.0, **fill}, types, 1, ()), step, model
        )
        taken = {op for op, ms in op_ms.items() if ms and not op.endswith("stem_1/convolution")}
        assert unmatched == 0
        assert {op.partition("small_classifier_1/")[2] for op in taken} == expected, name
    lost = {"model/elsewhere/Conv2D": 7.0, "gradient_tape/model/elsewhere/Softplus": 2.0, **fill}
    kinds = dict.fromkeys(lost, "Conv2D") | {"gradient_tape/model/elsewhere/Softplus": "Softplus"}
    _, unmatched = foreign_trace.match_operations(OperationTrace(lost, kinds, 1, ()), step, model)
    assert unmatched == pytest.approx(9.0)


def test_trace_of_another_network_is_refused(small):
    model, step, _ = small
    types = {
        op.name.replace("stem", "first").replace("tail", "second").replace("small_classifier", "other"): op.type
        for op in step.graph.get_operations()
        if op.type in MATCHED_TYPES
    }
    foreign = {name: 10.0 if "Conv2D" in kind else 1.0 for name, kind in types.items()}
    trace = OperationTrace(foreign, types, 1, ())
    with pytest.raises(
        UserError, match=r"--from_trace: .* of its time matches no operation of small; give the --model_"
    ):
        foreign_trace.match_operations(trace, step, model)
