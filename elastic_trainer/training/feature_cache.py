"""The features of one prefix (`training.prefix`): computed when a step first needs them, then read.

An example in one of its views has a key, a number. Missing features are computed for some later steps as well, since
larger blocks of small examples take less time (docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, Order, ShuffledData, Structure
from elastic_trainer.training.feature_store import FileStore, Kind, MemoryStore
from elastic_trainer.training.prefix import SplitStep

LEAST_SAVED = 0.1  # of the time that the prefix takes in every step; less is within the error of the measurement
MAX_ROWS, MAX_VALUES = 64, 16 * 224 * 224 * 3  # of a block; values are those of its inputs


class FeatureCache:
    """The features of all training examples in all views.

    Args:
        split: its prefix computes them.
        data: the training examples; has a limited number of views.
        folder: of a file for features that exceed `data.room_mb`.
        in_float16: round them to float16, which halves the room.

    Attributes:
        split: the step that starts from the features.
        megabytes: that the features of all examples take.

    Raises:
        OSError: a file is needed and there is no room for it.
        ValueError: the prefix does not treat each example by itself.
    """

    def __init__(self, split: SplitStep, data: ShuffledData, folder: Path, in_float16: bool = False) -> None:
        assert data.view_count is not None, "the number of views has no limit"
        self.split, self._data, self._views = split, data, data.view_count
        count = data.train_count * self._views
        some = self._inputs(np.arange(min(max(data.batch_size, 2), data.train_count)) * self._views)
        values = sum(int(np.prod(part.shape[1:])) for part in tf.nest.flatten(some))
        self._block = max(min(max(MAX_VALUES // values, 1), MAX_ROWS), data.batch_size)
        kinds = _kinds(split, some, in_float16)
        self.megabytes = count * sum(dtype.itemsize * int(np.prod(shape)) for shape, dtype in kinds) / 1e6
        in_memory = self.megabytes <= data.room_mb
        self._store = MemoryStore(count, kinds) if in_memory else FileStore(count, kinds, folder)
        self._is_made = np.zeros(count, bool)

    def keys(self, order: Order) -> np.ndarray:
        """The keys, int64 [n], of training examples."""
        return order.rows * self._views + order.views

    def prepare(self, batch: Batch, upcoming: Order) -> None:
        """Compute the features of `batch` that are missing, and of so many of the `upcoming` that a block is full.

        Raises:
            OSError: the disk is full.
            FloatingPointError: a feature is beyond the range of float16.
        """
        missing = self._missing(self.keys(batch.order))
        if missing:
            later = self._missing(self.keys(upcoming))
            wanted = [*dict.fromkeys([*missing, *later])]
            self._write(np.array(wanted[: max(self._block, len(missing))]))

    def read(self, keys: np.ndarray) -> list[tf.Tensor]:
        """The features of `keys`, which are prepared: [n, …] for each cut tensor."""
        return as_tensors(self._store, keys, self.split.dtypes)

    def check_saving(self, upcoming: Order, steps: int) -> None:
        """Measure whether steps take less time with features that are kept, computing those included.

        Args:
            upcoming: the examples of the next steps.
            steps: for which the features are of use.

        Raises:
            ValueError: they do not.
        """
        keys = self.keys(upcoming)
        batch, block = keys[: self._data.batch_size], keys[: self._block]
        step_seconds = min(_seconds(lambda: self._computed(batch)) for _ in range(2))
        example_seconds = _seconds(lambda: self._write(block)) / len(block)
        if example_seconds > step_seconds / len(batch):
            self._block, example_seconds = len(batch), step_seconds / len(batch)
        making_seconds = self._data.distinct_views(steps) * example_seconds / steps
        kept_seconds = _seconds(lambda: self.read(batch)) + making_seconds
        if kept_seconds > (1 - LEAST_SAVED) * step_seconds:
            raise ValueError(
                f"computing them once and reading them takes {1e3 * kept_seconds:.2g} ms a step, computing them in "
                f"every step {1e3 * step_seconds:.2g} ms"
            )

    def _missing(self, keys: np.ndarray) -> list[int]:
        missing: list[int] = keys[~self._is_made[keys]].tolist()
        return missing

    def _inputs(self, keys: np.ndarray) -> Structure:
        return self._data.training_inputs(Order(keys // self._views, keys % self._views))

    def _computed(self, keys: np.ndarray) -> list[np.ndarray]:
        return [value.numpy() for value in self.split.prefix(self._inputs(keys))]

    def _write(self, keys: np.ndarray) -> None:
        with np.errstate(over="raise"):
            self._store.write(keys, self._computed(keys))
        self._is_made[keys] = True


def as_tensors(store: MemoryStore | FileStore, rows: np.ndarray, dtypes: Sequence[Any]) -> list[tf.Tensor]:
    """What `store` has as `rows`, int [n]: a tensor [n, …] for each of its arrays, cast to `dtypes`."""
    return [tf.cast(tf.constant(value), dtype) for value, dtype in zip(store.read(rows), dtypes, strict=True)]


def _kinds(split: SplitStep, inputs: Structure, in_float16: bool) -> list[Kind]:
    """Shape and type of the features of one example. Raises `ValueError` if they depend on others of its batch."""
    others = tf.nest.map_structure(_with_others, inputs)
    count = len(tf.nest.flatten(inputs)[0])
    try:
        values, of_others = split.prefix(inputs), split.prefix(others)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError("the frozen layers need batches of one size") from error
    kinds = []
    for value, other in zip((each.numpy() for each in values), of_others, strict=True):
        of_each = value.shape[:1] == (count,)
        if not of_each or not np.allclose(other[-1], value[0], rtol=1e-2, atol=1e-3 * np.abs(value).max()):
            raise ValueError("the frozen layers compute an example's features from others of its batch, too")
        halves = in_float16 and value.dtype == np.float32
        kinds.append((value.shape[1:], np.dtype(np.float16) if halves else value.dtype))
    return kinds


def _with_others(part: tf.Tensor) -> tf.Tensor:
    """The first example of `part` [n, …] as the last, behind others than before."""
    others = tf.repeat(part[1:2], len(part) - 1, axis=0)
    return tf.concat([others * 0.5 if part.dtype.is_floating else others, part[:1]], axis=0)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
