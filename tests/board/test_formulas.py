"""A traced step is rebuilt from operations that LiteRT has, and computes what it computed."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_trainer.board.formulas import FORMULAS
from elastic_trainer.board.rebuild import rebuild
from elastic_trainer.networks.batch_norm import freeze_batch_norm

LACKING = {"Conv2DBackpropFilter", "Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropFilter", "MaxPoolGrad"}


def _network(*layers: keras.layers.Layer, channels: int = 4, size: tuple[int, int] = (9, 8)) -> keras.Model:
    return _with_weights(freeze_batch_norm(keras.Sequential([keras.Input((*size, channels)), *layers])))


def _with_weights(model: keras.Model) -> keras.Model:
    rng = np.random.default_rng(0)
    for variable in model.variables:
        variable.assign(rng.uniform(0.2, 1.0, tuple(variable.shape)) * rng.choice([-1, 1], tuple(variable.shape)))
        if "variance" in variable.path:
            variable.assign(np.abs(variable.numpy()))
    return model


def _assert_same(model: keras.Model, batch: int = 5) -> None:
    """Outputs and all gradients, of the inputs too, are TensorFlow's."""
    variables = [variable.value for variable in model.trainable_variables]

    def gradients(images: tf.Tensor, factors: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = model(images)
            total = tf.reduce_sum(outputs * factors)
        return [outputs, *tape.gradient(total, [images, *variables])]

    specs = tf.TensorSpec((batch, *model.input_shape[1:])), tf.TensorSpec((batch, *model.output_shape[1:]))
    traced = tf.function(gradients, autograph=False).get_concrete_function(*specs)

    def again(images: tf.Tensor, factors: tf.Tensor) -> list[tf.Tensor]:
        feeds = {traced.inputs[0].name: images, traced.inputs[1].name: factors}
        values = {id(variable.handle): tf.identity(variable.read_value()) for variable in variables}
        return rebuild(traced.graph, traced.graph.outputs, feeds, values, FORMULAS)

    rebuilt = tf.function(again, autograph=False).get_concrete_function(*specs)
    operations = rebuilt.graph.get_operations()
    assert not LACKING & {op.type for op in operations}
    slices = [op for op in operations if op.type == "StridedSlice" and op.inputs[0].shape.rank == 4]
    assert not any(op.get_attr("shrink_axis_mask") for op in slices)  # XNNPACK does not compute those
    rng = np.random.default_rng(1)
    values = [tf.constant(rng.normal(size=spec.shape), tf.float32) for spec in specs]
    for expected, found in zip(traced(*values), rebuilt(*values), strict=True):
        scale = np.abs(expected.numpy()).max()
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5 * scale)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["conv", "grouped", "depthwise", "max", "average"]),
    batch=st.integers(1, 6),
    size=st.tuples(st.integers(5, 11), st.integers(5, 11)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 3),
    padding=st.sampled_from(["same", "valid"]),
)
@example("conv", 5, (9, 8), (1, 1), 1, "same")
@example("conv", 5, (9, 8), (1, 1), 2, "valid")
@example("conv", 5, (9, 8), (3, 3), 1, "same")
@example("conv", 5, (9, 8), (4, 3), 2, "same")
@example("depthwise", 5, (9, 8), (3, 3), 2, "same")
@example("max", 5, (9, 8), (3, 3), 2, "same")
@example("average", 5, (9, 8), (3, 3), 1, "same")
def test_gradients_of_any_window_are_those_of_tensorflow(kind, batch, size, kernel, stride, padding):
    layer = {
        "conv": lambda: keras.layers.Conv2D(6, kernel, stride, padding),
        "grouped": lambda: keras.layers.Conv2D(6, kernel, stride, padding, groups=2),
        "depthwise": lambda: keras.layers.DepthwiseConv2D(kernel, stride, padding, depth_multiplier=2),
        "max": lambda: keras.layers.MaxPooling2D(kernel, stride, padding),
        "average": lambda: keras.layers.AveragePooling2D(kernel, stride, padding),
    }[kind]()
    keras.utils.set_random_seed(0)
    _assert_same(_network(keras.layers.Conv2D(4, 1), keras.layers.ReLU(), layer, size=size), batch)


def test_gradients_with_dilations_and_groups_are_those_of_tensorflow():
    _assert_same(_network(keras.layers.Conv2D(6, 3, padding="same", dilation_rate=2)))
    _assert_same(_network(keras.layers.DepthwiseConv2D(3, padding="same", dilation_rate=2)))
    _assert_same(_network(keras.layers.Conv2D(6, 3, 2, padding="same", groups=2)))


def test_gradients_of_activations_are_those_of_tensorflow():
    names = ("relu", "relu6", "sigmoid", "tanh", "silu", "gelu", "elu", "softplus", "hard_silu")
    inputs = keras.Input((9, 8, 4))
    hidden = keras.layers.Dense(5)(inputs)
    outputs = keras.layers.Concatenate()([keras.layers.Activation(name)(hidden) for name in names])
    _assert_same(_with_weights(keras.Model(inputs, keras.layers.Dense(2)(outputs))))


def test_gradients_of_normalisation_and_attention_are_those_of_tensorflow():
    _assert_same(_network(keras.layers.Conv2D(6, 1), keras.layers.BatchNormalization(), keras.layers.ReLU()))
    _assert_same(_network(keras.layers.LayerNormalization(), keras.layers.Dense(3)))
    inputs = keras.Input((9, 8, 4))
    tokens = keras.layers.Reshape((72, 4))(inputs)
    _assert_same(keras.Model(inputs, keras.layers.MultiHeadAttention(2, 3)(tokens, tokens)))
