"""What server and boards send each other: its bytes, without pickle, and what a reply must contain (NumPy only).

    message: values; arrays                               reply: values; arrays
    hello: words, class_names, network; weights           ready: the fields of `About`
    sums: ; weights                                       sums: none, if there are none, says why; sums of features
    losses: seconds; kernels, biases                      losses: ; losses
    train: round, seconds, rate, changes; weights         trained: steps, REPORTED; changes
    test: ; weights                                       tested: test, test_images
    end: ; the best weights                               bye

Instead of each reply, "failed" may come, which says why. The sender of a reply may be anybody: the functions below that
read one raise `ValueError` for what cannot be.

Flower moves each array of a message on its own, so the arrays of a parcel travel as one: 160 tensors in 1.6 MB and as
many back take 0.8 s on one busy machine.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.errors import printable
from elastic_trainer.training.feature_sums import FeatureSums

KINDS = ("float16", "float32", "float64", "int32", "int64", "uint8", "bool")  # of values in arrays
MAX_HEADER = 1 << 26
MAX_REPORTED = 10_000_000  # images, steps, seconds; more are a mistake
# A change is too large if its norm is above MAX_CHANGE times that of its weights. Each weight counts as at least
# SMALL_WEIGHT: biases start at 0. A round of normal training changes weights by a few per cent.
MAX_CHANGE, SMALL_WEIGHT = 10.0, 0.1
MAX_FEATURE = 1e4  # of the last hidden layer; after normalisation or ReLU6 and pooling, features are below 100
SPEED = ("full_seconds", "head_seconds")  # of `About`
REPORTED = ("seconds", "predicted_step_ms", "step_ms", "loss", *SPEED)  # of a round, by its board; any may be missing
LEAST_SECONDS = 1e-9  # of a pass


@dataclass(frozen=True)
class Parcel:
    """A message or a reply.

    Attributes:
        kind: what is asked for, or of which kind the reply is.
        values: JSON types by name.
        arrays: by name, of one of `KINDS`.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The parcel as `from_bytes` reads it."""
        shapes = [[name, array.dtype.name, [*array.shape]] for name, array in self.arrays.items()]
        header = json.dumps([self.kind, self.values, shapes]).encode()
        contents = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return b"".join([len(header).to_bytes(4, "little"), header, *contents])

    @property
    def size(self) -> int:
        """Its bytes on the network."""
        return len(self.to_bytes())

    @classmethod
    def from_bytes(cls, content: bytes) -> Parcel:
        """What `to_bytes` wrote. Raises `ValueError` for anything else."""
        length = int.from_bytes(content[:4], "little")
        if not 0 < length <= min(len(content) - 4, MAX_HEADER):
            raise ValueError("it has no header")
        try:
            kind, values, shapes = json.loads(content[4 : 4 + length])
            place, arrays = 4 + length, {}
            for name, dtype, shape in shapes:
                if dtype not in KINDS or not all(isinstance(size, int) and size >= 0 for size in shape):
                    raise ValueError(f"{name} is of no known kind")
                count = prod(shape)
                arrays[str(name)] = np.frombuffer(content, dtype, count, place).reshape(shape)
                place += count * np.dtype(dtype).itemsize
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if place != len(content) or not isinstance(kind, str) or not isinstance(values, dict):
            raise ValueError("its contents do not fit its header")
        return cls(kind, values, arrays)


def failed(why: str) -> Parcel:
    """The reply that says why there is no other."""
    return Parcel("failed", {"why": why})


def reason(parcel: Parcel) -> str:
    """Why a board failed, in one line that is not too long."""
    return printable(str(parcel.values.get("why"))[:300])


class About(NamedTuple):
    """A board about itself: photos for training and testing, and what a pass over the former takes in seconds, with all
    tensors and with the head alone."""

    name: str
    images: int
    test_images: int
    full_seconds: float
    head_seconds: float


def about_of(parcel: Parcel) -> About:
    """A board's "ready"."""
    values = parcel.values
    full_seconds = _number(values, "full_seconds")
    return About(
        printable(str(values.get("name")))[:60],
        images_of(parcel),
        int(_number(values, "test_images")),
        full_seconds,
        _number(values, "head_seconds", LEAST_SECONDS, full_seconds),
    )


def with_speed(about: About, reported: Mapping[str, float | None]) -> About:
    """What is known of a board after a round of which it `reported` this; its speed may have changed."""
    full, head = (max(reported.get(name) or getattr(about, name), LEAST_SECONDS) for name in SPEED)
    return about._replace(full_seconds=full, head_seconds=min(head, full))


