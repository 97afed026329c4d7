"""Exports a trained model to TensorFlow Lite (LiteRT) and checks that the files predict what the model predicts.

Two files: `model.tflite` in float32, and `model_dynamic.tflite` with 8-bit weights (dynamic-range quantisation:
activations stay float and are quantised at run time). Both take one image, float32 [1, size, size, 3] in 0…255, and
return logits, float32 [1, classes]. They contain neither augmentation nor dropout. `labels.txt` names the classes.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.evaluation.predictions import forward_function, output_names
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.networks.tflite import convert
from elastic_trainer.system.files import atomic_path, write_json, write_text
from elastic_trainer.system.machine import cores, environment, silenced
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


class Interpreter:
    """Runs a TensorFlow Lite file on single images, by LiteRT if it is installed; `runtime` is its name and version."""

    def __init__(self, content: bytes, threads: int = 1) -> None:
        make, self.runtime = tf.lite.Interpreter, f"tf.lite {tf.__version__}"
        with contextlib.suppress(ImportError):
            from ai_edge_litert.interpreter import Interpreter as LiteRT

            make, self.runtime = LiteRT, f"ai_edge_litert {metadata.version('ai-edge-litert')}"
        with warnings.catch_warnings(), silenced():  # tf.lite.Interpreter warns that it is deprecated
            warnings.simplefilter("ignore")
            self._interpreter = make(model_content=content, num_threads=threads)
            self._interpreter.allocate_tensors()
        self.input = self._interpreter.get_input_details()[0]
        self._output = self._interpreter.get_output_details()[0]["index"]

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Logits [classes] of one image float32 [size, size, 3] in 0…255."""
        self._interpreter.set_tensor(self.input["index"], image[None])
        self._interpreter.invoke()
        return self._interpreter.get_tensor(self._output)[0]


def export_tflite(model: keras.Model, dataset: ImageData, folder: Path, source: str, seconds: float = math.inf) -> str:
    """Write both files, labels.txt and export.json to `folder`, check the files, and return the text to print.

    Args:
        model: from images [batch, size, size, 3] to logits.
        dataset: Keras and both files predict its test images, and the results are compared.
        folder: where the files are written.
        source: where the model comes from, for the record.
        seconds: left before a deadline. If they are few, fewer images are checked, and latencies are not measured; both
            files are written in any case.
    """
    end = time.perf_counter() + MEASURING_SHARE * seconds
    files = dict(zip(FILES, convert(model, False, True), strict=True))
    for name, content in files.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(content)
    names = output_names(dataset.class_names, model.output_shape[-1])
    write_text(folder / "labels.txt", "".join(f"{name}\n" for name in names))
    record = {
        "model": source,
        "dataset_name": dataset.name,
        "input": [1, *model.input_shape[1:]],
        "outputs": len(names),
        "test_images": dataset.test_count,
        "threads": cores(),
        **_compare(model, files, *checked_images(dataset), end),
        "environment": environment(),
    }
    write_json(folder / "export.json", record)
    return "\n".join([f"{source} for TensorFlow Lite in {folder}:", *_report(record)])


def checked_images(dataset: ImageData, most: int = MAX_CHECKED_IMAGES) -> tuple[np.ndarray, np.ndarray]:
    """Up to `most` test images, evenly spread over the split: float32 [images, size, size, 3], and labels [images]."""
    chosen = np.unique(np.linspace(0, dataset.test_count - 1, min(most, dataset.test_count)).round().astype(int))
    images, labels, seen = [], [], 0
    for batch in dataset.test():
        inside = chosen[(chosen >= seen) & (chosen < seen + len(batch))] - seen
        images.append(batch.inputs.numpy()[inside])
        labels.append(batch.targets.numpy()[inside])
        seen += len(batch)
    return np.concatenate(images), np.concatenate(labels)


