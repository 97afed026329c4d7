"""What a board trains: a network, its photos, and the time it has."""

from __future__ import annotations

import functools
import math
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer import ElasticTraining, FeatureSums, freeze_batch_norm

HELD_OUT = 5  # one photo in HELD_OUT of a board tests the models of the fleet
Arrays = dict[str, np.ndarray]
Trained = tuple[Arrays, dict[str, float]]  # tensors, and what Flower calls metrics


class Photos(NamedTuple):
    """Images uint8 [n, size, size, 3] and labels int [n], to train and to test on."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def class_names(config: Mapping[str, Any]) -> list[str]:
    """Of the run's configuration; those of the digits by default."""
    return [name.strip() for name in config["classes"].split(",") if name.strip()] or [*"0123456789"]


def load_photos(config: Mapping[str, Any]) -> Photos:
    """The photos of a board: those in the folder `data`, with one subfolder a class, or its part of the digits.

    Raises:
        ValueError: there is no folder, or it has a class that the fleet does not know, or too few photos.
    """
    size = int(config["image-size"])
    if "data" in config:
        return _read_folder(Path(str(config["data"])), class_names(config), size)
    if config["classes"]:
        raise ValueError("--node-config: needs data, the folder of this board's photos")
    x, y = _digits(size)
    is_test = np.arange(len(y)) % HELD_OUT == 0
    parts, place = int(config.get("num-partitions", 1)), int(config.get("partition-id", 0))
    train = np.flatnonzero(~is_test)[split(y[~is_test], parts, float(config["uneven"]))[place]]
    test = np.flatnonzero(is_test)[place::parts]
    return Photos(x[train], y[train], x[test], y[test])


def split(labels: np.ndarray, parts: int, concentration: float) -> list[np.ndarray]:
    """Rows of the photos of each board, int arrays: each class is divided by a Dirichlet distribution."""
    rng, rows = np.random.default_rng(0), [list[int]() for _ in range(parts)]
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(rng.dirichlet([concentration] * parts)) * len(own)).astype(int)
        for part, some in zip(rows, np.split(own, ends[:-1]), strict=True):
            part.extend(some.tolist())
    return [np.array(sorted(part), int) for part in rows]


@functools.lru_cache(maxsize=1)
def _digits(size: int) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.repeat(np.round(digits.images[..., None] * 255 / 16), 3, axis=-1)
    if size != pixels.shape[1]:
        pixels = np.asarray(keras.ops.image.resize(pixels, (size, size)))
    return pixels.astype(np.uint8), digits.target


def _read_folder(folder: Path, names: list[str], size: int) -> Photos:
    """By its name, a photo is for testing or not, whatever else comes into the folder. Unreadable ones are left out."""
    unknown = [place.name for place in folder.iterdir() if place.is_dir() and place.name not in names]
    if unknown:
        raise ValueError(f"data: the fleet has no class '{unknown[0]}'; its classes are {', '.join(names)}")
    parts: tuple[list[tuple[np.ndarray, int]], ...] = ([], [])
    for label, name in enumerate(names):
        for path in sorted((folder / name).glob("*")):
            try:
                image = keras.utils.load_img(path, target_size=(size, size))
            except OSError as error:
                print(f"{path}: is left out: {error}", flush=True)
                continue
            is_test = zlib.crc32(os.fsencode(path.name)) % HELD_OUT == 0
            parts[is_test].append((keras.utils.img_to_array(image).astype(np.uint8), label))
    if not all(parts):
        raise ValueError(f"data: has {len(parts[0])} photos to train on and {len(parts[1])} to test on; give more")
    (x, y), (test_x, test_y) = (zip(*part, strict=True) for part in parts)
    return Photos(np.stack(x), np.array(y), np.stack(test_x), np.array(test_y))


def make_network(config: Mapping[str, Any]) -> keras.Model:
    """The fleet's network, which returns logits; its last layer is dense.

    One process keeps one network, since a simulation trains many boards in it.

    Raises:
        ValueError: there is no such model.
    """
    return _network(config["model"], int(config["image-size"]), len(class_names(config)), config["weights"])


