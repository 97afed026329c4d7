"""Exports a trained model to TensorFlow Lite (LiteRT) and checks that the files predict what the model predicts.

Two files: `model.tflite` in float32, and `model_dynamic.tflite` with 8-bit weights (dynamic-range quantisation:
activations stay float and are quantised at run time). Both take one image, float32 [1, size, size, 3] in 0…255, and
return logits, float32 [1, classes]. They contain neither augmentation nor dropout. `labels.txt` names the classes.

The model is traced here and converted from the concrete function. This works alike from TensorFlow 2.16 to 2.21 with
every version of Keras 3; `from_keras_model` calls methods that some versions of Keras 3 do not have.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError, first_line
from elastic_trainer.evaluation.predictions import forward_function
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.files import atomic_path, write_json, write_text
from elastic_trainer.machine import cores, environment, silenced
from elastic_trainer.timing.wall_time import measure_ms

MAX_CHECKED_IMAGES = 1000  # test images that each file predicts, evenly spread over the split
LATENCY_SECONDS = 5.0  # for measuring, within the bounds on the number of turns
LATENCY_TURNS = (10, 100)  # minimum and maximum
# Of the time left before a deadline: for predicting images, and with that and latencies; the rest is for writing.
CHECKING_SHARE, MEASURING_SHARE = 0.5, 0.8
FILES = ("model.tflite", "model_dynamic.tflite")
RESULTS = {  # of Keras and each file: key in export.json -> title and format in the printed table
    "accuracy": ("accuracy", ".1%"),
    "same_class_share": ("same class as Keras", ".2%"),
    "largest_logit_difference": ("largest logit difference", ".2g"),
    "latency_one_thread_ms": ("ms, 1 thread", ".2f"),
    "latency_all_threads_ms": ("ms, all threads", ".2f"),
}


@dataclass(frozen=True)
class Converted:
    """A TensorFlow Lite model.

    Attributes:
        content: bytes of the file.
        tensorflow_kernels: operations that only TensorFlow's kernels ("Flex") support; empty if none.
    """

    content: bytes
    tensorflow_kernels: tuple[str, ...]


def convert(model: keras.Model, quantise: bool, allow_tensorflow_kernels: bool = False) -> Converted:
    """Convert the inference pass of `model`, from images [1, size, size, 3] in 0…255 to logits [1, classes].

    Args:
        model: with a fixed input size.
        quantise: store the weights in 8 bits.
        allow_tensorflow_kernels: convert a model that needs TensorFlow's kernels, too. No installed interpreter has
            them from TensorFlow 2.20 on.

    Raises:
        UserError: the converter does not support the model, or it needs TensorFlow's kernels.
    """
    module = inference_module(model, lambda image: {"logits": model(image, training=False)})
    lite = [tf.lite.OpsSet.TFLITE_BUILTINS]
    try:
        return Converted(convert_module(module, quantise, lite), ())
    except Exception as error:  # ConverterError is not public, and tracing a custom layer may raise anything
        if not allow_tensorflow_kernels:
            raise UserError(
                f"--export tflite: TensorFlow Lite cannot run this model: {missing_kernels(error)}; if your "
                "interpreter has TensorFlow's kernels, add --allow_tensorflow_kernels"
            ) from error
    try:
        content = convert_module(module, quantise, [*lite, tf.lite.OpsSet.SELECT_TF_OPS])
    except Exception as error:
        raise UserError(
            f"--export tflite: TensorFlow Lite does not support this model: {missing_kernels(error)}"
        ) from error
    found = set(re.findall(rb"Flex([A-Z]\w+)", content))
    return Converted(content, tuple(sorted(name.decode() for name in found)))


def conversion_seconds(model: keras.Model, allow_tensorflow_kernels: bool = False) -> float:
    """Wall time of converting `model` once on this device now. Raises `UserError` as `convert` does."""
    start = time.perf_counter()
    convert(model, False, allow_tensorflow_kernels)
    return time.perf_counter() - start


def inference_module(model: keras.Model, function: Callable[[tf.Tensor], dict[str, tf.Tensor]]) -> tf.Module:
    """A module whose `infer` is `function` of one image [1, size, size, 3], which calls `model`."""
    module = tf.Module()
    # A concrete function does not keep its variables alive.
    module.kept = [variable.value for variable in model.variables]
    spec = tf.TensorSpec((1, *model.input_shape[1:]), tf.float32, name="image")
    module.infer = tf.function(function, input_signature=[spec])
    return module


def convert_module(module: Any, quantise: bool, kernels: Sequence[Any]) -> bytes:
    """The file of an `inference_module`; `kernels` are sets of operations. Raises what the converter does."""
    with silenced():  # the converter logs each of its passes
        converter = tf.lite.TFLiteConverter.from_concrete_functions([module.infer.get_concrete_function()], module)
        converter.target_spec.supported_ops = list(kernels)
        if quantise:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if len(kernels) > 1:
            converter._experimental_lower_tensor_list_ops = False  # as its error message advises
        return converter.convert()


def missing_kernels(error: Exception) -> str:
    """The operations that the converter lacks, if its error message names them; else the first line of the message."""
    missing = re.search(r"(?:Custom|Select TF|TF Select|Flex) ops: *([\w, ]+)", str(error))
    return f"it has no kernel for {missing[1].strip()}" if missing else first_line(error)[:300]


class Interpreter:
    """Runs a converted model on single images.

    Attributes:
        runtime: name and version of the interpreter.
        input: details of the input tensor: shape, dtype and index.

    Raises:
        RuntimeError: this interpreter lacks TensorFlow's kernels, which the model needs. From TensorFlow 2.20 on, no
            installed interpreter has them.
    """

    def __init__(self, converted: Converted, threads: int = 1) -> None:
        make, self.runtime = tf.lite.Interpreter, f"tf.lite {tf.__version__}"
        if not converted.tensorflow_kernels:
            with contextlib.suppress(ImportError):
                from ai_edge_litert.interpreter import Interpreter as LiteRT

                make, self.runtime = LiteRT, f"ai_edge_litert {metadata.version('ai-edge-litert')}"
        with warnings.catch_warnings(), silenced():  # tf.lite.Interpreter warns that it is deprecated
            warnings.simplefilter("ignore")
            self._interpreter = make(model_content=converted.content, num_threads=threads)
            self._interpreter.allocate_tensors()
        self.input = self._interpreter.get_input_details()[0]
        self._output = self._interpreter.get_output_details()[0]["index"]

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Logits [classes] of one image float32 [size, size, 3] in 0…255."""
        self._interpreter.set_tensor(self.input["index"], image[None])
        self._interpreter.invoke()
        return self._interpreter.get_tensor(self._output)[0]


