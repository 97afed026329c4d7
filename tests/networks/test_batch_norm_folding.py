"""Folded batch norm: logits and every gradient equal the unfolded network's; exactly the pairs that fit are folded."""

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_networks import as_if_trained, built_optimizer, some_images, values

import models
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.networks.batch_norm_folding import find_pairs, folded_batch_norm
from elastic_trainer.networks.graphs import needed_operations

layers = keras.layers
SIZE = 16


def network(body, seed=0):
    """Images -> `body` -> pooling -> head, with frozen batch norm as after training."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = body(layers.Rescaling(1 / 255)(inputs))
    if len(x.shape) == 4:
        x = layers.GlobalAveragePooling2D()(x)
    return as_if_trained(freeze_batch_norm(keras.Model(inputs, layers.Dense(3)(x))))


def conv_then(norm=None, **options):
    return lambda x: (norm or layers.BatchNormalization())(
        layers.Conv2D(**{"filters": 4, "kernel_size": 3, **options})(x)
    )


def padded(amount, kind=layers.DepthwiseConv2D, readers=1, **options):
    """Zero padding, and a convolution with stride 2 and batch norm. `readers` read the padding."""

    def body(x):
        x = layers.ZeroPadding2D(amount)(x)
        own = {} if kind is layers.DepthwiseConv2D else {"filters": 3}
        found = layers.BatchNormalization()(kind(kernel_size=3, **{"strides": 2, **own, **options})(x))
        return found if readers == 1 else layers.Concatenate()([layers.Flatten()(found), layers.Flatten()(x)])

    return body


def shared_pair(x):
    conv, norm = layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization()
    return layers.Add()([norm(conv(x)), norm(conv(layers.AveragePooling2D(1)(x)))])


def norm_read_by_two(x):
    x = conv_then()(x)
    return layers.Add()([layers.ReLU()(x), x])


def nested(x):
    inner_in = keras.Input(x.shape[1:])
    inner = keras.Model(inner_in, layers.ReLU()(conv_then()(inner_in)))
    return keras.Sequential([inner, layers.Conv2D(5, 1), layers.BatchNormalization()])(x)


def dense(x):
    return layers.BatchNormalization()(layers.Dense(6)(layers.Flatten()(x)))


def one_norm_for_two_layers(x):
    norm = layers.BatchNormalization()
    return layers.Add()([norm(layers.Conv2D(4, 3)(x)), norm(layers.Conv2D(4, 3)(x))])


def layer_read_by_two(x):
    x = layers.Conv2D(4, 3)(x)
    return layers.Add()([layers.BatchNormalization()(x), x])


def two_norms(x):
    x = layers.Conv2D(4, 3)(x)
    return layers.Add()([layers.BatchNormalization()(x), layers.BatchNormalization()(x)])


def output_of_a_nested_model(x):
    inner_in = keras.Input(x.shape[1:])
    return layers.BatchNormalization()(keras.Model(inner_in, layers.Conv2D(4, 3)(inner_in))(x))


@keras.saving.register_keras_serializable()
class Residual(keras.layers.Layer):
    """A custom layer that calls a layer that the graph contains too."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, inputs):
        return inputs + self.inner(inputs)


def called_by_a_custom_layer(x):
    conv = layers.Conv2D(3, 3, padding="same")
    return layers.BatchNormalization()(conv(Residual(conv)(x)))


BODIES: dict[str, Any] = {  # name -> network, pairs, and pairs with zero padding that the convolution adds as well
    "plain": (conv_then(), 1),
    "same padding and stride": (conv_then(padding="same", strides=2), 1),
    "without bias": (conv_then(use_bias=False), 1),
    "groups": (conv_then(filters=6, groups=3), 1),
    "dilation": (conv_then(dilation_rate=2), 1),
    "without gamma": (conv_then(layers.BatchNormalization(scale=False)), 1),
    "without beta": (conv_then(layers.BatchNormalization(center=False)), 1),
    "depthwise": (lambda x: layers.BatchNormalization()(layers.DepthwiseConv2D(3, depth_multiplier=2)(x)), 1),
    "pointwise": (conv_then(kernel_size=1), 1),
    "pointwise with stride": (conv_then(kernel_size=1, strides=2), 1),
    "pointwise with groups": (conv_then(filters=6, kernel_size=1, groups=3), 1),
    "padded as same": (padded(((0, 1), (0, 1))), 1, 1),
    "padded as same, not depthwise": (padded(((0, 1), (0, 1)), layers.Conv2D), 1, 1),
    "padded otherwise": (padded(1), 1),
    "padded twice": (padded(((0, 1), (0, 1)), padding="same"), 1),
    "padding read by two": (padded(((0, 1), (0, 1)), readers=2), 1),
    "dense": (dense, 1),
    "shared pair": (shared_pair, 1),
    "norm read by two": (norm_read_by_two, 1),
    "nested": (nested, 2),
    "activation between": (conv_then(activation="relu"), 0),
    "one norm for two layers": (one_norm_for_two_layers, 0),
    "layer read by two": (layer_read_by_two, 0),
    "two norms": (two_norms, 0),
    "output of a nested model": (output_of_a_nested_model, 0),
    "called by a custom layer": (called_by_a_custom_layer, 0),
    "activity regulariser": (conv_then(activity_regularizer=keras.regularizers.L2(1.0)), 0),
    "other axis": (conv_then(layers.BatchNormalization(axis=1)), 0),
}


