"""Properties of what trains, see `properties.py`: random networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from conftest import BATCH, make_table
from hypothesis import strategies as st
from properties import property_of
from small_networks import as_if_trained, some_images, values

from elastic_trainer import ElasticTraining
from elastic_trainer.engine.prefix import split_step
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.profiling.tables import estimated_table
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.selection.select import select_tensors, select_upper_part

# --- networks ---------------------------------------------------------------------------------------------------------

_KINDS = (
    *("conv", "depthwise", "norm", "activation", "add", "concatenate", "pool", "layer_norm", "pad", "again", "inner"),
)


@dataclass(frozen=True)
class Network:
    """A small functional network on images 8×8: branches, shared layers, models within, frozen batch norm."""

    steps: list[tuple[str, int]]  # kind of each layer, and a number that its settings follow from
    pooled: bool
    has_bias: bool
    hidden: bool

    def make(self) -> keras.Model:
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        layers = keras.layers
        inputs = keras.Input((8, 8, 3))
        found = [layers.Conv2D(4, 3, padding="same")(layers.Rescaling(1 / 127.5, -1)(inputs))]
        shared: list[tuple[Any, Any]] = []  # layers, and the shapes that they take
        for kind, choice in self.steps:
            x = found[-1]
            if kind == "again":
                fitting = [layer for layer, shape in shared if shape == x.shape]
                found.append(fitting[choice % len(fitting)](x) if fitting else x)
                continue
            layer = _layer(kind, choice, x.shape)
            if kind in ("add", "concatenate"):
                alike = [one for one in found[:-1] if one.shape == x.shape]
                x = layer([x, alike[choice % len(alike)]]) if alike else x
            else:
                shared.append((layer, x.shape))
                x = layer(x)
            found.append(x)
        x = (layers.GlobalAveragePooling2D() if self.pooled else layers.Flatten())(found[-1])
        x = layers.Dense(5, activation="relu")(x) if self.hidden else x
        model = keras.Model(inputs, layers.Dense(3, use_bias=self.has_bias)(x))
        return as_if_trained(freeze_batch_norm(model))


def _layer(kind: str, choice: int, shape: Any) -> Any:
    """A layer of this kind, or a model, that takes images of this shape."""
    layers, filters, is_even = keras.layers, 3 + choice % 3, choice % 2 == 0
    if kind in ("pad", "pool") and min(shape[1:3]) < 3:
        kind = "activation"
    if kind == "pad":
        strided = layers.Conv2D(filters, 3, strides=2, use_bias=is_even)
        return keras.Sequential([layers.ZeroPadding2D(((0, 1), (0, 1))), strided])
    if kind == "inner":
        inputs = keras.Input(shape[1:])
        x = layers.BatchNormalization()(layers.Conv2D(filters, 1, use_bias=is_even)(inputs))
        return keras.Model(inputs, layers.ReLU()(x))
    size, strides = 1 + choice % 3, 1 + choice % 2
    make: dict[str, Callable[[], Any]] = {
        "conv": lambda: layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=choice % 4 < 2),
        "depthwise": lambda: layers.DepthwiseConv2D(3, padding="same", use_bias=is_even),
        "norm": lambda: layers.BatchNormalization(scale=choice % 3 > 0, center=choice % 4 > 0),
        "activation": lambda: layers.Activation("relu" if is_even else "gelu"),
        "add": layers.Add,
        "concatenate": layers.Concatenate,
        "pool": lambda: (layers.AveragePooling2D if is_even else layers.MaxPooling2D)(2),
        "layer_norm": layers.LayerNormalization,
    }
    return make[kind]()


NETWORKS = st.builds(
    Network,
    st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 11)), min_size=1, max_size=8),
    *(st.booleans(), st.booleans(), st.booleans()),
)


def compiled(model: keras.Model, optimizer: str) -> keras.Model:
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.01),
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(1e-3),
        "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.1),
        "clipped": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.1),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[optimizer](), loss, metrics=["accuracy"])
    return model


def plain_steps(model: keras.Model, mask: np.ndarray, batches: list[Any]) -> list[float]:
    """Train by plain SGD, in plain Keras, only what `mask` selects; returns the loss of each step."""
    chosen = [variable for variable, is_chosen in zip(model.trainable_variables, mask, strict=True) if is_chosen]
    losses = []
    for inputs, labels in batches:
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        gradients = tape.gradient(loss, [variable.value for variable in chosen], unconnected_gradients="zero")
        for variable, gradient in zip(chosen, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        losses.append(float(loss))
    return losses


@property_of(NETWORKS, st.floats(0.05, 1), st.integers(0, 2**32 - 1), st.booleans(), is_slow=True)
def exactly_what_is_selected_trains_as_in_plain_keras(
    network: Network, share: float, seed: int, is_upper: bool
) -> None:
    """Profile, select, fold, cut, two steps."""
    model = network.make()
    count, start = len(model.trainable_variables), values(model.variables)
    batches = [(tf.constant(some_images(8, BATCH, k)), tf.constant(np.arange(BATCH) % 3, tf.int32)) for k in range(2)]
    task = ImageClassification(model)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    table = estimated_table(task, optimizer, BATCH, 10.0)
    head = head_mask(model)
    rho = max(share, smallest_rho(table, head))
    importance = np.random.default_rng(seed).normal(0.5, 1, count)
    mask = (select_upper_part if is_upper else select_tensors)(table, importance, head, rho)
    full_ms = table.predict_ms(np.ones(count, bool))
    assert mask[head].all() and table.predict_ms(mask) <= rho * full_ms * (1 + 1e-9)
    expected, after = plain_steps(model, mask, batches), values(model.variables)
    step = TrainStep(task, optimizer, BATCH, mask)
    split = split_step(step)
    for form in filter(None, (step, split)):
        for variable, old in zip(model.variables, start, strict=True):
            variable.assign(old)
        losses = [
            (split(split.prefix(inputs), labels) if form is split and split else step(inputs, labels))[0]
            for inputs, labels in batches
        ]
        np.testing.assert_allclose(losses, expected, rtol=2e-4, atol=2e-5)
        chosen = {id(variable) for variable, taken in zip(model.trainable_variables, mask, strict=True) if taken}
        for variable, old, wanted in zip(model.variables, start, after, strict=True):
            found = variable.numpy()
            if id(variable) in chosen:
                scale = np.abs(wanted - old).max()
                np.testing.assert_allclose(found - old, wanted - old, rtol=1e-2, atol=1e-2 * scale + 1e-6)
            else:
                np.testing.assert_array_equal(found, old, err_msg=variable.path)


@property_of(
    NETWORKS, st.sampled_from(["sgd", "momentum", "adam", "adamw", "clipped"]), st.sampled_from([1, 3]), is_slow=True
)
def fit_at_rho_1_is_plain_fit(network: Network, optimizer: str, steps_per_execution: int) -> None:
    x, y = some_images(8, 10), np.arange(10) % 3
    results = []
    for is_elastic in (False, True):
        model = compiled(network.make(), optimizer)
        model.steps_per_execution = steps_per_execution
        scheme = "elastic_training_upper_part"
        callbacks = [ElasticTraining(1.0, scheme=scheme, table=make_table(model), verbose=0)] if is_elastic else []
        fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=callbacks, validation_data=(x, y), **fit).history
        results.append((history, values(model.variables)))
        assert not callbacks or callbacks[0].history.step == 6
    (plain, plain_values), (found, found_values) = results
    for name, numbers in plain.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-5, atol=1e-6, err_msg=name)
    for one, other in zip(plain_values, found_values, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
