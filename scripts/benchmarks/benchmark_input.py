#!/usr/bin/env python
"""Does training wait for its images? Images a second, and the share of a step spent waiting for the next batch.

Three ways take turns: images read once and kept in memory, the same kept in a file, and images decoded anew in every
epoch (what reading them once saves). Each is measured alone, as fast as it goes, and then beside steps of full
training, on photos of 1280×960 made up for it, or on --dataset_name image_folder --data_dir DIR. Draws both and prints
one JSON object as its last line.

    python scripts/benchmark_input.py --model_name mobilenetv2 --alpha 1 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np

import utils
from elastic_trainer.machine import environment
from elastic_trainer.timing.wall_time import measure_ms

PHOTO_SIZE = (1280, 960)
CLASSES = 4


def make_photos(folder: Path, count: int) -> None:
    """`count` JPEGs of coloured clouds for training and a few for the test, in classes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, number in (("train", count), ("test", 2 * CLASSES)):
        for k in range(number):
            path = folder / split / f"class {k % CLASSES}" / f"{k}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            clouds = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            clouds.resize(PHOTO_SIZE, Image.Resampling.BICUBIC).save(path, quality=90)


def decoding_every_time(source: Any, size: int, batch_size: int) -> Any:
    """The batches of one epoch, each image decoded when it is asked for, on all cores."""
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


def alone(batches: Iterable[Any], images: int) -> float:
    """Images a second when nothing is done with them."""
    begin = time.perf_counter()
    for _ in batches:
        pass
    return images / (time.perf_counter() - begin)


def beside_training(batches: Iterable[Any], step: Any, most: int) -> tuple[float, list[float]]:
    """(share of the time spent waiting for batches, times of the steps in ms), without the first batch."""
    iterator = iter(batches)
    step(*next(iterator))
    waiting, step_ms = 0.0, []
    for _ in range(most):
        begin = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            break
        waiting += time.perf_counter() - begin
        step_ms.append(float(measure_ms([partial(step, *batch)], 1)[0, 0]))
    return waiting / (waiting + sum(step_ms) / 1e3), step_ms


def draw(title: str, speeds: dict[str, float], waits: dict[str, float], stem: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for column, (values, label) in enumerate(((speeds, "images a second"), (waits, "waiting (% of a step)"))):
        axes = figure.add_subplot(1, 2, column + 1, xlabel=label)
        bars = axes.barh([*values], [*values.values()], color="#0072b2")
        axes.bar_label(bars, fmt="{:,.2g}" if column else "{:,.0f}", padding=2, fontsize=8)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        if column:
            axes.set_yticks([])
    utils.save_figure(figure, stem)


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_input.py",
        __doc__,
        rounds={"type": int, "default": 5, "help": "turns of each way (default: %(default)s)"},
        steps={"type": int, "default": 40, "help": "training steps in each turn (default: %(default)s)"},
        photos={"type": int, "default": 200, "help": "photos that are made up (default: %(default)s)"},
    )
    if args.quick:
        args.rounds, args.steps, args.photos = 1, 4, 24
    utils.load_tensorflow()

    import data
    import models
    from elastic_trainer.datasets.sources import find
    from elastic_trainer.timing.measuring import compile_steps

    with tempfile.TemporaryDirectory() as folder:
        place = args.data_dir or Path(folder) / "photos"
        if args.data_dir is None:
            make_photos(place, args.photos)
        size, batch_size, cache = network.input_size, network.batch_size, Path(folder) / "cache"
        begin = time.perf_counter()
        in_memory = data.load("image_folder", size, batch_size, data_dir=place)
        reading_seconds = time.perf_counter() - begin
        in_file = data.load("image_folder", size, batch_size, data_dir=place, cache_dir=cache, image_memory=0)
        source = find("image_folder", place)
        ways = {
            "read once, in memory": lambda: in_memory.train(0),
            "read once, in a file": lambda: in_file.train(0),
            "decoded in every epoch": lambda: decoding_every_time(source, size, batch_size),
        }
        network.num_classes = in_memory.num_classes
        model = models.build(network)
        [(step, _)] = compile_steps(model, network, [None])
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        waits: dict[str, list[float]] = {name: [] for name in ways}
        steps: dict[str, list[float]] = {name: [] for name in ways}
        images = in_memory.steps_per_epoch * batch_size
        for _ in range(args.rounds):
            for name, batches in ways.items():
                speeds[name].append(alone(batches(), images))
                share, step_ms = beside_training(batches(), step, args.steps)
                waits[name].append(100 * share)
                steps[name] += step_ms

    median_speeds = {name: float(np.median(values)) for name, values in speeds.items()}
    median_waits = {name: float(np.median(values)) for name, values in waits.items()}
    title, stem, measured = common.measured_network(network, "input", args.output)
    draw(title, median_speeds, median_waits, stem)
    record = {
        **measured,
        "photos": "given" if args.data_dir else f"{args.photos} of {PHOTO_SIZE[0]}×{PHOTO_SIZE[1]}, made up",
        "images": images,
        "rounds": args.rounds,
        "reading_seconds": reading_seconds,
        "images_per_second": median_speeds,
        "waiting_percent": median_waits,
        "step_ms": {name: float(np.median(values)) for name, values in steps.items()},
        "environment": environment(),
    }
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(record))


if __name__ == "__main__":
    utils.run_cli(main)
