"""Frozen batch normalisation: compared with Keras' layer in inference; its statistics never change."""

import keras
import numpy as np
import tensorflow as tf
from small_networks import as_if_trained

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm


def plain_backbone():
    """A Keras network with random moving statistics instead of the initial 0 and 1."""
    return as_if_trained(
        keras.applications.MobileNetV2(input_shape=(32, 32, 3), include_top=False, weights=None, alpha=0.35)
    )


def test_frozen_network_called_for_training_equals_the_plain_one_in_inference():
    plain = plain_backbone()
    frozen = keras.models.clone_model(plain)
    frozen.set_weights(plain.get_weights())
    freeze_batch_norm(frozen)
    images = tf.random.uniform((2, 32, 32, 3), -1, 1, seed=0)
    expected = plain(images, training=False).numpy()
    scale = np.abs(expected).max()
    for training in (False, True):
        inner = frozen(images, training=training).numpy()
        outer = keras.Sequential([frozen])(images, training=training).numpy()
        np.testing.assert_allclose(inner, expected, atol=1e-4 * scale)
        np.testing.assert_allclose(outer, expected, atol=1e-4 * scale)
    for old, new in zip(plain.variables, frozen.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    assert np.abs(plain(images, training=True).numpy() - expected).max() > 1e-2 * scale


def test_frozen_batch_norm_has_the_gradients_of_the_plain_one_in_inference():
    x = tf.random.normal((2, 4, 4, 3), seed=0)
    plain = keras.layers.BatchNormalization()
    plain.build(x.shape)
    plain.moving_mean.assign([0.1, 0.2, 0.3])
    plain.moving_variance.assign([0.5, 1.0, 2.0])
    for other in ({}, {"scale": False}, {"center": False}):
        reference = keras.layers.BatchNormalization(**other)
        frozen = FrozenBatchNormalization(**other)
        gradients = []
        for layer, training in ((reference, False), (frozen, True)):
            layer.build(x.shape)
            layer.moving_mean.assign(plain.moving_mean)
            layer.moving_variance.assign(plain.moving_variance)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(layer(x, training=training)))
            gradients.append(tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)]))
        for expected, got in zip(*gradients, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_frozen_batch_norm_normalises_inputs_without_height_and_width():
    layer = FrozenBatchNormalization()
    x = tf.random.normal((5, 3), mean=4.0, seed=0)
    np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1 + layer.epsilon), rtol=1e-5)
