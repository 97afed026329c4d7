"""Loads the user's own Keras model: `--model_name FILE.keras`, or `--model_name FILE.py:FUNCTION`.

Any architecture can be trained: the schemes only need trainable variables and a head (tensors.py), not layer names.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

import keras

from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.saved_model import check_finite, load_model
from elastic_trainer.system.errors import UserError, first_line


def build_custom_model(name: str, input_size: int, num_classes: int) -> tuple[keras.Model, keras.Model]:
    """The user's own Keras model as a classifier (see `as_classifier`), with a new last layer for other classes.

    Its frozen layers are made trainable: the scheme decides what trains. `name` is a .keras file, or file.py:function,
    which is called with the input shape (height, width, 3) and the number of classes.

    Returns the classifier, and the user's model as it was given, which has the same layers. Raises `UserError` if it
    cannot be loaded or built, is no classifier, has no trainable weights, or has weights that are not finite.
    """
    shape = (input_size, input_size, 3)
    given = (
        load_model(name, "--model_name") if name.endswith(".keras") else _call_user_function(name, shape, num_classes)
    )
    model = as_classifier(given, input_size, num_classes, "--model_name", name, keeps_classes=False)
    _make_trainable(given, name)
    check_finite(given, f"--model_name {name}")
    if not model.trainable_variables:
        raise UserError(f"--model_name {name}: has no trainable weights, so there is nothing to train")
    return model, given


def as_classifier(
    given: keras.Model, size: int, num_classes: int, flag: str, name: str, *, keeps_classes: bool
) -> keras.Model:
    """A model from images [batch, size, size, 3] in 0…255 to logits [batch, classes], made of the layers of `given`.

    Batch-norm statistics are frozen, and a softmax is left out (see `with_logits`). The model must contain the scaling
    of images that it needs. Raises `UserError`, with the flag and the file's name, if it does not take such images, or
    does not return one number for each class; unless it `keeps_classes`, a last dense layer for others is replaced.
    """
    shape = (size, size, 3)
    try:
        takes = getattr(given, "input_shape", None)
        if isinstance(takes, tuple) and any(
            have not in (None, want) for have, want in zip(takes[1:], shape, strict=True)
        ):
            raise ValueError(f"it takes {takes}")  # Keras itself does not always notice
        inputs = keras.Input(shape, name="image")
        output = freeze_batch_norm(given)(inputs)
        found: Any = getattr(output, "shape", ())
        if len(found) == 2 and not (keeps_classes and found[-1] != num_classes):
            output = with_logits(given, shape, num_classes, name)(inputs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a custom layer may raise anything
        raise UserError(
            f"{flag} {name}: does not take images of shape {shape} (see --input_size): {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    shapes = keras.tree.map_structure(lambda tensor: getattr(tensor, "shape", tensor), output)
    if shapes != (None, num_classes):
        advice = "; name the data set it was trained on" if keeps_classes else ""
        wanted = f"logits for {num_classes} classes: one tensor of shape (None, {num_classes})"
        raise UserError(f"{flag} {name}: returns {shapes}, not {wanted}{advice}")
    return keras.Model(inputs, output, name="own_classifier")


def _make_trainable(model: keras.Model, name: str) -> None:
    """Make all layers trainable, and print how many weights were not. Statistics stay as they are."""
    trained = len(model.trainable_weights)
    for layer in model._flatten_layers():
        for value in (False, True):  # TensorFlow ignores a value that the layer has, and then layers within keep theirs
            layer.trainable = value
    count = len(model.trainable_weights)
    if count > trained:
        print(f"{name}: {count - trained} of {count} weights were frozen; what trains is decided by --train_type alone")


def _call_user_function(name: str, shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Import FILE.py and call its function. Raises `UserError` with the line number for an error in the user's code."""
    file, _, function = name.rpartition(":")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # as an import does: dataclasses and Keras look modules up there
    sys.path.insert(0, str(path.parent))  # it may import other files of its folder
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"--model_name {name}: {file} has no function '{function}'")
        model = getattr(module, function)(shape, num_classes)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit would end this program without a word
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" line {frames[-1].lineno}" if frames else ""
        raise UserError(f"--model_name {name}: {file}{line}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(model, keras.Model):
        raise UserError(f"--model_name {name}: must return a keras.Model, not {type(model).__name__}")
    return model