def export_tflite(
    model: keras.Model,
    dataset: ImageData,
    folder: Path,
    source: str,
    allow_tensorflow_kernels: bool = False,
    seconds: float = math.inf,
) -> str:
    """Write both files, labels.txt and export.json to `folder`, check the files, and return the text to print.

    Args:
        model: from images [batch, size, size, 3] to logits.
        dataset: Keras and both files predict its test images, and the results are compared.
        folder: where the files are written.
        source: where the model comes from, for the record.
        allow_tensorflow_kernels: see `convert`.
        seconds: left before a deadline. Where they are few, fewer images are checked, and latencies not measured; both
            files are written whatever they take.

    Raises:
        UserError: as of `convert`, or a file cannot be written.
    """
    end = time.perf_counter() + MEASURING_SHARE * seconds
    files = {name: convert(model, name != FILES[0], allow_tensorflow_kernels) for name in FILES}
    for name, converted in files.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(converted.content)
    names = [*dataset.class_names, *(f"output {k}" for k in range(dataset.num_classes, model.output_shape[-1]))]
    write_text(folder / "labels.txt", "".join(f"{name}\n" for name in names))

    images, labels = checked_images(dataset)
    compared = _compare(model, files, images, labels, end)
    record = {
        "model": source,
        "dataset_name": dataset.name,
        "input": [1, *model.input_shape[1:]],
        "outputs": len(names),
        "test_images": dataset.test_count,
        "threads": cores(),
        **compared,
        "environment": environment(),
    }
    write_json(folder / "export.json", record)
    return "\n".join([f"{source} for TensorFlow Lite in {folder}:", *_report(record)])


