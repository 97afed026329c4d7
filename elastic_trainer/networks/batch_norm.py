"""Batch norm with frozen statistics, and how models that hold it are saved and loaded."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class FrozenBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation that always uses its moving statistics, and never changes them; gamma and beta train."""

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Normalise `inputs` [batch, height, width, channels] (other shapes too, by Keras' own slower way)."""
        channels_last = self.axis in (-1, len(inputs.shape) - 1)
        if len(inputs.shape) != 4 or not channels_last:
            return super().call(inputs, training=False, mask=mask)
        mean = tf.cast(self.moving_mean.value, tf.float32)
        variance = tf.cast(self.moving_variance.value, tf.float32)
        gamma = tf.cast(self.gamma.value, tf.float32) if self.scale else tf.ones_like(variance)
        beta = tf.cast(self.beta.value, tf.float32) if self.center else tf.zeros_like(mean)
        # One fused kernel forward and one backward, half the time of the chain of small operations Keras writes.
        return tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=gamma, offset=beta, mean=mean, variance=variance, epsilon=self.epsilon, is_training=False
        ).y

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Make the variables; a file of `save_model` says here whether gamma and beta train."""
        if "trainable" in config:
            self.trainable = config["trainable"]
        super().build_from_config(config)


class WhileSaved(FrozenBatchNormalization):
    """A frozen batch norm while `save_model` writes it: `trainable=False` freezes it in plain Keras too."""

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "trainable": False}

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        return config and {**config, "trainable": self.trainable}


# Keras writes the name of a layer's class into files, and finds its weights there by it. Under the name of Keras' own
# layer they suit every program. Where our class is handed to Keras for that name, it comes before Keras' own, but only
# for the layers that were ours: for its own ones Keras notes no name to look up.
KERAS_NAME = keras.layers.BatchNormalization.__name__
for _class in (FrozenBatchNormalization, WhileSaved):
    _class.__module__, _class.__name__ = "keras.layers", KERAS_NAME


def freeze_batch_norm_statistics(model: keras.Model) -> keras.Model:
    """Turn each BatchNormalization of `model`, however deeply nested, into a FrozenBatchNormalization; returns `model`.

    The layers change their class in place: this reaches the inside of nested models, wrappers and custom layers, which
    cloning a model does not.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization:
            layer.__class__ = FrozenBatchNormalization
    return model
