"""What the tests of pruning share: networks, batches, and ways to make channels dead."""

from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf
from conftest import BATCH, CLASSES, make_small_model

import models
from elastic_trainer.networks.batch_norm import freeze_batch_norm_statistics
from elastic_trainer.networks.names import GLYPH_WEIGHTS
from elastic_trainer.pruning.channel_groups import ChannelGroups
from elastic_trainer.pruning.rebuild import take_kept
from elastic_trainer.pruning.scheme import PruneTrainScheme
from elastic_trainer.training.optimizers import make_optimizer

EXACT = SimpleNamespace(prune_ratio=0.25, prune_threshold=1e-6)  # only channels that are zero count as dead
SHARE = 0.3
NETWORKS = ("small", "mobilenetv2", "resnet50", "vgg16")


class Batches:
    """Random images of the size that a model takes, for `probe`."""

    batch_size, steps_per_epoch = BATCH, 5

    def __init__(self, model):
        rng = np.random.default_rng(5)
        images = rng.uniform(0, 255, (BATCH, *model.input_shape[1:])).astype(np.float32)
        self.batch = tf.constant(images), tf.constant(np.arange(BATCH, dtype=np.int32) % CLASSES)

    def probe(self, index):
        return [self.batch]


def build(name, dropout=1e-9, augment="none"):
    """A network whose batch-norm parameters and biases are not all 0 or 1, with dropout that never happens.

    MobileNetV2 has weights that come with the project: made up ones do not let an image's signal through its 52 layers.
    """
    keras.utils.set_random_seed(0)
    weights = str(GLYPH_WEIGHTS) if name == "mobilenetv2" else "none"
    small = name == "small"
    model = make_small_model() if small else models.build_model(name, 32, CLASSES, weights, 0.35, augment)
    rng = np.random.default_rng(1)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = dropout
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            if name == "mobilenetv2":
                continue
            if variable.name in ("gamma", "moving_variance"):
                variable.assign(rng.uniform(0.5, 1.5, variable.shape))
            elif variable.name in ("beta", "bias", "moving_mean"):
                variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


def two_convolutions(reader_size, beta):
    """Convolution, batch norm, ReLU, then a convolution that reads it, with a batch norm of its own."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(6, 3, padding="same", use_bias=False, name="first")(inputs)
    x = keras.layers.BatchNormalization(beta_initializer=keras.initializers.Constant(beta), name="norm")(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Conv2D(5, reader_size, padding="same", use_bias=False, name="second")(x)
    x = keras.layers.BatchNormalization(name="behind")(x)
    x = keras.layers.Flatten()(keras.layers.ReLU()(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))
    return freeze_batch_norm_statistics(model)


def scheme_of(model, settings=EXACT):
    return PruneTrainScheme(model, Batches(model), settings, multiple=1)  # type: ignore[arg-type]


def built_optimizer(model, name="sgd", rate=1e-2):
    optimizer = make_optimizer(name, rate, 1e-3, 100)
    optimizer.build(model.trainable_variables)
    return optimizer


def zero(variable, axis, channels):
    values = variable.numpy()
    values[(slice(None),) * axis + (channels,)] = 0.0
    variable.assign(values)


def kill_readers(model, share=SHARE, seed=0):
    """Zero what reads a share of the channels of every group; returns {group's name: indices of these channels}."""
    network, rng, killed = ChannelGroups(model), np.random.default_rng(seed), {}
    for name, group in network.prunable().items():
        count = network.size(group)
        killed[name] = np.sort(rng.choice(count, int(share * count), replace=False))
        for kernel in network.readers(group).values():
            only = {group: killed[name]} | {
                other: np.arange(0) for other in network.roots(kernel.source) if other != group
            }
            zero(kernel.layer.kernel, len(kernel.layer.kernel.shape) - 2, network.kept_indices(kernel.source, only))
    return killed


def kill_writers(model, depthwise, share=SHARE):
    """Zero what writes the first channels of every group, in its convolutions or in its depthwise ones."""
    network = ChannelGroups(model)
    for group in network.prunable().values():
        for kernel in network.kernels.values():
            if kernel.depthwise == depthwise and network.roots(kernel.target) == (group,):
                axis = len(kernel.layer.kernel.shape) - 1 - kernel.depthwise
                zero(kernel.layer.kernel, axis, np.arange(int(share * network.size(group))))


def kept_of(scheme, network):
    return {group: scheme.kept[name] for name, group in network.prunable().items()}


def assert_survivors_equal(new, old, network, kept, rtol=1e-4, skip=()):
    """Each variable of `new` is the slice of its forerunner in `old` that `kept` says; `skip`: names not compared."""
    for after, before in zip(new.variables, old.variables, strict=True):
        if before.name not in skip:
            expected = take_kept(before.numpy(), before, network, kept)
            scale = np.abs(expected).max() if expected.size else 0.0
            np.testing.assert_allclose(after.numpy(), expected, atol=rtol * scale, err_msg=before.path)


def assert_same_logits(one, other, images):
    expected = one(images, training=False).numpy()
    assert np.ptp(expected, axis=0).max() > 1e-3 * np.abs(expected).max(), "logits that depend on nothing prove nothing"
    np.testing.assert_allclose(other(images, training=False).numpy(), expected, atol=1e-5 * np.abs(expected).max())
