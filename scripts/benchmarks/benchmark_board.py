#!/usr/bin/env python
"""What does a step of a network's upper part cost in LiteRT and in TensorFlow, from features, on one and two threads?

Each number of threads has its own process, on as many cores, in which the steps alternate: TensorFlow's, and LiteRT's
in parts of several sizes. The learning rate is 0. A run of board_train.py on made-up photos gives the memory, and the
time from reading the photos to the end of the first step. The last line is one JSON object.

    python scripts/benchmarks/benchmark_board.py --model_name mobilenetv2 --alpha 0.35 --input_size 160
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import common
import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from common import Setting
from PIL import Image
from tqdm import tqdm

import models
from elastic_trainer.board.export import export_training
from elastic_trainer.board.signatures import TrainingFunctions
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.prefix import SplitStep, find_cut
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import CLIPPING, Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.wall_time import measure_ms

PART = 4  # of `board.export`
BATCHES, QUICK_BATCHES = (4, 16, 32), (4,)
WHEELS = ("numpy", "pillow", "ai-edge-litert")
CLASSES, PHOTOS = 10, 20  # of the run: classes, and photos of each


def upper_mask(model: keras.Model, first: str) -> np.ndarray:
    """Bool [N]: the tensors from the first on whose name has `first` in it. Raises `UserError` if there is none."""
    names = tensor_names(model)
    place = next((index for index, name in enumerate(names) if first in name), None)
    if place is None:
        raise UserError(f"--first {first}: no tensor has it in its name; they are {names[0]}, …, {names[-1]}")
    return np.arange(len(names)) >= place


def litert_calls(
    model: keras.Model, optimizer: Any, mask: np.ndarray, batch: int, part: int, threads: int
) -> tuple[Callable[[], Any], Callable[[], Any], dict[str, float]]:
    """A step, the features of one part, and what the file took to convert, and its size; all in LiteRT."""
    start = time.perf_counter()
    functions = TrainingFunctions(model, optimizer, [mask], part)
    content = functions.litert_file()
    about = {"megabytes": len(content) / 1e6, "convert_seconds": time.perf_counter() - start}
    interpreter = Interpreter(model_content=content, num_threads=threads)
    start_up, features, gradients, update = (
        interpreter.get_signature_runner(name) for name in ("start", "features", "gradients", "update")
    )
    start_up()
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (part, *model.input_shape[1:])).astype(np.float32)
    specs = functions.steps[0].signatures["gradients"].inputs
    inputs = {name: rng.random(spec.shape, np.float32) for name, spec in specs.items()}
    inputs |= {"labels": np.zeros(part, np.int32), "weights": np.full(part, 1 / batch, np.float32)}
    inputs |= {name: value for name, value in features(images=images).items() if name in inputs}

    def step() -> None:
        for _ in range(batch // part):
            gradients(**inputs)
        update(rate=np.zeros(1, np.float32))

    return step, partial(features, images=images), about


def measure_threads(
    network: Settings, first: str, rounds: int, batches: tuple[int, ...], threads: int
) -> list[dict[str, Any]]:
    """A row for each batch: medians in ms of steps and of the features of an image. Runs in a new process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    model = models.build(network)
    mask = upper_mask(model, first)
    rows = []
    for batch in batches:
        head = [len(mask) - 2, len(mask) - 1]
        optimizer = make_optimizer("sgd", 0.0, Settings.weight_decay, 1000, CLIPPING, head)
        optimizer.build(model.trainable_variables)
        step = TrainStep(ImageClassification(model), optimizer, batch, mask)
        cut = find_cut(step)
        if cut is None:
            raise UserError(f"--first {first}: nothing is frozen below it; name a tensor nearer to the output")
        split = SplitStep(step, cut)
        images = tf.random.uniform((batch, *model.input_shape[1:]), maxval=255)
        calls: dict[str, Callable[[], Any]] = {
            "tensorflow": partial(split, split.prefix(images), tf.zeros(batch, tf.int32)),
            "tensorflow features": partial(split.prefix, images[:PART]),
        }
        about = {}
        for part in sorted({PART, batch, 8} & {*range(batch + 1)}):
            calls[f"litert parts of {part}"], features, about[part] = litert_calls(
                model, optimizer, mask, batch, part, threads
            )
            if part == PART:
                calls["litert features"] = features
        times = measure_ms([*calls.values()], rounds, warmup=3)
        step_ms = dict(zip(calls, np.median(times, axis=0).tolist(), strict=True))
        ratios = {name: float(np.median(times[:, k] / times[:, 0])) for k, name in enumerate(calls) if "parts" in name}
        features_ms = {name: step_ms.pop(f"{name} features") / PART for name in ("litert", "tensorflow")}
        row: dict[str, Any] = {"threads": threads, "batch_size": batch, "step_over_tensorflow": ratios}
        rows.append({**row, "image_features_ms": features_ms, "step_ms": step_ms, "file": about[PART]})
    return rows


def run_on_board(network: Settings, first: str) -> dict[str, Any]:
    """Results of board_train.py on made-up photos at batch 16, and what must be installed for it."""
    model, rng = models.build(network), np.random.default_rng(0)
    names = [f"class {number}" for number in range(CLASSES)]
    settings = Settings(num_epochs=2, learning_rate=0.001, gradient_clipping=CLIPPING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = {"augment": "flip", "seed": 0, "test_fraction": 0.2}
        export_training(model, {"upper": upper_mask(model, first)}, settings, 16, names, folder / "board", recipe)
        for label in names:
            (folder / "photos" / label).mkdir(parents=True)
            for number in range(PHOTOS):
                pixels = rng.integers(0, 256, (network.input_size, network.input_size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / label / f"{number}.png")
        command = [sys.executable, f"{folder}/board/board_train.py", "--data_dir", f"{folder}/photos"]
        subprocess.run(command, check=True, capture_output=True)
        result = json.loads((folder / "board" / "trained" / "result.json").read_text())
    installed = {
        wheel: sum(Path(path.locate()).stat().st_size for path in metadata.files(wheel) or ()) / 1e6 for wheel in WHEELS
    }
    shown = {key: result[key] for key in ("peak_memory_mb", "first_step_seconds", "seconds", "steps")}
    return {**shown, "installed_mb": installed}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    batches, rows = QUICK_BATCHES if args.quick else BATCHES, list[dict[str, Any]]()
    for threads in tqdm((1, 2), "measuring", unit="process"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows += pool.submit(measure_threads, args.network, args.first, args.rounds, batches, threads).result()
    ratios = {f"batch {row['batch_size']}": min(row["step_over_tensorflow"].values()) for row in rows[: len(batches)]}
    about = {"first": args.first, "rounds": args.rounds, "step_over_tensorflow": ratios}
    return {**about, "rows": rows, "run": run_on_board(args.network, args.first)}


SETTINGS = {
    "rounds": Setting(35, 3, "alternating rounds"),
    "first": Setting("block_10_expand", "block_10_expand", "train the tensors from the first with this in its name on"),
}

if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
