"""Attribution of operation times by data flow, compared with a naive traversal."""

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES, SIZE, ancestors, attribute_times, full_step, make_small_model, naive_needs
from small_networks import built_optimizer

from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.prefix import prefix_operations, split_step
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.graphs import needed_operations
from elastic_trainer.networks.tensors import head_mask, tensor_names
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
    counted = costs.forward_ms + costs.other_ms + costs.t_dw_ms.sum() + costs.t_dy_ms.sum()
    assert counted == pytest.approx(sum(op_ms.values())), "every operation is counted once"


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


def test_a_folded_pairs_gamma_knows_its_kernel():
    model = make_small_model()
    costs = attribute_times(full_step(model), model.trainable_variables, {})
    names = [tensor_names(model)[k] for k in costs.positions]
    gamma = names.index("stem_bn/gamma")
    assert names[costs.kernels[gamma]] == "stem/kernel"
    others = np.arange(len(names)) != gamma  # tail_bn reads a sum and is not folded
    assert (costs.kernels[others] == -1).all()


def test_features_take_the_room_of_what_passes_the_cut():
    model = make_small_model()
    costs = attribute_times(full_step(model), model.trainable_variables, {})
    optimizer, head = built_optimizer("sgd", model), int(head_mask(model).sum())
    compared = 0
    for depth in range(head + 1, len(costs.positions) + 1):
        mask = np.zeros(len(costs.positions), bool)
        mask[costs.positions[:depth]] = True
        split = split_step(TrainStep(ImageClassification(model), optimizer, BATCH, mask))
        if split is not None:  # else nothing but preprocessing is left
            features = split.prefix(np.zeros((BATCH, SIZE, SIZE, 3), np.float32))
            megabytes = sum(1e-6 * 4 * int(tf.size(value)) for value in features)
            assert costs.features_mb[depth - 1] == pytest.approx(megabytes)
            compared += 1
    assert compared >= 5 and len({*costs.features_mb}) >= 3


def test_clipping_counts_in_the_update_of_its_tensor_and_not_in_the_heads():
    model = make_small_model()
    head = np.flatnonzero(head_mask(model)).tolist()
    optimizer = make_optimizer("sgd", 0.1, 5e-4, 10, clipping=0.02, unclipped=head)
    optimizer.build(model.trainable_variables)
    step = TrainStep(ImageClassification(model), optimizer, BATCH)
    norms = {op.name: 1.0 for op in step.graph.get_operations() if op.type == "L2Loss"}
    costs = attribute_times(step, model.trainable_variables, norms)
    update_ms = dict(zip(costs.positions.tolist(), costs.update_ms, strict=True))  # of the gradient and of the weights
    assert update_ms == {k: 0.0 if k in head else 2.0 for k in range(len(update_ms))}


def test_tensor_without_gradient_comes_last_and_costs_nothing():
    model = make_small_model()
    lonely = model.add_weight(shape=(3,), name="lonely")
    index = next(k for k, v in enumerate(model.trainable_variables) if v is lonely)
    step = full_step(model)
    assert step.gradients[index] is None
    costs = attribute_times(step, model.trainable_variables, {op.name: 1.0 for op in step.graph.get_operations()})
    assert costs.positions[-1] == index
    assert costs.t_dy_ms[-1] == 0 and costs.t_dw_ms[-1] == 0


class Noise(keras.layers.Layer):
    """Adds numbers from TensorFlow's own generator, which no variable feeds."""

    def call(self, inputs):
        return inputs + tf.random.uniform(tf.shape(inputs))


def with_random_layers(input_shape, num_classes):
    """A mirroring and a noise layer, each on one of two branches, and one branch without."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Rescaling(1 / 255)(inputs)
    left = keras.layers.Conv2D(4, 1, name="left")(keras.layers.RandomFlip("horizontal", seed=0)(x))
    right = Noise()(keras.layers.Conv2D(4, 1, name="right")(x))
    plain = keras.layers.Conv2D(4, 1, name="plain", kernel_regularizer="l2")(x)
    x = keras.layers.Add()([keras.layers.Conv2D(4, 1, name="after")(right), left, plain])
    return keras.Model(inputs, keras.layers.Dense(num_classes)(keras.layers.GlobalAveragePooling2D()(x)))


def naive_forward_times(model, step, op_ms, positions):
    """t_fw_ms and preprocessing_ms, from the ancestors of each operation."""
    read = {id(outside): inside.op.name for outside, inside in step.graph.captures}
    of_tensor = [read.get(id(model.trainable_variables[k].value.handle)) for k in positions]
    never = {"targets"} | {read.get(id(v.value.handle)) for v in model.non_trainable_variables if "seed" in v.path}
    never |= {op.name for op in step.graph.get_operations() if op.type == "RandomUniform"}
    t_fw_ms, preprocessing_ms = np.zeros(len(positions)), 0.0
    for name in ancestors(step.loss.op, set()):
        needed = ancestors(step.graph.get_operation_by_name(name), set())
        first = next((rank for rank, tensor in enumerate(of_tensor) if tensor in needed), None)
        if needed & never or "inputs" not in needed:
            continue
        if first is not None:
            t_fw_ms[first] += op_ms[name]
        else:
            preprocessing_ms += op_ms[name]
    return t_fw_ms, preprocessing_ms


NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "small": make_small_model,
    "random layers": lambda: with_random_layers((SIZE, SIZE, 3), CLASSES),
    **{
        each.__name__: partial(each, (SIZE, SIZE, 3), CLASSES)
        for each in (zoo.branches, zoo.shared_weights, zoo.gru, zoo.attention, zoo.nested, zoo.without_gradient)
    },
}


@pytest.mark.parametrize("name", NETWORKS)
def test_forward_times_equal_a_naive_traversal(name):
    model = NETWORKS[name]()
    step = full_step(model)
    rng = np.random.default_rng(0)
    op_ms = {op.name: float(rng.exponential()) for op in step.graph.get_operations()}
    costs = attribute_times(step, model.trainable_variables, op_ms)
    t_fw_ms, preprocessing_ms = naive_forward_times(model, step, op_ms, costs.positions)
    np.testing.assert_allclose(costs.t_fw_ms, t_fw_ms)
    assert costs.preprocessing_ms == pytest.approx(preprocessing_ms) and preprocessing_ms > 0
    assert t_fw_ms.sum() + preprocessing_ms < costs.forward_ms  # constants at least belong to none


@pytest.mark.parametrize("name", NETWORKS)
def test_prefix_of_a_step_is_the_forward_operations_that_reach_no_deeper_tensor(name):
    """Steps that train all tensors down to some depth are cut where the full step's attribution says."""
    model = NETWORKS[name]()
    optimizer = built_optimizer("sgd", model)
    full = TrainStep(ImageClassification(model), optimizer, BATCH)
    attribution = attribute_times(full, model.trainable_variables, {})
    positions = attribution.positions
    for depth in (1, 2, len(positions) // 2, len(positions) - 1, len(positions)):
        mask = np.zeros(len(positions), bool)
        mask[positions[:depth]] = True
        step = TrainStep(ImageClassification(model), optimizer, BATCH, mask)
        frozen = attribution.in_preprocessing | (attribution.recomputed >= depth)
        expected = {name for name, is_frozen in zip(attribution.operations, frozen, strict=True) if is_frozen}
        assert prefix_operations(step) & needed_operations([step.loss]) == expected
