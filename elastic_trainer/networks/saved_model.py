"""Saves and loads networks as .keras files. Plain Keras can load them, without the code of this project."""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import keras
import numpy as np

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm
from elastic_trainer.settings import BEST_MODEL, LAST_MODEL
from elastic_trainer.system.errors import UserError, importing
from elastic_trainer.system.files import atomic_path, check_unpacked


def save_model(model: keras.Model, path: Path) -> None:
    """Save `model` as a .keras file that plain Keras can load.

    Frozen batch norms are saved as Keras' layers with `trainable=False`: plain Keras then neither changes their
    statistics nor trains gamma and beta. `load_model` restores the frozen layers of this project. Custom layers (and
    those of vit-keras) are saved as they are; a program that loads the file needs their code.

    `model` may be in training: it does not change.
    """
    FrozenBatchNormalization.is_saved = True
    try:
        model.save(path)
    finally:
        FrozenBatchNormalization.is_saved = False


def save_last_and_best(model: keras.Model, folder: Path, score: float, best: float | None) -> bool:
    """Save `model` as last.keras in `folder`, and as best.keras if its score is above the `best`; returns whether."""
    last = folder / LAST_MODEL
    with atomic_path(last) as temporary:
        save_model(model, temporary)
    is_best = best is None or score > best
    if is_best:
        with atomic_path(folder / BEST_MODEL) as temporary:
            shutil.copyfile(last, temporary)
    return is_best


def load_model(path: Path | str, flag: str) -> keras.Model:
    """The model in a .keras file, with frozen batch-norm statistics.

    Args:
        path: the file.
        flag: the command-line flag that named it, for the error message.

    Raises:
        UserError: the file is missing, damaged, has custom layers, or weights that are not finite.
    """
    try:
        model = _load(path)
    except UserError:
        raise
    except Exception as error:  # Keras raises many types, for a damaged file and for unknown layers
        raise UserError(
            f"{flag} {path}: Keras cannot load it: {_reason(error)} (a model with custom layers is "
            "given as file.py:function)"
        ) from error
    check_finite(model, f"{flag} {path}")
    return model


def load_best(model: keras.Model, best: Path, is_replaced: bool, flag: str) -> keras.Model:
    """The model in a run's best.keras: in `model`, the network of the run, unless the best may be another network."""
    if is_replaced:
        return load_model(best, flag)
    model.load_weights(best)  # also of networks with custom layers, which Keras cannot load
    return model


def _reason(error: Exception) -> str:
    """Why Keras can neither load nor save a model, in one line."""
    if "safe_mode" in str(error):  # what Keras advises is an argument that no flag sets
        return "it has a Lambda layer, whose code is not run from a file"
    text = str(error).rpartition("Exception encountered: ")[2]
    if missing := re.match(r"Could not locate \w+ '([^']+)'", text):
        return f"it has custom layers or functions, such as {missing[1]}, whose code is not in the file"
    return " ".join(text.strip().partition("\n\n")[0].split()).rstrip(".") or type(error).__name__


def _load(path: Path | str) -> keras.Model:
    """The model in a file. Keras runs no code that the file brings, and imports no module that it names."""
    with zipfile.ZipFile(path) as file:
        check_unpacked(file)
        needs_vit = b'"vit_keras' in file.read("config.json")
    if needs_vit:
        with importing(str(path)):
            import vit_keras.layers  # noqa: F401 registers its layers
    frozen = {FrozenBatchNormalization.__name__: FrozenBatchNormalization}  # that of Keras' layer
    return freeze_batch_norm(keras.models.load_model(path, custom_objects=frozen, compile=False, safe_mode=True))


def check_saving(model: keras.Model, flag: str, changes_shape: bool) -> None:
    """Save `model` to a temporary file and load it again, so that a run fails now and not after its first epoch.

    `flag`: why the run saves its model. `changes_shape`: the model itself is loaded later, not weights into its like.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            save_model(model, path)
            if changes_shape:
                _load(path)
            else:
                model.load_weights(path)
    except Exception as error:  # Keras and custom layers raise many kinds
        raise UserError(
            f"{flag}: Keras cannot save this model and load it again: {_reason(error)}; or leave out --save_model "
            "and --export (with --resume, give --save_model False)"
        ) from error


def check_finite(model: keras.Model, what: str) -> None:
    """Raise `UserError` if a weight of `model` is not a finite number; `what` names the file in the message."""
    for weight in model.weights:
        if not np.isfinite(keras.ops.convert_to_numpy(weight)).all():
            raise UserError(
                f"{what}: contains weights that are not finite, such as {weight.path}; they come from a damaged file, "
                "or from training that diverged"
            )
