#!/usr/bin/env python
"""What does a step of a network's upper part cost in LiteRT and in TensorFlow, from features, on one and two threads?

Each number of threads has a process of its own, in which the steps alternate: TensorFlow's, and LiteRT's in parts of
several sizes. The learning rate is 0. A run of board_train.py on made-up photos gives the memory, and the time from
reading the photos to the end of the first step. The last line is one JSON object.

    python scripts/benchmarks/benchmark_board.py --model_name mobilenetv2 --alpha 0.35 --input_size 160
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
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
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.board.export import export_training
from elastic_trainer.extensions.board.signatures import TrainingFile
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import CLIPPING, PAPER, NetworkSettings, Settings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.wall_time import measure_ms
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.prefix import SplitStep, find_cut
from elastic_trainer.training.step import TrainStep

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
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """A step and the features of one part, in LiteRT; and what the file took to convert, and its size."""
    start = time.perf_counter()
    functions = TrainingFile(model, optimizer, [mask], part)
    content = functions.content
    about = {"convert_seconds": time.perf_counter() - start, "megabytes": len(content) / 1e6}
    interpreter = Interpreter(model_content=content, num_threads=threads)
    runners = {name: interpreter.get_signature_runner(name) for name in functions.signatures}
    runners["start"]()
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (part, *model.input_shape[1:])).astype(np.float32)
    inputs = {
        name: rng.random(spec.shape, np.float32)
        for name, spec in functions.steps[0].signatures["gradients"].inputs.items()
    }
    inputs |= {"labels": np.zeros(part, np.int32), "weights": np.full(part, 1 / batch, np.float32)}
    inputs |= {name: value for name, value in runners["features"](images=images).items() if name in inputs}
    rate = np.zeros(1, np.float32)

    def step() -> None:
        for _ in range(batch // part):
            runners["gradients"](**inputs)
        runners["update"](rate=rate)

    return {"step": step, "features": partial(runners["features"], images=images)}, about


def measure_threads(
    network: NetworkSettings, first: str, rounds: int, batches: tuple[int, ...], threads: int
) -> list[dict[str, Any]]:
    """A row for each batch: medians in ms of steps and of the features of an image. Runs in a new process."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    model = models.build(network)
    mask = upper_mask(model, first)
    head = len(mask) - 2
    rows = []
    for batch in batches:
        optimizer = make_optimizer("sgd", 0.0, PAPER["weight_decay"], 1000, CLIPPING, [head, head + 1])
        optimizer.build(model.trainable_variables)
        step = TrainStep(ImageClassification(model), optimizer, batch, mask)
        cut = find_cut(step)
        if cut is None:
            raise UserError(f"--first {first}: nothing is frozen below it; name a tensor nearer to the output")
        split = SplitStep(step, cut)
        images = tf.random.uniform((batch, *model.input_shape[1:]), maxval=255)
        labels, features = tf.zeros(batch, tf.int32), split.prefix(images)
        calls: dict[str, Callable[[], Any]] = {
            "tensorflow": partial(split, features, labels),
            "tensorflow features": partial(split.prefix, images[:PART]),
        }
        about = {}
        for part in sorted({PART, batch, 8} & {*range(batch + 1)}):
            own, about[part] = litert_calls(model, optimizer, mask, batch, part, threads)
            calls[f"litert parts of {part}"] = own["step"]
            if part == PART:
                calls["litert features"] = own["features"]
        times = measure_ms([*calls.values()], rounds, warmup=3)
        found = dict(zip(calls, np.median(times, axis=0).tolist(), strict=True))
        ratios = {name: float(np.median(times[:, k] / times[:, 0])) for k, name in enumerate(calls) if "parts" in name}
        row: dict[str, Any] = {"threads": threads, "batch_size": batch, "step_over_tensorflow": ratios}
        row["features_over_tensorflow"] = found["litert features"] / found["tensorflow features"]
        row["image_features_ms"] = {
            name.split()[0]: found.pop(f"{name.split()[0]} features") / PART for name in ("litert", "tensorflow")
        }
        rows.append({**row, "step_ms": found, "file": about[PART]})
    return rows


def run_on_board(network: NetworkSettings, first: str) -> dict[str, Any]:
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
    kept = ("peak_memory_mb", "first_step_seconds", "seconds", "steps")
    return {**{key: result[key] for key in kept}, "installed_mb": installed}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    rows = []
    context = multiprocessing.get_context("spawn")
    batches = QUICK_BATCHES if args.quick else BATCHES
    for threads in tqdm((1, 2), "measuring", unit="process"):
        with ProcessPoolExecutor(1, context) as pool:
            rows += pool.submit(measure_threads, args.network, args.first, args.rounds, batches, threads).result()
    ratios = {
        f"batch {row['batch_size']}": min(row["step_over_tensorflow"].values()) for row in rows if row["threads"] == 1
    }
    return {
        "first": args.first,
        "rounds": args.rounds,
        "step_over_tensorflow": ratios,
        "rows": rows,
        "run": run_on_board(args.network, args.first),
    }


SETTINGS = {
    "rounds": Setting(35, 3, "alternating rounds"),
    "first": Setting("block_10_expand", "block_10_expand", "train the tensors from the first with this in its name on"),
}

if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
