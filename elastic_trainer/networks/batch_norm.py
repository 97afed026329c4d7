"""Batch normalisation with frozen statistics.

The paper freezes the moving mean and variance in every scheme. In Keras 3, calling a backbone with
`training=False` is not enough: if the outer model is called with `training=True`, the backbone normalises by the
statistics of the batch anyway. Therefore the layers themselves are replaced.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class FrozenBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation that always uses its moving statistics and never changes them. Gamma and beta train.

    While `save_model` writes it, it is a layer that does not train: plain Keras then keeps it frozen, too.
    """

    is_saved = False  # now, by `save_model`

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Normalise `inputs` [batch, height, width, channels]. Other shapes work too, with Keras' slower operations."""
        channels_last = self.axis in (-1, len(inputs.shape) - 1)
        if len(inputs.shape) != 4 or not channels_last:
            return super().call(inputs, training=False, mask=mask)
        mean = tf.cast(self.moving_mean.value, tf.float32)
        variance = tf.cast(self.moving_variance.value, tf.float32)
        gamma = tf.cast(self.gamma.value, tf.float32) if self.scale else tf.ones_like(variance)
        beta = tf.cast(self.beta.value, tf.float32) if self.center else tf.zeros_like(mean)
        # One fused kernel forward and one backward take half the time of Keras' chain of small operations.
        return tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=gamma, offset=beta, mean=mean, variance=variance, epsilon=self.epsilon, is_training=False
        ).y

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return {**config, "trainable": False} if self.is_saved else config

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        return config and {**config, "trainable": self.trainable}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Create the variables. The `config` of a frozen layer says whether gamma and beta train."""
        if "trainable" in config:
            self.trainable = config["trainable"]
        super().build_from_config(config)


# Keras writes the name of a layer's class to a file and finds the layer's weights by that name. The frozen layer has
# the name of Keras' layer, so that a program without this code can load the file. `load_model` passes it to Keras under
# that name. Keras uses it only for layers that were ours: it does not look up its own layers by class name.
FrozenBatchNormalization.__module__ = "keras.layers"
FrozenBatchNormalization.__name__ = keras.layers.BatchNormalization.__name__


def freeze_batch_norm(model: keras.Model) -> keras.Model:
    """Turn each BatchNormalization of `model` into a FrozenBatchNormalization, in place. Returns `model`.

    The layers change their class. This reaches layers inside nested models, wrappers and custom layers, which
    `keras.models.clone_model` does not.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization:
            layer.__class__ = FrozenBatchNormalization
    model.train_function = model.test_function = None  # Keras traced them with the layers of before
    return model
