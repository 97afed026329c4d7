"""Attribution of operation times by data flow, compared with a naive traversal."""

import numpy as np
import pytest
from conftest import full_step, make_small_model, naive_needs

from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.timing.attribution import attribute_times
from elastic_trainer.timing.fit import selection_sums


@pytest.fixture(scope="module")
def attributed():
    """The small network, its step, random operation times, and their attribution."""
    model = make_small_model()
    step = full_step(model)
    rng = np.random.default_rng(0)
    op_ms = {op.name: float(rng.exponential()) for op in step.graph.get_operations()}
    return model, step, op_ms, attribute_times(step, model.trainable_variables, op_ms)


def test_attribution_equals_a_naive_traversal_of_the_data_flow(attributed):
    _, step, op_ms, costs = attributed
    forward, needs = naive_needs(step)
    count = len(needs)
    chain = [sum(name in set().union(*needs[:k], *needs[k + 1 :]) for name in needs[k]) for k in range(count)]
    order = sorted(range(count), key=lambda k: (chain[k], len(needs[k]), -k))
    assert costs.positions.tolist() == order
    assert costs.forward_ms == pytest.approx(sum(op_ms[name] for name in forward))
    seen: set[str] = set()
    for rank, k in enumerate(order):
        others = set().union(*(needs[j] for j in range(count) if j != k))
        exclusive = needs[k] - others
        shared = (needs[k] & others) - seen
        seen |= shared
        gradient_ms = costs.t_dw_ms[rank] - costs.update_ms[rank]
        assert gradient_ms == pytest.approx(sum(op_ms[name] for name in exclusive))
        assert costs.t_dy_ms[rank] == pytest.approx(sum(op_ms[name] for name in shared))


def test_every_operation_is_counted_once(attributed):
    _, _, op_ms, costs = attributed
    counted = costs.forward_ms + costs.other_ms + costs.t_dw_ms.sum() + costs.t_dy_ms.sum()
    assert counted == pytest.approx(sum(op_ms.values()))


def test_selection_sum_is_at_least_the_operations_it_needs(attributed):
    _, step, op_ms, costs = attributed
    _, needs = naive_needs(step)
    rng = np.random.default_rng(1)
    gradient_ms = costs.t_dw_ms - costs.update_ms
    for _ in range(300):
        selected = rng.random(len(needs)) < rng.random()
        union = set().union(*(needs[costs.positions[k]] for k in np.flatnonzero(selected)))
        t_dy_ms, t_dw_ms = selection_sums(selected, costs.t_dy_ms, gradient_ms)
        assert t_dy_ms + t_dw_ms >= sum(op_ms[name] for name in union) - 1e-9


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "ResourceApplyKerasMomentum"), ("adam", "ResourceApplyAdam")])
def test_each_update_is_attributed_to_its_tensor(optimizer, kind):
    model = make_small_model()
    step = full_step(model, optimizer)
    operations = step.graph.get_operations()
    updates = {op.name: 1.0 for op in operations if op.type == kind}
    assert len(updates) == len(model.trainable_variables)
    costs = attribute_times(step, model.trainable_variables, updates)
    np.testing.assert_array_equal(costs.update_ms, 1.0)
    if optimizer == "sgd":  # weight decay is part of the update
        decay = {op.name: 1.0 for op in operations if op.type == "AssignSubVariableOp"}
        costs = attribute_times(step, model.trainable_variables, decay)
        np.testing.assert_array_equal(costs.update_ms, 1.0)


def test_tensors_are_ordered_from_the_output(attributed):
    model, _, _, costs = attributed
    names = [tensor_names(model)[k] for k in costs.positions]
    assert set(names[:2]) == {"head/kernel", "head/bias"}
    assert {name.partition("/")[0] for name in names[-3:]} == {"stem", "stem_bn"}


def test_tensor_without_gradient_comes_last_and_costs_nothing():
    model = make_small_model()
    lonely = model.add_weight(shape=(3,), name="lonely")
    index = next(k for k, v in enumerate(model.trainable_variables) if v is lonely)
    step = full_step(model)
    assert step.gradients[index] is None
    costs = attribute_times(step, model.trainable_variables, {op.name: 1.0 for op in step.graph.get_operations()})
    assert costs.positions[-1] == index
    assert costs.t_dy_ms[-1] == 0 and costs.t_dw_ms[-1] == 0
