"""Exports a trained model to TensorFlow Lite (LiteRT) and checks that the files predict what the model predicts.

Two files: `model.tflite` in float32, and `model_dynamic.tflite` with 8-bit weights (dynamic-range quantisation:
activations stay float and are quantised at run time). Both take one image, float32 [1, size, size, 3] in 0…255, and
return logits, float32 [1, classes]. They contain neither augmentation nor dropout. `labels.txt` names the classes.

The model is traced here and converted from the concrete function. This works alike from TensorFlow 2.16 to 2.21 with
every version of Keras 3; `from_keras_model` calls methods that some versions of Keras 3 do not have.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError, first_line
from elastic_trainer.evaluation.predictions import forward_function
from elastic_trainer.files import atomic_path, write_json, write_text
from elastic_trainer.machine import cores, environment, silenced
from elastic_trainer.timing.wall_time import measure_ms

CHECKED_IMAGES = 1000  # at most; test images that each file predicts, evenly spread over the split
LATENCY_SECONDS = 5.0  # of measuring, as far as the bounds on the turns allow
LATENCY_TURNS = (10, 100)  # minimum and maximum
FILES = ("model.tflite", "model_dynamic.tflite")


@dataclass(frozen=True)
class Converted:
    """A TensorFlow Lite model.

    Attributes:
        content: bytes of the file.
        tensorflow_kernels: operations that only TensorFlow's kernels ("Flex") support; empty if none.
    """

    content: bytes
    tensorflow_kernels: tuple[str, ...]


def convert(model: keras.Model, quantise: bool) -> Converted:
    """Convert the inference pass of `model`, from images [1, size, size, 3] in 0…255 to logits [1, classes].

    The first attempt allows TensorFlow Lite's kernels only. If it fails, a second one allows TensorFlow's kernels too.

    Args:
        model: with a fixed input size.
        quantise: store the weights in 8 bits.

    Raises:
        UserError: the converter does not support the model.
    """
    module = tf.Module()
    # A concrete function does not keep its variables alive.
    module.kept = [variable.value for variable in model.variables]

    @tf.function(input_signature=[tf.TensorSpec((1, *model.input_shape[1:]), tf.float32, name="image")])
    def infer(image: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": model(image, training=False)}

    module.infer = infer
    error: Exception | None = None
    for kernels in ((tf.lite.OpsSet.TFLITE_BUILTINS,), (tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS)):
        try:
            with silenced():  # the converter logs each of its passes
                converter = tf.lite.TFLiteConverter.from_concrete_functions([infer.get_concrete_function()], module)
                converter.target_spec.supported_ops = list(kernels)
                if quantise:
                    converter.optimizations = [tf.lite.Optimize.DEFAULT]
                if len(kernels) > 1:
                    converter._experimental_lower_tensor_list_ops = False  # as its error message advises
                content = converter.convert()
        except Exception as failure:  # ConverterError is not public, and tracing a custom layer may raise anything
            error = failure
            continue
        found = set(re.findall(rb"Flex([A-Z]\w+)", content)) if len(kernels) > 1 else set()
        return Converted(content, tuple(sorted(name.decode() for name in found)))
    assert error is not None
    raise UserError(
        f"--export tflite: TensorFlow Lite cannot express this model: {_why_not_converted(error)}"
    ) from error


def _why_not_converted(error: Exception) -> str:
    """The operations that the converter lacks, if its error message names them; else the first line of the message."""
    text = str(error).strip()
    missing = re.search(r"(?:Custom|Select TF|TF Select|Flex) ops: *([\w, ]+)", text)
    if missing:
        return f"it has no kernel for {missing.group(1).strip()}"
    return first_line(error)[:300]


class Interpreter:
    """Runs a converted model on single images.

    Attributes:
        runtime: name and version of the interpreter.
        input: details of the input tensor: shape, dtype and index.
    """

    def __init__(self, converted: Converted, threads: int = 1) -> None:
        make, self.runtime = _interpreter_class(bool(converted.tensorflow_kernels))
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


def interpreter_for(converted: Converted, threads: int = 1) -> Interpreter | None:
    """An interpreter for `converted`, or None if none is available.

    From TensorFlow 2.20 on, no installed interpreter has TensorFlow's kernels.
    """
    try:
        return Interpreter(converted, threads)
    except RuntimeError:
        if converted.tensorflow_kernels:
            return None
        raise


def _interpreter_class(with_tensorflow_kernels: bool) -> tuple[Callable[..., Any], str]:
    """LiteRT's interpreter, or TensorFlow's if LiteRT is not installed or TensorFlow's kernels are needed."""
    if not with_tensorflow_kernels:
        try:
            from importlib import metadata

            from ai_edge_litert.interpreter import Interpreter as LiteRT
        except ImportError:
            pass
        else:
            return LiteRT, f"ai_edge_litert {metadata.version('ai-edge-litert')}"
    return tf.lite.Interpreter, f"tf.lite {tf.__version__}"


