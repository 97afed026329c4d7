#!/usr/bin/env python
"""Does training wait for its images? Images a second, and the share of a step spent waiting for the next batch.

Three ways to read alternate: images read once and kept in memory, images read once and kept in a file, and images
decoded again in every epoch, which shows what reading them once saves. Each is measured alone at full speed, and then
next to steps of full training. The photos of 1280×960 are generated; --dataset_name image_folder --data_dir DIR takes
others. The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_input.py --model_name mobilenetv2 --alpha 1 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from common import Setting

import utils
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.settings import NetworkSettings

PHOTO_SIZE = (1280, 960)
CLASSES = 4


def make_photos(folder: Path, count: int) -> None:
    """Write `count` JPEGs of coloured clouds for training and a few for the test, in classes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, number in (("train", count), ("test", 2 * CLASSES)):
        for k in range(number):
            path = folder / split / f"class {k % CLASSES}" / f"{k}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            clouds = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            clouds.resize(PHOTO_SIZE, Image.Resampling.BICUBIC).save(path, quality=90)


def decoding_every_time(source: Any, size: int, batch_size: int) -> Any:
    """The batches of one epoch of `source`; each image is decoded when it is needed, on all cores."""
    import tensorflow as tf

    from elastic_trainer.datasets import decoding

    examples = [*source.train.examples()]
    count = len(examples) // batch_size * batch_size
    order = np.random.default_rng(0).permutation(len(examples))[:count]

    def decode(k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.numpy_function(lambda k: decoding.decode(examples[k][0], size), [k], tf.uint8)
        label = tf.numpy_function(lambda k: np.int32(examples[k][1]), [k], tf.int32)
        return tf.cast(tf.ensure_shape(image, (size, size, 3)), tf.float32), tf.ensure_shape(label, ())

    decoded = tf.data.Dataset.from_tensor_slices(order).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return decoded.batch(batch_size, drop_remainder=True).prefetch(2)


def made(batches: Iterable[Batch]) -> Iterator[tuple[Any, Any]]:
    """The images and labels of the batches."""
    return ((batch.inputs, batch.targets) for batch in batches)


def images_per_second(batches: Iterable[Any], images: int) -> float:
    """How fast `images` images in `batches` are read when nothing is done with them."""
    start = time.perf_counter()
    for _ in batches:
        pass
    return images / (time.perf_counter() - start)


def train_on(batches: Iterable[Any], step: Any, most: int) -> tuple[float, list[float]]:
    """Train at most `most` steps after the first: (share of the time spent waiting for batches, step times in ms)."""
    iterator = iter(batches)
    step(*next(iterator))
    waiting, step_ms = 0.0, []
    for _ in range(most):
        start = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            break
        waiting += time.perf_counter() - start
        step_ms.append(float(measure_ms([partial(step, *batch)], 1)[0, 0]))
    return waiting / (waiting + sum(step_ms) / 1e3), step_ms


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Read the photos in each way, alone and while training; medians over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        photos = args.data_dir or Path(folder) / "photos"
        if args.data_dir is None:
            make_photos(photos, args.photos)
        measured = measure_ways(args.network, photos, Path(folder) / "cache", args.rounds, args.steps)
    made_up = f"{args.photos} of {PHOTO_SIZE[0]}×{PHOTO_SIZE[1]}, made up"
    return {"photos": "given" if args.data_dir else made_up, "rounds": args.rounds, **measured}


def measure_ways(network: NetworkSettings, photos: Path, cache: Path, rounds: int, steps: int) -> dict[str, Any]:
    """What is measured of the images in `photos`; `cache` is for decoded images."""
    import data
    import models
    from elastic_trainer.datasets.sources import find
    from elastic_trainer.timing.measuring import compile_steps, idle_training

    def load(**memory: Any) -> ImageData:
        return data.load("image_folder", network.input_size, network.batch_size, data_dir=photos, **memory)

    start = time.perf_counter()
    in_memory = load()
    reading_seconds = time.perf_counter() - start
    in_file = load(cache_dir=cache, image_memory=0)
    source = find("image_folder", photos)
    ways: dict[str, Callable[[], Any]] = {
        "read once, in memory": lambda: made(in_memory.train(0)),
        "read once, in a file": lambda: made(in_file.train(0)),
        "decoded in every epoch": lambda: decoding_every_time(source, network.input_size, network.batch_size),
    }
    network = replace(network, num_classes=in_memory.num_classes)
    [(step, _)] = compile_steps(*idle_training(models.build(network), network), [None])
    images = in_memory.steps_per_epoch * network.batch_size
    speeds, waits, step_ms = ({name: list[float]() for name in ways} for _ in range(3))
    for _ in range(rounds):
        for name, batches in ways.items():
            speeds[name].append(images_per_second(batches(), images))
            share, times = train_on(batches(), step, steps)
            waits[name].append(100 * share)
            step_ms[name] += times

    def medians(values: dict[str, list[float]]) -> dict[str, float]:
        return {name: float(np.median(each)) for name, each in values.items()}

    return {
        "images": images,
        "reading_seconds": reading_seconds,
        "images_per_second": medians(speeds),
        "waiting_percent": medians(waits),
        "step_ms": medians(step_ms),
    }


SETTINGS = {
    "rounds": Setting(5, 1, "measurements of each way"),
    "steps": Setting(40, 4, "training steps in each measurement"),
    "photos": Setting(200, 24, "photos to generate"),
}


if __name__ == "__main__":
    utils.run_cli(lambda: common.run_benchmark("benchmark_input", __doc__, SETTINGS, measure))