@functools.lru_cache(maxsize=1)
def _network(name: str, size: int, classes: int, weights: str) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((size, size, 3), name="image")
    if name == "small":
        x = keras.layers.Rescaling(1 / 127.5, -1)(inputs)
        for k, filters in enumerate((32, 32, 64, 64)):
            x = keras.layers.Conv2D(filters, 3, 1 + k % 2, "same", activation="relu", name=f"conv_{k}")(x)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dense(128, activation="relu", name="hidden")(x)
    elif name == "mobilenetv2":
        backbone = keras.applications.MobileNetV2(
            (size, size, 3), alpha=0.35, include_top=False, weights=weights or None, pooling="avg"
        )
        x = freeze_batch_norm(backbone)(keras.layers.Rescaling(1 / 127.5, -1)(inputs))
    else:
        raise ValueError(f"model={name}: must be small or mobilenetv2")
    return keras.Model(inputs, keras.layers.Dense(classes, name="head")(x))


def get_arrays(model: keras.Model) -> Arrays:
    """The trainable tensors, float32, in the order of the network. Names are the same in each process."""
    return {f"{k:03d}/{tensor.name}": tensor.numpy() for k, tensor in enumerate(model.trainable_variables)}


def set_arrays(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises `KeyError` if one is not there."""
    for k, tensor in enumerate(model.trainable_variables):
        tensor.assign(arrays[f"{k:03d}/{tensor.name}"])


class _Clock(keras.callbacks.Callback):
    """Ends training so many seconds after its first step, which includes compiling."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._end, self.steps = seconds, math.inf, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now, self.steps = time.monotonic(), self.steps + 1
        if self.steps == 1:
            self._end = now + self._seconds
        if now >= self._end:
            self.model.stop_training = True


def train(model: keras.Model, photos: Photos, config: Mapping[str, Any], number: int) -> Trained:
    """Round `number`, from 1: train what a step of `rho` of a full one allows, by this board's own step times.

    It takes `seconds`. The learning rate falls by a cosine over the rounds. Returns the tensors that have trained, and
    the number of photos, steps, and the loss.
    """
    rate = float(config["learning-rate"]) * 0.5 * (1 + math.cos(math.pi * (number - 1) / int(config["rounds"])))
    rho, size, verbose = float(config["rho"]), int(config["batch-size"]), int("partition-id" not in config)
    before, clock = get_arrays(model), _Clock(float(config["seconds"]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=1.0), loss)
    elastic = ElasticTraining(rho, scheme="elastic_training_upper_part", verbose=verbose)
    callbacks = [elastic, clock] if rho < 1 else [clock]
    data = tf.data.Dataset.from_tensor_slices((photos.x, photos.y)).shuffle(len(photos.y)).repeat().batch(size)
    done = model.fit(data, steps_per_epoch=1_000_000, verbose=0, callbacks=callbacks)
    after = get_arrays(model)
    trained = {name: after[name] for name in after if not np.array_equal(after[name], before[name])}
    return trained, {"num-examples": len(photos.y), "steps": clock.steps, "loss": done.history["loss"][-1]}


def evaluate(model: keras.Model, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Loss and accuracy, and the number of photos."""
    logits = model.predict(x, batch_size=64, verbose=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits)
    return {"num-examples": len(y), "loss": float(loss), "accuracy": float(np.mean(logits.argmax(axis=1) == y))}


def feature_sums(model: keras.Model, photos: Photos) -> FeatureSums:
    """Of the photos that train."""
    below = keras.Model(model.input, model.layers[-1].input)
    features = below.predict(photos.x, batch_size=64, verbose=0)
    return FeatureSums.of(features, photos.y, model.output_shape[-1])


def with_head(arrays: Arrays, sums: FeatureSums) -> Arrays:
    """`arrays` with the head in closed form of all photos of these sums (Fed3R, arXiv 2406.01116)."""
    (kernel, bias), head = [*arrays][-2:], sums.head(shrinkage=0.1, scale=0.5)
    seen = sums.counts > 0
    biases = np.where(seen, head.bias, head.bias[seen].min())  # a board with the other classes may join later
    return {**arrays, kernel: head.kernel, bias: biases.astype(np.float32)}
