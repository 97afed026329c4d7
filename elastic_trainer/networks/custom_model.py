"""Loads the user's own Keras model: `--model_name FILE.keras`, or `--model_name FILE.py:FUNCTION`.

Any architecture can be trained: the schemes only need trainable variables and a head (tensors.py), not layer names.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

import keras
import numpy as np

from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.saved_model import check_finite, load_model
from elastic_trainer.system.errors import UserError, first_line


def build_custom_model(name: str, input_size: int, num_classes: int) -> tuple[keras.Model, keras.Model]:
    """The user's own Keras model, with frozen batch-norm statistics and logits for `num_classes` (see `with_logits`).

    Its frozen layers are made trainable: the scheme decides what trains. The model must take images [batch, input_size,
    input_size, 3] in 0…255 and contain the scaling that it needs.
    `name` is a .keras file, or file.py:function, which is called with the input shape (height, width, 3) and the number
    of classes.

    Returns a model from such images to logits, and the user's model as it was given, which has the same layers. Raises
    `UserError` if it cannot be loaded or built, does not map such images to such logits, has no trainable weights, or
    has weights that are not finite.
    """
    shape = (input_size, input_size, 3)
    given = (
        load_model(name, "--model_name") if name.endswith(".keras") else _call_user_function(name, shape, num_classes)
    )
    try:
        if not given.built:
            given(np.zeros((1, *shape), np.float32))
        _make_trainable(given, name)
        check_finite(given, f"--model_name {name}")
        takes = getattr(given, "input_shape", None)
        if isinstance(takes, tuple) and takes[-1] not in (3, None):  # Keras itself does not always notice
            raise ValueError(f"it takes {takes}, not three channels")
        inputs = keras.Input(shape, name="image")
        output = freeze_batch_norm(given)(inputs)
        if len(getattr(output, "shape", ())) == 2:
            output = with_logits(given, shape, num_classes, name)(inputs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a custom layer may raise anything
        raise UserError(
            f"--model_name {name}: does not take images of shape {shape} (see --input_size): {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    shapes = keras.tree.map_structure(lambda tensor: getattr(tensor, "shape", tensor), output)
    if shapes != (None, num_classes):
        wanted = f"logits for {num_classes} classes: one tensor of shape (None, {num_classes})"
        raise UserError(f"--model_name {name}: returns {shapes}, not {wanted}")
    model = keras.Model(inputs, output, name="own_classifier")
    if not model.trainable_variables:
        raise UserError(f"--model_name {name}: has no trainable weights, so there is nothing to train")
    return model, given


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
