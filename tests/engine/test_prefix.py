"""Cutting a step in two: the parts compute what the step computes, and the prefix is all that can be kept."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES, SIZE, make_small_model
from small_networks import as_if_trained, built_optimizer, some_images, values

import models
from elastic_trainer.engine.prefix import SplitStep, prefix_operations, random_operation, split_step
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import CompiledTask, ImageClassification
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.timing.flops import count_flops

layers = keras.layers
NETWORKS = ["small", "branches", "shared_weights", "depthwise_and_grouped", "normalisations", "attention", "recurrent"]


def network(name):
    """A network without random numbers, so that two steps on the same weights agree."""
    keras.utils.set_random_seed(0)
    if name == "small":
        model = make_small_model()
        model.layers[-2].rate = 0  # dropout
    elif name == "recurrent":
        inputs = keras.Input((SIZE, SIZE, 3))
        x = layers.Reshape((SIZE, SIZE * 3))(inputs)
        x = layers.GRU(5)(layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x))
        model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    else:
        model = freeze_batch_norm(getattr(zoo, name)((SIZE, SIZE, 3), CLASSES))
    return as_if_trained(model)


def split_of(step) -> SplitStep:
    split = split_step(step)
    assert split is not None
    return split


def upper_part(model, share):
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[int(len(mask) * (1 - share)) :] = True
    return mask


def masks(model, count):
    """Upper parts, and random selections from them, of different depths."""
    rng = np.random.default_rng(0)
    for share in np.linspace(0.3, 0.9, count):
        mask = upper_part(model, share)
        yield mask
        scattered = mask & (rng.random(len(mask)) < 0.5)
        scattered[-1] = True
        yield scattered


def batch(seed=0):
    return tf.constant(some_images(SIZE, BATCH, seed)), tf.constant(np.arange(BATCH, dtype=np.int32) % CLASSES)


def changed_by(model, optimizer, run):
    """Copies of all variables after `run`; they are restored."""
    variables = [*model.variables, *optimizer.variables]
    before = values(variables)
    run()
    after = values(variables)
    for variable, old in zip(variables, before, strict=True):
        variable.assign(old)
    return after


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_from_features_changes_what_the_step_changes_bit_for_bit(name):
    """The prefix is all that depends on images and on no trained variable."""
    model = network(name)
    optimizer = built_optimizer("sgd", model)
    images, labels = batch()
    cuts = 0
    for mask in masks(model, 3):
        step = TrainStep(ImageClassification(model), optimizer, BATCH, mask)
        assert prefix_operations(step) == naive_prefix(step)
        split = split_step(step)
        if split is None:
            continue
        cuts += 1
        expected = changed_by(model, optimizer, lambda step=step: step(images, labels))
        got = changed_by(model, optimizer, lambda split=split: split(split.prefix(images), labels))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        before = values([*model.variables, *optimizer.variables])
        assert any((one != old).any() for one, old in zip(got, before, strict=True))
    assert cuts >= 2


def test_a_loop_behind_a_cut_has_as_many_flops_as_in_the_step():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Dense(8)(layers.Reshape((SIZE, SIZE * 3))(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GRU(5)(x)))
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, upper_part(model, 0.7))
    step_flops, graph = count_flops(step.graph), split_of(step).graph
    flops = count_flops(graph)
    loops = [op.name for op in graph.get_operations() if "While" in op.type]
    assert len(loops) >= 2
    assert all(flops[name] == step_flops[name] > SIZE * BATCH * 5 * 15 for name in loops)


def naive_prefix(step):
    """Names of the operations that depend on the images and on nothing that changes, each by all its ancestors."""
    graph = step.graph
    images, labels = graph.inputs[:2]
    trained = {id(variable.value.handle) for variable in step.variables}
    changing = {labels.op.name} | {inner.op.name for outer, inner in graph.captures if id(outer) in trained}
    bits = {op.name: 1 << place for place, op in enumerate(graph.get_operations())}
    inputs = {
        op.name: [*(tensor.op.name for tensor in op.inputs), *(each.name for each in op.control_inputs)]
        for op in graph.get_operations()
    }
    before, latest = dict(bits), dict[str, int]()  # of each operation, the bits of it and of all its ancestors
    while before != latest:
        latest = dict(before)
        for name, names in inputs.items():
            for each in names:
                before[name] |= before[each]
    bad = sum(bits[name] for name in changing)
    return {name for name, found in before.items() if found & bits[images.op.name] and not found & bad}


def test_the_prefix_of_a_deep_network_is_all_that_depends_on_images_and_on_no_trained_variable():
    model = models.build_model("mobilenetv2", 32, CLASSES)
    model.layers[-2].rate = 0
    optimizer = built_optimizer("sgd", model)
    for mask in masks(model, 2):
        step = TrainStep(ImageClassification(model), optimizer, BATCH, mask)
        assert prefix_operations(step) == naive_prefix(step)


def test_a_residual_network_has_two_cut_tensors_inside_a_block():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(4, 1)(inputs)
    inner = layers.Conv2D(4, 3, padding="same", name="inner")(layers.Conv2D(4, 1)(x))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(layers.Add()([x, inner]))))
    mask = np.array(["inner" in variable.path or "dense" in variable.path for variable in model.trainable_variables])
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, mask)
    assert len(split_of(step).dtypes) == 2


@pytest.mark.parametrize(("factor", "kernel", "count"), [(6, 1, 1), (1, 1, 2), (6, 3, 2)])
def test_an_expansion_is_computed_again_rather_than_kept(factor, kernel, count):
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    expanded = layers.ReLU(6)(layers.Conv2D(4 * factor, kernel, padding="same")(x))
    inner = layers.Conv2D(4, 1)(layers.DepthwiseConv2D(3, padding="same", name="inner")(expanded))
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(layers.Add()([x, inner])))
    model = keras.Model(inputs, outputs)
    mask = np.array(["inner" in variable.path or "dense" in variable.path for variable in model.trainable_variables])
    optimizer, (images, labels) = built_optimizer("sgd", model), batch()
    step = TrainStep(ImageClassification(model), optimizer, BATCH, mask)
    split = split_of(step)
    assert len(split.dtypes) == count
    expected = changed_by(model, optimizer, lambda: step(images, labels))
    got = changed_by(model, optimizer, lambda: split(split.prefix(images), labels))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_on_inputs_of_any_length_is_cut():
    inputs = keras.Input((None, 3))
    rows = layers.Conv1D(4, 3, padding="same")(layers.Conv1D(4, 1, name="frozen")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(rows)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    mask = np.array(["frozen/" not in variable.path for variable in model.trainable_variables])
    task = CompiledTask(model, tf.TensorSpec((BATCH, None, 3)), tf.TensorSpec((BATCH,), tf.int32))
    model.optimizer.build(model.trainable_variables)
    assert split_of(TrainStep(task, model.optimizer, BATCH, mask)).dtypes


def test_nothing_is_cut_where_all_tensors_train():
    model = make_small_model()
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH)
    assert split_step(step) is None and random_operation(step) is None


@pytest.mark.parametrize("name", ["small", "depthwise_and_grouped", "attention", "recurrent"])
def test_the_prefix_takes_any_number_of_images(name):
    """Also where a layer such as Flatten keeps the number in a shape."""
    model = network(name)
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[-2:] = True
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, mask)
    split = split_of(step)
    images = some_images(SIZE, 2 * BATCH + 3)
    together = [value.numpy() for value in split.prefix(tf.constant(images))]
    for start in (0, BATCH):
        alone = split.prefix(tf.constant(images[start : start + BATCH]))
        for value, one in zip(together, alone, strict=True):
            assert len(value) == len(images)
            np.testing.assert_array_equal(value[start : start + BATCH], one.numpy())


def test_features_below_a_recurrent_layer_have_a_row_for_each_image():
    """Its input is passed on as a list of time steps, which cannot be kept image by image."""
    model = network("recurrent")
    mask = np.array(["gru" in variable.path or "dense" in variable.path for variable in model.trainable_variables])
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, mask)
    features = split_of(step).prefix(tf.constant(some_images(SIZE, BATCH)))
    assert [value.numpy().shape for value in features] == [(BATCH, SIZE, 8)]


def test_a_random_operation_below_frozen_layers_ends_the_prefix_and_is_named():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(4, 1)(layers.RandomFlip(seed=1, name="shaken")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D()(x)))
    mask = np.array(["head" in variable.path for variable in model.trainable_variables])
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, mask)
    assert split_step(step) is None and "shaken" in str(random_operation(step))


def test_dropout_before_the_head_is_drawn_in_every_step():
    """It is part of the rest: two steps from the same features differ."""
    model = make_small_model()
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[-2:] = True
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model, rate=0.0), BATCH, mask)
    split = split_of(step)
    images, labels = batch()
    features = split.prefix(images)
    assert len({split(features, labels)[0] for _ in range(8)}) > 1