def _compare(
    model: keras.Model, files: dict[str, bytes], images: np.ndarray, labels: np.ndarray, end: float
) -> dict[str, Any]:
    """Accuracy, agreement with Keras and latency of one image, for Keras and each of the `files` by name.

    Images are checked until half of the time before `end`, by `time.perf_counter`, but at least one is.

    Returns:
        Fields of export.json: for "keras" and each file the `RESULTS`, where latencies are None if there was no time;
        the largest absolute logit by Keras; how many images were checked; and the number of calls behind each latency.
    """
    forward = forward_function(model, 1)
    predictors: dict[str, Any] = {"keras": lambda image: forward(image[None])[0].numpy()}
    predictors |= {name: Interpreter(content) for name, content in files.items()}
    for predict in predictors.values():  # the first call compiles: the bar would expect the same of all
        predict(images[0])
    start, logits = time.perf_counter(), {name: list[np.ndarray]() for name in predictors}
    order = np.random.default_rng(0).permutation(len(images))  # where time ends the check, all classes were checked
    for k in tqdm(order, "checking files", unit="image", dynamic_ncols=True):
        for name, predict in predictors.items():
            logits[name].append(predict(images[k]))
        if time.perf_counter() > start + CHECKING_SHARE * (end - start):
            break
    expected = np.array(logits["keras"])
    checked = len(expected)
    image_seconds = (time.perf_counter() - start) / checked
    rows: dict[str, dict[str, Any]] = {name: dict.fromkeys(RESULTS) for name in predictors}
    for name, found in logits.items():
        classes = np.argmax(found, axis=1)
        rows[name]["accuracy"] = float(np.mean(classes == labels[order[:checked]]))
        rows[name]["same_class_share"] = float(np.mean(classes == expected.argmax(axis=1)))
        rows[name]["largest_logit_difference"] = float(np.abs(found - expected).max())
    for name, content in files.items():
        rows[name] |= {"bytes": len(content), "runtime": predictors[name].runtime}
    # Threads that wait for each other are slower on a busy machine and for small networks: measure both.
    timed = {("keras", "latency_all_threads_ms"): partial(predictors["keras"], images[0])}
    for name, content in files.items():
        timed[name, "latency_one_thread_ms"] = partial(predictors[name], images[0])
        timed[name, "latency_all_threads_ms"] = partial(Interpreter(content, cores()), images[0])
    turns = 0
    # A turn takes about twice as long as checking an image; each is preceded by another one that fills the caches.
    if time.perf_counter() + 4 * (2 + LATENCY_TURNS[0]) * image_seconds < end:
        turn_ms = float(measure_ms([*timed.values()], 2, warmup=1).sum(axis=1).min())
        seconds = min(LATENCY_SECONDS, end - time.perf_counter())
        turns = int(np.clip(seconds * 1e3 / (2 * turn_ms), *LATENCY_TURNS))
        medians = np.median(measure_ms([*timed.values()], turns, warmup=1), axis=0)
        for (name, key), median in zip(timed, medians, strict=True):
            rows[name][key] = float(median)
    return {**rows, "largest_logit": float(np.abs(expected).max()), "checked_images": checked, "latency_turns": turns}


def _report(record: dict[str, Any]) -> list[str]:
    """The lines of the printed table, and a warning, by what export.json contains."""
    table = [["file", "MB", *(title for title, _ in RESULTS.values())]]
    for name in ("keras", *FILES):
        row = record[name]
        size = f"{row['bytes'] / 1e6:.2f}" if name in FILES else "-"
        results = ("-" if row[key] is None else format(row[key], form) for key, (_, form) in RESULTS.items())
        table.append([name, size, *results])
    times = "the deadline left no time to measure times"
    if record["latency_turns"]:
        times = f"times are medians of {record['latency_turns']} calls, on 1 or {record['threads']} threads"
        times += f", of {record[FILES[0]]['runtime']}"
    lines = [
        *text_table(table),
        f"on {record['checked_images']} of {record['test_images']} test images; logits are up to "
        f"{record['largest_logit']:.3g}; {times}",
    ]
    if record[FILES[0]]["largest_logit_difference"] > 1e-3 * max(record["largest_logit"], 1.0):
        lines.append(f"warning: {FILES[0]} differs from Keras by more than rounding")
    return lines