def checked_images(dataset: ImageData, most: int = MAX_CHECKED_IMAGES) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` test images, evenly spread over the split.

    Returns:
        Images float32 [images, size, size, 3], and their labels [images].
    """
    chosen = np.unique(np.linspace(0, dataset.test_count - 1, min(most, dataset.test_count)).round().astype(int))
    images, labels, seen = [], [], 0
    for batch, batch_labels in ((one.inputs, one.targets) for one in dataset.test()):
        inside = chosen[(chosen >= seen) & (chosen < seen + len(batch_labels))] - seen
        images.append(batch.numpy()[inside])
        labels.append(batch_labels.numpy()[inside])
        seen += len(batch_labels)
    return np.concatenate(images), np.concatenate(labels)


def _compare(
    model: keras.Model, files: dict[str, Converted], images: np.ndarray, labels: np.ndarray, end: float = math.inf
) -> dict[str, Any]:
    """Accuracy, agreement with Keras and latency of one image, for Keras and for each file.

    Args:
        model: the model in Keras.
        files: the converted models by file name.
        images, labels: [images, size, size, 3] and [images].
        end: when to be done, by `time.perf_counter`; one image is checked in any case.

    Returns:
        Fields of export.json: for "keras" and each file the `RESULTS`, which are None if no interpreter can run the
        file, or if there was no time; the largest absolute logit by Keras; how many images were checked; and the number
        of calls behind each latency.
    """
    forward = forward_function(model, 1)
    predictors: dict[str, Callable[[np.ndarray], np.ndarray]] = {"keras": lambda image: forward(image[None])[0].numpy()}
    rows: dict[str, dict[str, Any]] = {name: dict.fromkeys(RESULTS) for name in ("keras", *files)}
    # Threads that wait for each other are slower on a busy machine and for small networks: measure both.
    timed = {("keras", "latency_all_threads_ms"): partial(predictors["keras"], images[0])}
    for name, converted in files.items():
        kernels = list(converted.tensorflow_kernels)
        rows[name] |= {"bytes": len(converted.content), "tensorflow_kernels": kernels, "runtime": None}
        try:
            interpreter = Interpreter(converted)
        except RuntimeError:
            if not kernels:
                raise
            continue
        rows[name]["runtime"], predictors[name] = interpreter.runtime, interpreter
        timed[name, "latency_one_thread_ms"] = partial(interpreter, images[0])
        timed[name, "latency_all_threads_ms"] = partial(Interpreter(converted, cores()), images[0])
    start, found = time.perf_counter(), dict[str, list[np.ndarray]]()
    order = np.random.default_rng(0).permutation(len(images))  # where time ends the check, all classes were checked
    for k in tqdm(order, "checking files", unit="image", dynamic_ncols=True):
        for name, predict in predictors.items():
            found.setdefault(name, []).append(predict(images[k]))
        if time.perf_counter() > start + CHECKING_SHARE * (end - start):
            break
    logits = {name: np.array(rows_of_images) for name, rows_of_images in found.items()}
    checked = len(logits["keras"])
    for name, own in logits.items():
        classes = own.argmax(axis=1)
        rows[name]["accuracy"] = float(np.mean(classes == labels[order[:checked]]))
        rows[name]["same_class_share"] = float(np.mean(classes == logits["keras"].argmax(axis=1)))
        rows[name]["largest_logit_difference"] = float(np.abs(own - logits["keras"]).max())
    turns, image_seconds = 0, (time.perf_counter() - start) / checked
    # A turn takes about twice as long as checking an image; each is preceded by another one that fills the caches.
    if time.perf_counter() + 4 * (2 + LATENCY_TURNS[0]) * image_seconds < end:
        turn_ms = float(measure_ms([*timed.values()], 2, warmup=1).sum(axis=1).min())
        seconds = min(LATENCY_SECONDS, end - time.perf_counter())
        turns = int(np.clip(seconds * 1e3 / (2 * turn_ms), *LATENCY_TURNS))
        medians = np.median(measure_ms([*timed.values()], turns, warmup=1), axis=0)
        for (name, key), median in zip(timed, medians, strict=True):
            rows[name][key] = float(median)
    largest = float(np.abs(logits["keras"]).max())
    return {**rows, "largest_logit": largest, "checked_images": checked, "latency_turns": turns}


def _report(record: dict[str, Any]) -> list[str]:
    """The lines of the printed table, and warnings; `record`: see export.json."""
    table = [["file", "MB", *(title for title, _ in RESULTS.values())]]
    for name in ("keras", *FILES):
        row = record[name]
        size = f"{row['bytes'] / 1e6:.2f}" if name in FILES else "-"
        results = ("-" if row[key] is None else format(row[key], form) for key, (_, form) in RESULTS.items())
        table.append([name, size, *results])
    runtime, turns = record[FILES[0]]["runtime"], record["latency_turns"]
    times = (
        f"times are medians of {turns} calls, on 1 or {record['threads']} threads{f', of {runtime}' if runtime else ''}"
    )
    if not turns:
        times = "the deadline left no time to measure times"
    lines = [
        *text_table(table),
        f"on {record['checked_images']} of {record['test_images']} test images; logits are up to "
        f"{record['largest_logit']:.3g}; {times}",
    ]
    for name in FILES:
        kernels = record[name]["tensorflow_kernels"]
        if kernels:
            line = f"{name} needs TensorFlow's kernels (SELECT_TF_OPS): {', '.join(kernels)}"
            if record[name]["accuracy"] is None:
                line += "; NOT checked: no interpreter on this machine has them (none has from TensorFlow 2.20 on)"
            lines.append(line)
    difference = record[FILES[0]]["largest_logit_difference"]
    if difference is not None and difference > 1e-3 * max(record["largest_logit"], 1.0):
        lines.append(f"warning: {FILES[0]} differs from Keras by more than rounding")
    return lines
