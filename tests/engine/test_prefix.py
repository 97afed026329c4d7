"""Cutting a step in two: the parts compute what the step computes, and the prefix is all that can be kept."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES, SIZE, make_small_model
from small_networks import as_if_trained, built_optimizer, some_images, values

from elastic_trainer.engine.prefix import SplitStep, split_step
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import freeze_batch_norm

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
    assert len(split.prefix(images)) == count
    expected = changed_by(model, optimizer, lambda: step(images, labels))
    got = changed_by(model, optimizer, lambda: split(split.prefix(images), labels))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_is_cut_where_all_tensors_train():
    model = make_small_model()
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH)
    assert split_step(step) is None


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


def test_a_random_operation_below_frozen_layers_ends_the_prefix():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(4, 1)(layers.RandomFlip(seed=1, name="shaken")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D()(x)))
    mask = np.array(["head" in variable.path for variable in model.trainable_variables])
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, mask)
    assert split_step(step) is None


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
