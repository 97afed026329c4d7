"""Cached features: what the frozen prefix (`engine.prefix`) returns for each example, computed once.

A step that trains the upper part of a network starts from them: the forward pass below costs nothing. The paper
computes it in every step. Each step has one cut; a new selection needs new features.
"""

from __future__ import annotations

import time
from math import inf

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.batches import Batch, Order, ShuffledData, Structure, block_rows
from elastic_trainer.engine.prefix import SplitStep, find_cut
from elastic_trainer.engine.step import TrainStep


class FeatureCache:
    """Decides whether the step that trains now starts from features of the training examples, and makes them.

    Missing features are computed for some later steps as well, since larger blocks cost less per row
    (docs/log/features.md). Without `data`, the training examples, none are ever kept. An example, in one of its views,
    is a number.

    Attributes:
        split: the step that starts from the features; None while none are kept.
        megabytes, kept_mb: the most that they took so far, and those kept now, once all are made.
    """

    def __init__(self, data: ShuffledData | None = None) -> None:
        self._data = data
        self._is_disabled = False  # which was reported
        self.split: SplitStep | None = None
        self.megabytes = self.kept_mb = 0.0

    @property
    def are_possible(self) -> bool:
        """Whether a step may get some: they were not found to be impossible."""
        return self._data is not None and self._data.view_count is not None and not self._is_disabled

    def adopt(self, step: TrainStep, are_wanted: bool = True, room_mb: float = inf) -> None:
        """Keep those that `step` starts from, if they are wanted and possible, and fit into `room_mb`.

        The reason why they are not possible is reported once.
        """
        self.drop()
        if self._data is None or self._is_disabled:
            return
        try:
            if self._data.view_count is None:
                raise ValueError("--augment flip_rotate shows new views in every epoch")
            if are_wanted and not step.trains_all:
                self._start(step, self._data, self._data.view_count, room_mb)
        except ValueError as why:
            self._is_disabled = True
            tqdm.write(f"feature cache disabled: {why}")

    def _start(self, step: TrainStep, data: ShuffledData, views: int, room_mb: float) -> None:
        """Make room for the features of all examples. Raises `ValueError` if that is not possible."""
        cut = find_cut(step)
        if cut is None:
            raise ValueError("no layer before the first one that trains, or that draws random numbers, is frozen")
        self._views, count, split = views, data.train_count * views, SplitStep(step, cut)
        some = self._inputs(np.arange(min(max(data.batch_size, 2), data.train_count)) * views)
        self._block = max(min(block_rows(some), data.max_rows), data.batch_size)
        values = _checked_features(split, some)
        megabytes, room_mb = count * sum(one[0].nbytes for one in values) / 1e6, max(min(data.room_mb, room_mb), 0.0)
        if megabytes > room_mb:
            raise ValueError(f"features take {megabytes:.0f} MB of memory, and {room_mb:.0f} MB are available")
        self._values = [
            np.empty((count, *one.shape[1:]), one.dtype) for one in values
        ]  # pages come as they are written
        self._is_made, self.split = np.zeros(count, bool), split
        self.kept_mb, self.megabytes = megabytes, max(megabytes, self.megabytes)

    def prepare(self, batch: Batch) -> float:
        """Compute the features of `batch` that are missing, and enough upcoming ones to fill a block; the seconds."""
        if self.split is None or self._data is None:
            return 0.0
        start, numbers = time.perf_counter(), self._numbers(batch.order)
        missing = numbers[~self._is_made[numbers]].tolist()
        if missing:
            later = self._numbers(batch.upcoming)
            wanted = [*dict.fromkeys([*missing, *later[~self._is_made[later]].tolist()])]
            numbers, rows = np.array(wanted[: max(self._block, len(missing))]), max(self._data.max_rows, 1)
            for some in np.split(numbers, range(rows, len(numbers), rows)):
                for values, made in zip(self._values, self.split.prefix(self._inputs(some)), strict=True):
                    values[some] = made.numpy()
                self._is_made[some] = True
        return time.perf_counter() - start

    def read(self, order: Order) -> list[tf.Tensor]:
        """The features of examples that are prepared: [n, …] for each cut tensor."""
        numbers = self._numbers(order)
        return [tf.constant(values[numbers]) for values in self._values]

    def drop(self) -> None:
        """Keep none from now on."""
        self.split, self._values, self.kept_mb = None, list[np.ndarray](), 0.0

    def _numbers(self, order: Order) -> np.ndarray:
        return order.rows * self._views + order.views

    def _inputs(self, numbers: np.ndarray) -> Structure:
        assert self._data is not None
        return self._data.training_inputs(Order(numbers // self._views, numbers % self._views))


def _checked_features(split: SplitStep, inputs: Structure) -> list[np.ndarray]:
    """The features of `inputs`. Raises `ValueError` if they depend on others of its batch."""
    values = [value.numpy() for value in split.prefix(inputs)]
    alone = split.prefix(tf.nest.map_structure(lambda part: tf.repeat(part[-1:], len(part), axis=0), inputs))
    for value, other in zip(values, alone, strict=True):
        has_rows = len(value) == len(other) == len(tf.nest.flatten(inputs)[0])
        if not has_rows or not np.allclose(other[0], value[-1], rtol=1e-2, atol=1e-3 * np.abs(value).max()):
            raise ValueError("the frozen layers compute an example's features from others of its batch, too")
    return values