def images_of(parcel: Parcel) -> int:
    """How many photos a board says that it trains on."""
    return int(_number(parcel.values, "images", 1))


class Update(NamedTuple):
    """What a board has made of a round.

    Attributes:
        changes: of the tensors that it trained, by name.
        images, steps: of its round.
        reported: what the board says of `REPORTED`; None where it says nothing.
    """

    changes: dict[str, np.ndarray]
    images: int
    steps: int
    reported: Mapping[str, float | None] = {}


def update_of(parcel: Parcel, images: int, max_steps: int, weights: Mapping[str, np.ndarray]) -> Update:
    """A board's "trained".

    Args:
        parcel: the reply.
        images: of the board.
        max_steps: that it can have done in the round, by what it said of itself.
        weights: before the round, by name. Changes are of some of them, have their shapes, and are finite and not too
            large (`MAX_CHANGE`).
    """
    changes = {}
    for name, sent in parcel.arrays.items():
        if name not in weights:
            raise ValueError(f"the network has no tensor {name}")
        weight, change = weights[name], sent.astype(np.float32)
        if change.shape != weight.shape:
            raise ValueError(f"{name} has the shape {change.shape}, not {weight.shape}")
        if not np.isfinite(change).all():
            raise ValueError(f"{name} has a value that is not finite")
        norm, least = (float(np.linalg.norm(each.astype(np.float64))) for each in (change, weight))
        if not norm <= MAX_CHANGE * max(least, SMALL_WEIGHT * weight.size**0.5):
            raise ValueError(f"{name} changes by {norm:.2g}, more than {MAX_CHANGE:g} times its weights")
        changes[name] = change
    values = parcel.values
    reported = {name: None if values.get(name) is None else _number(values, name) for name in REPORTED}
    return Update(changes, images, int(_number(values, "steps", 1, max_steps)), reported)


class Result(NamedTuple):
    """Loss and accuracy of a model on the test photos of a board, and how many these are."""

    loss: float
    accuracy: float
    images: int


def result_of(parcel: Parcel, images: int) -> Result:
    """The results of a test in a board's reply; `images` are the most that count."""
    found = parcel.values.get("test")
    if not isinstance(found, dict):
        raise ValueError("it has no test")
    loss, accuracy = _number(found, "loss"), _number(found, "accuracy", 0, 1)
    return Result(loss, accuracy, min(int(_number(parcel.values, "test_images")), images))


def _number(values: Mapping[str, Any], name: str, low: float = 0, high: float = MAX_REPORTED) -> float:
    """The value of this name. Raises `ValueError` if it is no number from `low` to `high`."""
    value = values.get(name)
    if not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is {reprlib.repr(value)}")
    return value


def sums_arrays(prefix: str, sums: FeatureSums) -> dict[str, np.ndarray]:
    """Sums of features as arrays of a "sums". The scatter is symmetric, so half of it is enough."""
    half = sums.within[np.triu_indices(len(sums.within))]
    return {f"{prefix}counts": sums.counts, f"{prefix}means": sums.means, f"{prefix}within": half}


def sums_of(parcel: Parcel, prefix: str, classes: int, features: int, images: int) -> FeatureSums:
    """What `sums_arrays` made, of at most so many `images`."""
    if "none" in parcel.values:
        raise ValueError(printable(str(parcel.values["none"])[:200]))
    found = [parcel.arrays.get(f"{prefix}{name}", np.zeros(0)) for name in ("counts", "means", "within")]
    if [one.shape for one in found] != [(classes,), (classes, features), (features * (features + 1) // 2,)]:
        raise ValueError("its sums are of another network or of other classes")
    counts, means, half = found
    if counts.dtype.kind != "i" or not ((counts >= 0) & (counts <= images)).all() or counts.sum() > images:
        raise ValueError(f"its sums are not of its {images} photos")
    if not ((np.abs(means) <= MAX_FEATURE).all() and (np.abs(half) <= images * MAX_FEATURE**2).all()):
        raise ValueError("its sums are not finite, or too large")
    within = np.zeros((features, features), np.float32)
    within[np.triu_indices(features)] = half
    return FeatureSums(counts, means, within + np.triu(within, 1).T)


def losses_of(parcel: Parcel, shape: tuple[int, int]) -> np.ndarray | None:
    """The losses of heads on a board's photos that are held back, of this shape; None if it has no such photos."""
    losses = parcel.arrays.get("losses", np.zeros(0))
    return losses if losses.shape == shape and np.isfinite(losses).all() else None