def logits_and_gradients(model, images, context):
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            with context:
                logits = model(images, training=True)
            loss = tf.reduce_mean(tf.square(tf.cast(logits, tf.float32) - 1.0))
        return logits, tape.gradient(loss, variables)

    logits, gradients = run()
    return logits.numpy(), [np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients]


def assert_same(model, rtol):
    """Folded and unfolded: relative to the largest value of each tensor."""
    images = tf.constant(some_images(model.input_shape[1]))
    logits, gradients = logits_and_gradients(model, images, folded_batch_norm(model))
    plain_logits, plain_gradients = logits_and_gradients(model, images, nullcontext())
    for got, expected in zip([logits, *gradients], [plain_logits, *plain_gradients], strict=True):
        limit = rtol * np.abs(expected).max().astype(np.float32) + 1e-7
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), atol=limit)


@pytest.mark.parametrize("name", BODIES)
def test_folded_network_has_the_logits_and_gradients_of_the_plain_one(name):
    body, count, *merged = BODIES[name]
    model = network(body)
    paddings = [pair.padding for pair in find_pairs(model)]
    assert (len(paddings), len([*filter(None, paddings)])) == (count, sum(merged))
    assert_same(model, 1e-4)


@pytest.mark.parametrize("name, count", [("mobilenetv2", 52), ("resnet50", 53)])
def test_known_networks_are_folded(name, count):
    model = as_if_trained(models.build_model(name, 32, 3, alpha=0.35))
    assert len(find_pairs(model)) == count
    if name == "mobilenetv2":
        next(layer for layer in model.layers if isinstance(layer, layers.Dropout)).rate = 0.0
        assert_same(model, 1e-3)


def test_folded_half_precision_network_equals_the_plain_one_up_to_rounding(half_precision):
    """In bfloat16 nothing is folded: on some processors TensorFlow's sums are too rough for it."""
    keras.config.set_dtype_policy(half_precision)
    model = network(BODIES["plain"][0])
    assert len(find_pairs(model)) == (half_precision == "mixed_float16")
    assert_same(model, 0.03)


def test_layers_are_as_before_after_folding_and_after_a_failure():
    model = network(BODIES["plain"][0])
    images = some_images(SIZE)
    expected = model(images).numpy()
    [pair] = find_pairs(model)
    with pytest.raises(ZeroDivisionError), folded_batch_norm(model):
        assert "call" in vars(pair.layer)
        raise ZeroDivisionError
    assert "call" not in vars(pair.layer) and "call" not in vars(pair.norm)
    np.testing.assert_array_equal(model(images).numpy(), expected)


def operation_types(model, trained):
    mask = np.array([variable.name in trained for variable in model.trainable_variables])
    mask[-2:] = True  # the head
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), 4, mask)
    return [op.type for op in step.graph.get_operations()]


@pytest.mark.parametrize(
    "trained, norms, kernel_is_constant",
    [
        ((), 0, True),
        (("beta",), 0, True),
        (("bias",), 0, True),
        (("gamma",), 1, None),
        (("gamma", "beta"), 1, None),
        (("kernel",), 0, False),
        (("kernel", "gamma"), 0, False),
    ],
)
def test_step_folds_unless_gamma_trains_without_its_kernel(trained, norms, kernel_is_constant):
    model = network(BODIES["plain"][0])
    types = operation_types(model, trained)
    assert types.count("FusedBatchNormV3") == norms
    if kernel_is_constant is not None:
        assert ("Rsqrt" not in types) == (kernel_is_constant and trained == ())


@pytest.mark.parametrize("trained, products", [((), 0), (("second",), 1), (("first",), 2), (("first", "second"), 2)])
def test_small_convolutions_are_products_where_gradients_pass(trained, products):
    model = network(lambda x: conv_then(kernel_size=1, name="second")(conv_then(kernel_size=1, name="first")(x)))
    mask = np.array([variable.path.startswith((*trained, "dense")) for variable in model.trainable_variables])
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), 4, mask)
    forward = needed_operations([step.loss])
    types = [op.type for op in step.graph.get_operations() if op.name in forward]
    assert (types.count("MatMul") - 1, types.count("Conv2D")) == (products, 2 - products)


def test_frozen_pair_uses_the_weights_of_the_moment_of_selection():
    model = network(BODIES["nested"][0])
    optimizer = built_optimizer("sgd", model)
    variables = model.trainable_variables
    images, labels = some_images(SIZE), np.array([0, 1, 2, 0], np.int32)
    everything, head = np.ones(len(variables), bool), np.arange(len(variables)) >= len(variables) - 2
    for mask in (everything, head, everything, head):
        step = TrainStep(ImageClassification(model), optimizer, 4, mask)
        before = values(variables)
        expected = float(
            tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=model(images, training=True))
            )
        )
        assert step(images, labels)[0] == pytest.approx(expected, rel=1e-5)
        moved = [(variable.numpy() != old).any() for variable, old in zip(variables, before, strict=True)]
        assert moved == mask.tolist()
