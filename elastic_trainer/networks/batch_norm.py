"""Batch norm with frozen statistics, and how models that hold it are saved and loaded."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

import utils
from utils import UserError

if TYPE_CHECKING:
    pass


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


class _WhileSaved(FrozenBatchNormalization):
    """A frozen batch norm while `save_model` writes it: `trainable=False` freezes it in plain Keras too."""

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "trainable": False}

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        return config and {**config, "trainable": self.trainable}


# Keras writes the name of a layer's class into files, and finds its weights there by it. Under the name of Keras' own
# layer they suit every program. Where our class is handed to Keras for that name, it comes before Keras' own, but only
# for the layers that were ours: for its own ones Keras notes no name to look up.
_KERAS_NAME = keras.layers.BatchNormalization.__name__
for _class in (FrozenBatchNormalization, _WhileSaved):
    _class.__module__, _class.__name__ = "keras.layers", _KERAS_NAME


def freeze_batch_norm_statistics(model: keras.Model) -> keras.Model:
    """Turn each BatchNormalization of `model`, however deeply nested, into a FrozenBatchNormalization; returns `model`.

    The layers change their class in place: this reaches the inside of nested models, wrappers and custom layers, which
    cloning a model does not.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization:
            layer.__class__ = FrozenBatchNormalization
    return model


def save_model(model: keras.Model, path: Path) -> None:
    """Save `model` as a .keras file that needs no code of this project.

    Frozen batch norms become Keras' own with `trainable=False`: they use and keep their statistics in training too; to
    train gamma and beta of such a layer elsewhere is to unfreeze it. Loaded by `load_model`, all is as it was. Layers
    of the user's own (and ViT's, from vit-keras) stay what they are; a batch norm inside them is theirs to make.

    `model` may be in use: only the class of those layers changes, and only meanwhile.
    """
    frozen = [layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization]
    try:
        for layer in frozen:
            layer.__class__ = _WhileSaved
        model.save(path)
    finally:
        for layer in frozen:
            layer.__class__ = FrozenBatchNormalization


def load_model(path: Path | str, flag: str) -> keras.Model:
    """The model in a .keras file, with frozen batch-norm statistics. Raises `UserError` naming `flag`."""
    try:
        with zipfile.ZipFile(path) as file:
            if b'"vit_keras.' in file.read("config.json"):
                import vit_keras.layers  # noqa: F401 Keras does not import what a file names
        frozen = {_KERAS_NAME: FrozenBatchNormalization}
        return freeze_batch_norm_statistics(keras.models.load_model(path, custom_objects=frozen, compile=False))
    except Exception as error:  # Keras raises many kinds, for damage as for layers it does not know
        raise UserError(
            f"{flag} {path}: Keras cannot load it: {utils.first_line(error)} (a model with layers of its own is given "
            "as file.py:function)"
        ) from error
