"""Exports a trained model to TensorFlow Lite (LiteRT) and checks that the files predict what the model predicts.

`model.tflite` is in float32, `model_dynamic.tflite` has 8-bit weights (dynamic-range quantisation: activations stay
float and are quantised at run time). Both take one image, float32 [1, size, size, 3] in 0…255, and return logits,
float32 [1, classes]. In `model_int8.tflite` all is int8, the image and the logits too; their scales and zero points are
in the file. They contain neither augmentation nor dropout. `labels.txt` names the classes.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import evenly
from elastic_trainer.evaluation.predictions import forward_function
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.networks.tflite import CALIBRATING_IMAGES, convert
from elastic_trainer.system.files import atomic_path, write_json, write_text
from elastic_trainer.system.machine import environment, silenced

MAX_CHECKED_IMAGES = 1000  # test images that each file predicts, evenly spread over the split
MIN_IMAGES = 100  # of which an accuracy says something; the table has none of fewer
CHECKING_SHARE = 0.5  # of the time left before a deadline; the rest is for writing
FLOAT, DYNAMIC, INT8 = "model.tflite", "model_dynamic.tflite", "model_int8.tflite"
RESULTS = {  # of Keras and each file: key in export.json -> title and format in the printed table
    "accuracy": ("accuracy", ".1%"),
    "same_class_share": ("same class as Keras", ".2%"),
    "largest_logit_difference": ("largest logit difference", ".2g"),
    "latency_ms": ("ms an image", ".2f"),
}


class Interpreter:
    """Runs a TensorFlow Lite file on single images, by LiteRT if it is installed; `runtime` is its name and version."""

    def __init__(self, content: bytes) -> None:
        make, self.runtime = tf.lite.Interpreter, f"tf.lite {tf.__version__}"
        with contextlib.suppress(ImportError):
            from ai_edge_litert.interpreter import Interpreter as LiteRT

            make, self.runtime = LiteRT, f"ai_edge_litert {metadata.version('ai-edge-litert')}"
        with warnings.catch_warnings(), silenced():  # tf.lite.Interpreter warns that it is deprecated
            warnings.simplefilter("ignore")
            self._interpreter = make(model_content=content, num_threads=1)
            self._interpreter.allocate_tensors()
        [self.input], [self.output] = self._interpreter.get_input_details(), self._interpreter.get_output_details()

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Logits [classes] of one image float32 [size, size, 3] in 0…255."""
        scale, zero = self.input["quantization"]  # 0 of a float32
        if scale:
            image = (image / scale + zero).round().clip(-128, 127).astype(np.int8)
        self._interpreter.set_tensor(self.input["index"], image[None])
        self._interpreter.invoke()
        logits = self._interpreter.get_tensor(self.output["index"])[0]
        scale, zero = self.output["quantization"]
        return np.float32(scale) * (logits.astype(np.float32) - zero) if scale else logits


def export_tflite(
    model: keras.Model,
    dataset: ImageData,
    folder: Path,
    source: str,
    seconds: float = math.inf,
    trained: ImageData | None = None,
    *,
    is_int8: bool = False,
) -> str:
    """Write the files, labels.txt and a record to `folder`, check the files, and return the text to print.

    Args:
        model: from images [batch, size, size, 3] to logits.
        dataset: Keras and the files predict its test images, and the results are compared.
        folder: where the files are written.
        source: where the model comes from, for the record.
        seconds: left before a deadline. If they are few, fewer images are checked; the files are written in any case.
        trained: the images that the model was trained on, if they are read.
        is_int8: write an int8 file, too. Images of `trained` calibrate it, else those of `dataset`.
    """
    end = time.perf_counter() + CHECKING_SHARE * seconds
    kinds: dict[str, bool | np.ndarray] = {FLOAT: False, DYNAMIC: True}
    notes = [f"{source} for TensorFlow Lite in {folder}:"]
    if is_int8:
        calibrating = trained or dataset
        kinds[INT8] = images = calibrating.images_to_calibrate(CALIBRATING_IMAGES)
        which = "training" if calibrating.train_count else "test"
        notes.append(f"{INT8} is calibrated on {len(images)} {which} images")
    files = dict(zip(kinds, convert(model, *kinds.values()), strict=True))
    for name, content in files.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(content)
    write_text(folder / "labels.txt", "".join(f"{name}\n" for name in dataset.class_names))
    checked = dataset.test_batch(evenly(dataset.test_count, MAX_CHECKED_IMAGES))
    record = {
        "model": source,
        "dataset_name": dataset.name,
        "input": [1, *model.input_shape[1:]],
        "outputs": dataset.num_classes,
        "test_images": dataset.test_count,
        **_compare(model, files, checked.inputs.numpy(), checked.targets.numpy(), end),
        "environment": environment(),
    }
    write_json(folder / ("export_int8.json" if is_int8 else "export.json"), record)
    return "\n".join([*notes, *_report(record, [*files])])


def _compare(
    model: keras.Model, files: dict[str, bytes], images: np.ndarray, labels: np.ndarray, end: float
) -> dict[str, Any]:
    """The `RESULTS` of Keras and of each of the `files` by name, and "checked_images", as export.json has them.

    Images are checked until `end`, by `time.perf_counter`, but at least one is. The latency is the median of single
    images, in the files on one thread.
    """
    forward = forward_function(model, 1)
    predictors: dict[str, Any] = {"keras": lambda image: forward(image[None])[0].numpy()}
    predictors |= {name: Interpreter(content) for name, content in files.items()}
    for predict in predictors.values():  # the first call compiles
        predict(images[0])
    order = np.random.default_rng(0).permutation(len(images))  # where time ends the check, all classes were checked
    logits = {name: list[np.ndarray]() for name in predictors}
    seconds = {name: list[float]() for name in predictors}
    for k in tqdm(order, "checking files", unit="image", dynamic_ncols=True):
        for name, predict in predictors.items():
            start = time.perf_counter()
            logits[name].append(predict(images[k]))
            seconds[name].append(time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    expected = np.array(logits["keras"])
    checked, rows = len(expected), dict[str, Any]()
    for name, found in logits.items():
        classes = np.argmax(found, axis=1)
        rows[name] = {
            "accuracy": float(np.mean(classes == labels[order[:checked]])),
            "same_class_share": float(np.mean(classes == expected.argmax(axis=1))),
            "largest_logit_difference": float(np.abs(found - expected).max()),
            "latency_ms": 1e3 * float(np.median(seconds[name])),
        }
    for name, content in files.items():
        rows[name] |= {"bytes": len(content), "runtime": predictors[name].runtime}
    return {**rows, "largest_logit": float(np.abs(expected).max()), "checked_images": checked}


def _report(record: dict[str, Any], files: list[str]) -> list[str]:
    """The lines of the printed table, and a warning, by what export.json contains."""
    is_shown = record["checked_images"] >= MIN_IMAGES
    shown = {key: about for key, about in RESULTS.items() if is_shown or key != "accuracy"}
    table = [["file", "MB", *(title for title, _ in shown.values())]]
    for name in ("keras", *files):
        row = record[name]
        size = f"{row['bytes'] / 1e6:.2f}" if name in files else "-"
        table.append([name, size, *(format(row[key], form) for key, (_, form) in shown.items())])
    largest, first = record["largest_logit"], record[FLOAT]
    line = f"checked on {record['checked_images']} images, with {first['runtime']}; logits are up to {largest:.3g}"
    lines = [*text_table(table), line]
    if first["largest_logit_difference"] > 1e-3 * max(largest, 1.0):
        lines.append(f"warning: {FLOAT} differs from Keras by more than rounding")
    return lines
