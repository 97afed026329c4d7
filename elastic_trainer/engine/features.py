"""Cached features: what the frozen prefix (`engine.prefix`) returns for each example, computed once.

A step that trains the upper part of a network starts from them: the forward pass below costs nothing. The paper
computes it in every step. Each step has one cut; a new selection needs new features.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.batches import Batch, Order, ShuffledData, Structure, block_rows
from elastic_trainer.engine.prefix import SplitStep, find_cut
from elastic_trainer.engine.step import TrainStep

Kinds = Sequence[tuple[tuple[int, ...], np.dtype]]  # shape and type of the features of one example, for each cut tensor


class Features:
    """The features of examples, in memory. An example, in one of its views, is a number below `count`.

    `split` returns them, and starts from them.
    """

    def __init__(self, split: SplitStep, count: int, kinds: Kinds) -> None:
        self.split = split
        self._values = [np.empty((count, *shape), dtype) for shape, dtype in kinds]  # pages come as they are written
        self._is_made = np.zeros(count, bool)

    @staticmethod
    def needed_mb(count: int, kinds: Kinds) -> float:
        """MB that the features of `count` numbers take."""
        return count * sum(dtype.itemsize * int(np.prod(shape)) for shape, dtype in kinds) / 1e6

    def missing(self, numbers: np.ndarray) -> list[int]:
        """Those of `numbers` that were not made."""
        found: list[int] = numbers[~self._is_made[numbers]].tolist()
        return found

    def make(self, numbers: np.ndarray, inputs: Structure) -> None:
        """Compute those of `numbers`, whose inputs are given."""
        for values, made in zip(self._values, self.split.prefix(inputs), strict=True):
            values[numbers] = made.numpy()
        self._is_made[numbers] = True

    def read(self, numbers: np.ndarray) -> list[tf.Tensor]:
        """Those of `numbers`, which were made: [n, …] for each cut tensor."""
        return [tf.constant(values[numbers]) for values in self._values]


class FeatureCache:
    """Decides whether the step that trains now starts from features of the training examples, and makes them.

    Missing features are computed for some later steps as well, since larger blocks cost less per row
    (docs/log/features.md). Without `data`, the training examples, none are ever kept.
    """

    def __init__(self, data: ShuffledData | None = None) -> None:
        self.data = data
        self._is_disabled = False  # which was reported
        self._features: Features | None = None
        self.megabytes = self.kept_mb = 0.0  # the most that they took so far, and those kept now, once all are made

    @property
    def split(self) -> SplitStep | None:
        """The step that starts from the features; None while none are kept."""
        return None if self._features is None else self._features.split

    @property
    def are_possible(self) -> bool:
        """Whether a step may get some: they were not found to be impossible."""
        return self.data is not None and self.data.view_count is not None and not self._is_disabled

    def adopt(self, step: TrainStep, are_wanted: bool = True, room_mb: float = inf) -> None:
        """Keep those that `step` starts from, if they are wanted and possible, and fit into `room_mb`.

        The reason why they are not possible is reported once.
        """
        self.drop()
        if self.data is None or self._is_disabled:
            return
        if self.data.view_count is None:
            self._report("--augment flip_rotate shows new views in every epoch")
            return
        cut = find_cut(step) if are_wanted and not step.trains_all else None
        if cut is not None:
            try:
                self._start(SplitStep(step, cut), self.data, room_mb)
            except ValueError as error:
                self._report(str(error))
        elif are_wanted and not step.trains_all:
            self._report("no layer before the first one that trains, or that draws random numbers, is frozen")

    def _start(self, split: SplitStep, data: ShuffledData, room_mb: float) -> None:
        """Make room for the features of all examples. Raises `ValueError` if that is not possible."""
        assert data.view_count is not None, "the number of views has no limit"
        self._views, count = data.view_count, data.train_count * data.view_count
        some = self._inputs(np.arange(min(max(data.batch_size, 2), data.train_count)) * self._views)
        self._block = max(min(block_rows(some), data.max_rows), data.batch_size)
        kinds = _kinds(split, some)
        megabytes, room_mb = Features.needed_mb(count, kinds), max(min(data.room_mb, room_mb), 0.0)
        if megabytes > room_mb:
            raise ValueError(f"features take {megabytes:.0f} MB of memory, and {room_mb:.0f} MB are available")
        self._features, self.kept_mb = Features(split, count, kinds), megabytes
        self.megabytes = max(megabytes, self.megabytes)

    def prepare(self, batch: Batch) -> float:
        """Compute the features of `batch` that are missing, and enough upcoming ones to fill a block; the seconds."""
        features, data = self._features, self.data
        if features is None or data is None:
            return 0.0
        start = time.perf_counter()
        missing = features.missing(self._numbers(batch.order))
        if missing:
            wanted = [*dict.fromkeys([*missing, *features.missing(self._numbers(batch.upcoming))])]
            numbers, rows = np.array(wanted[: max(self._block, len(missing))]), max(data.max_rows, 1)
            for some in np.split(numbers, range(rows, len(numbers), rows)):
                features.make(some, self._inputs(some))
        return time.perf_counter() - start

    def read(self, order: Order) -> list[tf.Tensor]:
        """The features of examples that are prepared: [n, …] for each cut tensor."""
        assert self._features is not None, "no features are kept"
        return self._features.read(self._numbers(order))

    def drop(self) -> None:
        """Keep none from now on."""
        self._features, self.kept_mb = None, 0.0

    def _numbers(self, order: Order) -> np.ndarray:
        return order.rows * self._views + order.views

    def _inputs(self, numbers: np.ndarray) -> Structure:
        assert self.data is not None
        return self.data.training_inputs(Order(numbers // self._views, numbers % self._views))

    def _report(self, why: str) -> None:
        """No features are kept from now on."""
        self._is_disabled = True
        tqdm.write(f"feature cache disabled: {why}")


def _kinds(split: SplitStep, inputs: Structure) -> Kinds:
    """The kinds of features of `inputs`. Raises `ValueError` if they depend on others of its batch."""
    values = [value.numpy() for value in split.prefix(inputs)]
    alone = split.prefix(tf.nest.map_structure(lambda part: tf.repeat(part[-1:], len(part), axis=0), inputs))
    for value, other in zip(values, alone, strict=True):
        has_rows = len(value) == len(other) == len(tf.nest.flatten(inputs)[0])
        if not has_rows or not np.allclose(other[0], value[-1], rtol=1e-2, atol=1e-3 * np.abs(value).max()):
            raise ValueError("the frozen layers compute an example's features from others of its batch, too")
    return [(value.shape[1:], value.dtype) for value in values]
