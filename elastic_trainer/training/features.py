"""Cached features: what the frozen prefix (`training.prefix`) returns for each training example, computed once.

A step that trains the upper part of a network starts from them, and the forward pass below it costs nothing; the paper
computes it in every step. One step has one cut, and another selection has other features. An example in one of its
views has a key, a number. Missing features are computed for some later steps as well, since larger blocks of small
examples take less time (docs/log/features.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.batches import Batch, Order, ShuffledData, Structure, block_rows
from elastic_trainer.training.prefix import SplitStep, find_cut, random_operation
from elastic_trainer.training.step import TrainStep


class Features:
    """The features of all training examples, in memory, for the step that trains now.

    Args:
        data: the training examples; without them no features are ever kept.
        in_float16: round them to float16, which halves the memory.

    Attributes:
        split: the step that starts from them; None while none are kept.
        megabytes: the most that they took so far.
    """

    def __init__(self, data: ShuffledData | None = None, in_float16: bool = False) -> None:
        self._data, self._in_float16 = data, in_float16
        self._reported: set[str] = set()
        self.split: SplitStep | None = None
        self._kept: list[np.ndarray] = []
        self.megabytes = 0.0

    @property
    def are_possible(self) -> bool:
        """Whether a step may get some: they were not found to be impossible."""
        return self._data is not None and self._data.view_count is not None and not self._reported

    @property
    def kept_mb(self) -> float:
        """MB that those kept now take, once all are made."""
        return sum(values.nbytes for values in self._kept) / 1e6

    def adopt(self, step: TrainStep, are_wanted: bool = True, room_mb: float = inf) -> None:
        """Keep those that `step` starts from, if they are wanted and possible, and fit into `room_mb`.

        Why they are not possible is said once, also where they are not wanted.
        """
        self.drop()
        if self._data is None or self._reported:
            return
        cut = find_cut(step)
        if cut is None:
            name = random_operation(step)
            if name is not None:
                self._report(f"the network draws random numbers before its last frozen layer, in {name}")
        elif self._data.view_count is None:
            self._report("--augment flip_rotate shows new views in every epoch")
        elif are_wanted:
            try:
                self._start(SplitStep(step, cut), self._data, room_mb)
            except ValueError as error:
                self._report(str(error))

    def _start(self, split: SplitStep, data: ShuffledData, room_mb: float) -> None:
        """Make room for the features of all examples. Raises `ValueError` if that is not possible."""
        assert data.view_count is not None, "the number of views has no limit"
        self._views, count = data.view_count, data.train_count * data.view_count
        some = self._inputs(np.arange(min(max(data.batch_size, 2), data.train_count)) * self._views)
        self._block = max(min(block_rows(some), data.max_rows), data.batch_size)
        self._pass_rows = max(data.max_rows, 1)
        kinds = _kinds(split, some, self._in_float16)
        megabytes = count * sum(dtype.itemsize * int(np.prod(shape)) for shape, dtype in kinds) / 1e6
        room_mb = max(min(data.room_mb, room_mb), 0.0)
        if megabytes > room_mb:
            raise ValueError(f"features take {megabytes:.0f} MB of memory, and {room_mb:.0f} MB are available")
        self._kept = [np.empty((count, *shape), dtype) for shape, dtype in kinds]  # pages come as they are written
        self._is_made = np.zeros(count, bool)
        self.split, self.megabytes = split, max(megabytes, self.megabytes)

    def prepare(self, batch: Batch) -> float:
        """Compute the features of `batch` that are missing, and of so many upcoming examples that a block is full.

        Returns:
            Seconds that it took. If features can no longer be kept, which is reported, `split` is None afterwards.
        """
        if self.split is None:
            return 0.0
        start = time.perf_counter()
        missing = self._missing(batch.order)
        if missing:
            wanted = [*dict.fromkeys([*missing, *self._missing(batch.upcoming)])]
            keys = np.array(wanted[: max(self._block, len(missing))])
            try:
                with np.errstate(over="raise"):
                    for some in np.split(keys, range(self._pass_rows, len(keys), self._pass_rows)):
                        for kept, value in zip(self._kept, self.split.prefix(self._inputs(some)), strict=True):
                            kept[some] = value.numpy()
                self._is_made[keys] = True
            except FloatingPointError as error:
                self._report(f"{error} in float16")
                self.drop()
        return time.perf_counter() - start

    def read(self, order: Order) -> list[tf.Tensor]:
        """The features of examples that are prepared: [n, …] for each cut tensor."""
        assert self.split is not None, "no features are kept"
        keys = self._keys(order)
        kept = zip(self._kept, self.split.dtypes, strict=True)
        return [tf.cast(tf.constant(values[keys]), dtype) for values, dtype in kept]

    def drop(self) -> None:
        """Keep none from now on."""
        self.split, self._kept = None, []

    def room_for_test(self) -> tuple[int, float]:
        """The number of test examples, and MB of memory that are left for their features."""
        assert self._data is not None, "no features are kept"
        return self._data.test_count, self._data.room_mb - self.megabytes

    def _keys(self, order: Order) -> np.ndarray:
        return order.rows * self._views + order.views

    def _missing(self, order: Order) -> list[int]:
        keys = self._keys(order)
        missing: list[int] = keys[~self._is_made[keys]].tolist()
        return missing

    def _inputs(self, keys: np.ndarray) -> Structure:
        assert self._data is not None
        return self._data.training_inputs(Order(keys // self._views, keys % self._views))

    def _report(self, why: str) -> None:
        """Say once why no features are kept."""
        if why not in self._reported:
            self._reported.add(why)
            tqdm.write(f"feature cache disabled: {why}")


def _kinds(split: SplitStep, inputs: Structure, in_float16: bool) -> Sequence[tuple[tuple[int, ...], np.dtype]]:
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