def export_tflite(model: keras.Model, dataset: ImageData, folder: Path, source: str) -> str:
    """Write both files, labels.txt and export.json to `folder`, check the files, and return the text to print.

    Args:
        model: from images [batch, size, size, 3] to logits.
        dataset: Keras and both files predict its test images, and the results are compared.
        folder: where the files are written.
        source: where the model comes from, for the record.

    Raises:
        UserError: the converter does not support the model, or a file cannot be written.
    """
    files = {name: convert(model, quantise=name != FILES[0]) for name in FILES}
    for name, converted in files.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(converted.content)
    names = [*dataset.class_names, *(f"output {k}" for k in range(dataset.num_classes, model.output_shape[-1]))]
    write_text(folder / "labels.txt", "".join(f"{name}\n" for name in names))

    images, labels = checked_images(dataset)
    rows, largest_logit, turns = _compare(model, files, images, labels)
    record = {
        "model": source,
        "dataset_name": dataset.name,
        "input": [1, *model.input_shape[1:]],
        "outputs": len(names),
        "checked_images": len(images),
        "test_images": dataset.test_count,
        "largest_logit": largest_logit,
        "latency_turns": turns,
        "threads": cores(),
        **{name.replace("Keras", "keras"): row for name, row in rows.items()},
        "environment": environment(),
    }
    write_json(folder / "export.json", record)
    return "\n".join([f"{source} for TensorFlow Lite in {folder}:", *_report(rows, record)])


def _compare(
    model: keras.Model, files: dict[str, Converted], images: np.ndarray, labels: np.ndarray
) -> tuple[dict[str, dict[str, Any]], float, int]:
    """Accuracy, agreement with Keras and latency of Keras and of each file.

    Args:
        model: the model in Keras.
        files: the converted models by file name.
        images, labels: [images, size, size, 3] and [images].

    Returns:
        One row for "Keras" and one for each file (results are None if no interpreter can run the file), the largest
        absolute logit by Keras, and the number of calls behind each latency.
    """
    available = {name: interpreter_for(converted) for name, converted in files.items()}
    interpreters = {name: interpreter for name, interpreter in available.items() if interpreter}
    logits = _predict_all(model, interpreters, images)
    # Threads that wait for each other are slower on a busy machine and for small networks: report both latencies.
    all_threads = {name: Interpreter(files[name], cores()) for name in interpreters}
    latency_ms, turns = _latency_ms(model, interpreters, all_threads, images[0])
    rows: dict[str, dict[str, Any]] = {
        name: {
            "accuracy": float(np.mean(found.argmax(axis=1) == labels)),
            "largest_logit_difference": float(np.abs(found - logits["Keras"]).max()),
            "same_class_share": float(np.mean(found.argmax(axis=1) == logits["Keras"].argmax(axis=1))),
            **latency_ms[name],
        }
        for name, found in logits.items()
    }
    for name, converted in files.items():
        row = rows.setdefault(name, dict.fromkeys(rows["Keras"]))
        row |= {"bytes": len(converted.content), "tensorflow_kernels": list(converted.tensorflow_kernels)}
        row["runtime"] = getattr(available[name], "runtime", None)
    return rows, float(np.abs(logits["Keras"]).max()), turns


def checked_images(dataset: ImageData, most: int = CHECKED_IMAGES) -> tuple[np.ndarray, np.ndarray]:
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


