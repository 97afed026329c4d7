"""Saves and loads networks as .keras files that need none of this project's code."""

from __future__ import annotations

import zipfile
from pathlib import Path

import keras

import utils
from elastic_trainer.networks.batch_norm import (
    KERAS_NAME,
    FrozenBatchNormalization,
    WhileSaved,
    freeze_batch_norm_statistics,
)
from utils import UserError


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
            layer.__class__ = WhileSaved
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
        frozen = {KERAS_NAME: FrozenBatchNormalization}
        return freeze_batch_norm_statistics(keras.models.load_model(path, custom_objects=frozen, compile=False))
    except Exception as error:  # Keras raises many kinds, for damage as for layers it does not know
        raise UserError(
            f"{flag} {path}: Keras cannot load it: {utils.first_line(error)} (a model with layers of its own is given "
            "as file.py:function)"
        ) from error
