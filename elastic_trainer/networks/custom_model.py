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

import utils
from elastic_trainer.networks.architectures import image_shape
from elastic_trainer.networks.batch_norm import freeze_batch_norm_statistics
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.networks.tensors import HEAD
from utils import UserError


def build_custom_model(name: str, input_size: int, num_classes: int) -> keras.Model:
    """The user's own Keras model, with frozen batch-norm statistics and logits for `num_classes`.

    The model must take images [batch, input_size, input_size, 3] in 0…255 and contain the scaling that it needs. A
    softmax at its end is removed. A last dense layer for another number of classes is replaced.

    Args:
        name: a .keras file, or file.py:function; the function is called with the input shape (height, width, 3) and the
            number of classes.
        input_size: height and width in pixels.
        num_classes: number of logits.

    Raises:
        UserError: the model cannot be loaded or built, does not map such images to such logits, or has no trainable
            weights.
    """
    shape = image_shape(input_size)
    model = (
        load_model(name, "--model_name") if name.endswith(".keras") else _call_user_function(name, shape, num_classes)
    )
    try:
        if not model.built:
            model(np.zeros((1, *shape), np.float32))
        model = with_logits(freeze_batch_norm_statistics(model), num_classes, name)
        output = model(keras.Input(shape))
    except UserError:
        raise
    except Exception as error:  # a custom layer may raise anything
        takes = getattr(model, "input_shape", None)
        hint = f" (it takes {takes}; see --input_size)" if takes else ""
        raise UserError(
            f"--model_name {name}: does not take images of shape {shape}{hint}: {utils.first_line(error)}"
        ) from error
    if tuple(getattr(output, "shape", ())) != (None, num_classes):
        raise UserError(
            f"--model_name {name}: returns {getattr(output, 'shape', type(output).__name__)}, not logits for "
            f"{num_classes} classes: (None, {num_classes})"
        )
    if not model.trainable_variables:
        raise UserError(f"--model_name {name}: has no trainable weights; set `trainable = True` on the layers to train")
    return model


def _call_user_function(name: str, shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Import FILE.py and call its function. Raises `UserError` with the line number for an error in the user's code."""
    file, _, function = name.rpartition(":")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"--model_name {name}: {file} is not a Python file")
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
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" line {frames[-1].lineno}" if frames else ""
        raise UserError(
            f"--model_name {name}: {file}{line}: {type(error).__name__}: {utils.first_line(error)}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(model, keras.Model):
        raise UserError(f"--model_name {name}: must return a keras.Model, not {type(model).__name__}")
    return model


def with_logits(model: keras.Model, num_classes: int, name: str) -> keras.Model:
    """`model` without a softmax at its end, and with a last dense layer for `num_classes` classes.

    A model without a graph, or with several outputs, is returned as it is.

    Args:
        model: a classifier.
        num_classes: number of logits.
        name: of the model, for the message when the last layer is replaced.
    """
    if len(getattr(model, "outputs", None) or ()) != 1:
        return model
    output = model.outputs[0]
    last = output._keras_history.operation
    softmax = keras.activations.softmax
    if isinstance(last, keras.layers.Softmax) or (
        isinstance(last, keras.layers.Activation) and last.activation is softmax
    ):
        output = last.input
        last = output._keras_history.operation
    if isinstance(last, keras.layers.Dense):
        if last.units != num_classes:
            print(f"{name}: last layer {last.name} has {last.units} outputs; replaced by a new one for {num_classes}")
            output = keras.layers.Dense(num_classes, name=HEAD)(last.input)
        elif last.activation is softmax:
            last.activation = keras.activations.linear
    return model if output is model.outputs[0] else keras.Model(model.inputs, output, name=model.name)