def _predict_all(model: keras.Model, interpreters: dict[str, Interpreter], images: np.ndarray) -> dict[str, np.ndarray]:
    """Logits [images, classes] by Keras and by each file."""
    forward = forward_function(model, 1)
    predictors: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Keras": lambda image: forward(image[None])[0].numpy()}
    predictors |= interpreters
    logits: dict[str, list[np.ndarray]] = {name: [] for name in predictors}
    for image in tqdm(images, unit="image", dynamic_ncols=True, desc="checking the files"):
        for name, predictor in predictors.items():
            logits[name].append(predictor(image))
    return {name: np.array(rows) for name, rows in logits.items()}


def _latency_ms(
    model: keras.Model, one_thread: dict[str, Interpreter], all_threads: dict[str, Interpreter], image: np.ndarray
) -> tuple[dict[str, dict[str, float | None]], int]:
    """Latency of one image in Keras (compiled, all threads) and in each file.

    Returns:
        Medians in ms by name and by key of export.json, and the number of calls behind each median.
    """
    forward = forward_function(model, 1)
    tensor = tf.constant(image[None])
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("Keras", "latency_all_threads_ms"): lambda: forward(tensor).numpy()
    }
    for key, interpreters in (("latency_one_thread_ms", one_thread), ("latency_all_threads_ms", all_threads)):
        runs |= {(name, key): functools.partial(interpreter, image) for name, interpreter in interpreters.items()}
    for run in runs.values():
        run()  # compiles
    turn_ms = float(measure_ms([*runs.values()], 2, warmup=1).sum(axis=1).min())
    turns = int(np.clip(LATENCY_SECONDS * 1e3 / (2 * turn_ms), *LATENCY_TURNS))
    times = np.median(measure_ms([*runs.values()], turns, warmup=1), axis=0)
    latency: dict[str, dict[str, float | None]] = {
        name: {"latency_one_thread_ms": None, "latency_all_threads_ms": None} for name, _ in runs
    }
    for (name, key), median in zip(runs, times, strict=True):
        latency[name][key] = float(median)
    return latency, turns


def _report(rows: dict[str, dict[str, Any]], record: dict[str, Any]) -> list[str]:
    """The lines of the printed table, and warnings."""
    form = "{:<20} {:>8} {:>9} {:>20} {:>25} {:>12} {:>14}".format
    many = f"ms, {record['threads']} threads"
    titles = ("MB", "accuracy", "same class as Keras", "largest logit difference", "ms, 1 thread", many)
    lines = [form("file", *titles)]
    for name, row in rows.items():
        cells = [f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else "-"]
        for key, spec in (
            ("accuracy", ".1%"),
            ("same_class_share", ".2%"),
            ("largest_logit_difference", ".2g"),
            ("latency_one_thread_ms", ".2f"),
            ("latency_all_threads_ms", ".2f"),
        ):
            itself = name == "Keras" and key in ("same_class_share", "largest_logit_difference")
            cells.append("-" if itself or row[key] is None else format(row[key], spec))
        lines.append(form(name, *cells))
    runtime = next((f" of {row['runtime']}" for row in rows.values() if row.get("runtime")), "")
    lines.append(
        f"on {record['checked_images']} of {record['test_images']} test images; logits are up to "
        f"{record['largest_logit']:.3g}; times are medians of {record['latency_turns']} turns{runtime}"
    )
    for name in FILES:
        row = rows[name]
        if row["tensorflow_kernels"]:
            needs = f"{name} needs TensorFlow's kernels (SELECT_TF_OPS): {', '.join(row['tensorflow_kernels'])}"
            unchecked = (
                "; no interpreter on this machine has them (none does from TensorFlow 2.20 on): the file was written, "
                "but NOT checked"
            )
            lines.append(needs + (unchecked if row["accuracy"] is None else ""))
    difference = rows[FILES[0]]["largest_logit_difference"]
    if difference is not None and difference > 1e-3 * max(record["largest_logit"], 1.0):
        lines.append(f"warning: {FILES[0]} differs from Keras by more than rounding explains")
    return lines
