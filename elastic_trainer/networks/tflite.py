"""Converts a model to TensorFlow Lite.

It is traced here and converted from the concrete function: `from_keras_model` calls methods that some versions of
Keras 3 do not have. Variables become constants before: the converter saves the module that it is given, and saving
variables takes most of the time that converting takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from elastic_trainer.system.errors import UserError, first_line
from elastic_trainer.system.machine import silenced

CALIBRATING_IMAGES = 100  # by which the scales of an int8 file are found


def convert(model: keras.Model, *quantise: bool | np.ndarray) -> list[bytes]:
    """TensorFlow Lite files of `model`, one for each of `quantise`: whether its weights have 8 bits.

    They map an image float32 [1, size, size, 3] in 0…255 to logits [1, classes]. With images float32 [n, size, size, 3]
    instead, which calibrate it, all of the file has 8 bits, the image and the logits too.

    Raises `UserError` if the converter does not support the model, or TensorFlow Lite lacks a kernel for it.
    """
    module, spec = tf.Module(), tf.TensorSpec((1, *model.input_shape[1:]), tf.float32, name="image")
    function = tf.function(lambda image: {"logits": model(image, training=False)}, input_signature=[spec])
    files = []
    with naming_missing_kernels("--export: TensorFlow Lite cannot run this model"):
        traced = function.get_concrete_function()
        module.frozen, results = convert_variables_to_constants_v2(traced), traced.structured_outputs
        module.infer = tf.function(
            lambda image: tf.nest.pack_sequence_as(results, module.frozen(image)), input_signature=[spec]
        )
        for each in quantise:
            with silenced():  # the converter logs each of its passes
                converter = tf.lite.TFLiteConverter.from_concrete_functions(
                    [module.infer.get_concrete_function()], module
                )
                converter.optimizations = [] if each is False else [tf.lite.Optimize.DEFAULT]
                if isinstance(each, np.ndarray):
                    converter.representative_dataset = partial(map, lambda image: [image[None]], each)
                    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
                    converter.inference_input_type = converter.inference_output_type = tf.int8
                files.append(converter.convert())
    return files


def conversion_seconds(model: keras.Model, is_int8: bool = False) -> float:
    """Wall time of converting `model` to both files on this device now, and to one of int8, if that `is_int8`."""
    start = time.perf_counter()
    shape = (CALIBRATING_IMAGES * is_int8, *model.input_shape[1:])
    images = np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)
    convert(model, False, True, *([images] if is_int8 else []))
    return time.perf_counter() - start


@contextmanager
def naming_missing_kernels(what: str) -> Iterator[None]:
    """A failure of the converter, or of tracing a custom layer, becomes a `UserError` that starts with `what`.

    It names the operations that have no kernel, if the converter does.
    """
    try:
        yield
    except Exception as error:  # ConverterError is not public, and a custom layer may raise anything
        missing = re.search(r"(?:Custom|Select TF|TF Select|Flex) ops: *([\w, ]+)", str(error))
        reason = f"it has no kernel for {missing[1].strip()}" if missing else first_line(error)[:300]
        raise UserError(f"{what}: {reason}") from error
