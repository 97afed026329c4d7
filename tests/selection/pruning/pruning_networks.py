"""Networks and batches for the tests of pruning, and functions that make channels dead."""

import keras
import numpy as np
import tensorflow as tf
from conftest import BATCH, CLASSES, make_small_model
from small_networks import as_if_trained

import models
from elastic_trainer.datasets.batches import Batch
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.selection.pruning.channel_groups import ChannelGroups
from elastic_trainer.selection.pruning.rebuild import take_kept
from elastic_trainer.selection.pruning.scheme import PruneTrainScheme
from elastic_trainer.settings.network_names import GLYPH_WEIGHTS

EXACT = 1e-6  # the threshold by which only channels that contribute nothing are dead
SHARE = 0.3  # of the channels of each group, made dead
NETWORKS = ("small", "mobilenetv2", "resnet50", "vgg16")


class Batches:
    """Stands in for `ImageData`: one batch of random images of the model's size."""

    batch_size, steps_per_epoch = BATCH, 5

    def __init__(self, model):
        rng = np.random.default_rng(5)
        images = rng.uniform(0, 255, (BATCH, *model.input_shape[1:])).astype(np.float32)
        self.batch = tf.constant(images), tf.constant(np.arange(BATCH, dtype=np.int32) % CLASSES)

    def importance_batches(self, index):
        images, labels = self.batch
        return [Batch(lambda: images, labels)]


def build(name, dropout=1e-9):
    """A network whose batch-norm parameters and biases are not all 0 or 1, and whose dropout almost never drops.

    MobileNetV2 gets the pretrained weights of this project. With random weights, its logits would not depend on the
    image.
    """
    keras.utils.set_random_seed(0)
    weights = str(GLYPH_WEIGHTS) if name == "mobilenetv2" else "none"
    model = make_small_model() if name == "small" else models.build_model(name, 32, CLASSES, weights, 0.35)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = dropout
    return model if name == "mobilenetv2" else as_if_trained(model)


def two_convolutions(reader_size, beta, filters=(6, 5)):
    """Convolution, batch norm, ReLU, then a second convolution with its batch norm, and a head."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(filters[0], 3, padding="same", use_bias=False, name="first")(inputs)
    x = keras.layers.BatchNormalization(beta_initializer=keras.initializers.Constant(beta), name="norm")(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Conv2D(filters[1], reader_size, padding="same", use_bias=False, name="second")(x)
    x = keras.layers.BatchNormalization(name="behind")(x)
    x = keras.layers.Flatten()(keras.layers.ReLU()(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))
    return freeze_batch_norm(model)


def scheme_of(model, threshold=EXACT, **more):
    """A scheme that removes single channels."""
    return PruneTrainScheme(model, Batches(model), threshold=threshold, multiple=1, **more)  # type: ignore[arg-type]


def zero(variable, axis, indices):
    """Set the slices of a variable at `indices` of an axis to 0."""
    values = variable.numpy()
    values[(slice(None),) * axis + (indices,)] = 0.0
    variable.assign(values)


def kill_readers(model, share=SHARE, seed=0):
    """Zero the kernel slices that read a share of each kernel's channels; returns {kernel's name: their indices}."""
    channels, rng, killed = ChannelGroups(model), np.random.default_rng(seed), {}
    for name, numbers in channels.prunable().items():
        count = len(numbers)
        killed[name] = np.sort(rng.choice(count, int(share * count), replace=False))
        for kernel in channels.readers().values():
            read = np.flatnonzero(np.isin(kernel.source, numbers[killed[name]]))
            zero(kernel.layer.kernel, len(kernel.layer.kernel.shape) - 2, read)
    return killed


def kill_writers(model, depthwise, share=SHARE):
    """Zero the slices that write the first channels of each kernel, in the depthwise or in all other kernels."""
    channels = ChannelGroups(model)
    for numbers in channels.prunable().values():
        for kernel in channels.kernels.values():
            if kernel.depthwise == depthwise and np.array_equal(kernel.target, numbers):
                axis = len(kernel.layer.kernel.shape) - 1 - kernel.depthwise
                zero(kernel.layer.kernel, axis, np.arange(int(share * len(numbers))))


def kept_of(scheme, channels):
    """The kept channels, bool [channels], after the first removal."""
    kept = np.ones(channels.count, bool)
    for name, numbers in channels.prunable().items():
        kept[np.delete(numbers, scheme.kept[name])] = False
    return kept


def assert_survivors_equal(new, old, channels, kept, rtol=1e-4, skip=()):
    """Check that each variable of `new` equals the kept slice of that in `old`, except variables named in `skip`."""
    for after, before in zip(new.variables, old.variables, strict=True):
        if before.name not in skip:
            expected = take_kept(before.numpy(), before, channels, kept)
            scale = np.abs(expected).max() if expected.size else 0.0
            np.testing.assert_allclose(after.numpy(), expected, atol=rtol * scale, err_msg=before.path)


def assert_same_logits(one, other, images):
    expected = one(images, training=False).numpy()
    assert np.ptp(expected, axis=0).max() > 1e-3 * np.abs(expected).max(), "the logits must depend on the image"
    np.testing.assert_allclose(other(images, training=False).numpy(), expected, atol=1e-5 * np.abs(expected).max())
