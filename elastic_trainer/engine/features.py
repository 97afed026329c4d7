"""Cached features: what the frozen prefix (`engine.prefix`) returns for each example, computed once; and validation.

A step that trains the upper part of a network starts from them, and so does validation: the forward pass below costs
nothing. The paper computes it in every step. Each step has one cut; a new selection needs new features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.batches import NOTHING, Batch, Order, ShuffledData, Structure, block_rows
from elastic_trainer.engine.prefix import SplitStep, find_cut
from elastic_trainer.engine.step import BatchFunction, TrainStep, as_number
from elastic_trainer.engine.task import Task
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm


class FeatureCache:
    """Decides whether the step that trains now starts from features of the training examples, and makes them.

    Missing features are computed for some later steps as well, since larger blocks cost less per row
    (docs/log/features.md). Without `data`, the training examples, none are ever kept. An example, in one of its views,
    is a number. Where memory is little, fewer views are kept; they stand for the others, too.

    Attributes:
        split: the step that starts from the features; None while none are kept.
        variables: those that it trains.
        megabytes, kept_mb: the most that they took so far, and those kept now, once all are made.
        seconds: that computing features took in all.
    """

    def __init__(self, data: ShuffledData | None = None) -> None:
        self.data = data
        self._is_disabled = False  # which was reported
        self.split: SplitStep | None = None
        self.variables: Sequence[keras.Variable] = ()
        self.megabytes = self.kept_mb = self.seconds = 0.0

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
        try:
            if self.data.view_count is None:
                raise ValueError("--augment flip_rotate shows new views in every epoch")
            if are_wanted and not step.trains_all:
                self._start(step, self.data, room_mb)
        except ValueError as why:
            self._is_disabled = True
            tqdm.write(f"feature cache disabled: {why}")

    def _start(self, step: TrainStep, data: ShuffledData, room_mb: float) -> None:
        """Make room for the features of all examples. Raises `ValueError` if that is not possible."""
        cut = find_cut(step)
        if cut is None:
            raise ValueError("no layer before the first one that trains, or that draws random numbers, is frozen")
        split, rows = SplitStep(step, cut), np.arange(min(max(data.batch_size, 2), data.train_count))
        some = data.training_inputs(Order(rows, np.zeros_like(rows)))
        self._block = max(min(block_rows(some), data.max_rows), data.batch_size)
        values = _checked_features(split, some)
        self._examples = data.train_count
        view_mb = self._examples * sum(one[0].nbytes for one in values) / 1e6
        room_mb = max(min(data.room_mb, room_mb), 0.0)
        self._views = data.kept_views(view_mb, room_mb)
        count, megabytes = self._examples * self._views, view_mb * self._views
        if megabytes > room_mb:
            raise ValueError(f"features take {megabytes:.0f} MB of memory, and {room_mb:.0f} MB are available")
        # View after view: memory pages come as they are written, and views that are never shown take none.
        self._values = [np.empty((count, *one.shape[1:]), one.dtype) for one in values]
        self._is_made, self.split, self.variables = np.zeros(count, bool), split, step.variables
        self.kept_mb, self.megabytes = megabytes, max(megabytes, self.megabytes)

    def prepare(self, order: Order, upcoming: Order = NOTHING) -> float:
        """Compute the features of examples that are missing, and enough upcoming ones to fill a block; the seconds."""
        if self.split is None or self.data is None:
            return 0.0
        start, numbers = time.perf_counter(), self._numbers(order)
        missing = numbers[~self._is_made[numbers]].tolist()
        if missing:
            later = self._numbers(upcoming)
            wanted = [*dict.fromkeys([*missing, *later[~self._is_made[later]].tolist()])]
            numbers, rows = np.array(wanted[: max(self._block, len(missing))]), max(self.data.max_rows, 1)
            for some in np.split(numbers, range(rows, len(numbers), rows)):
                for values, made in zip(self._values, self.split.prefix(self._inputs(some)), strict=True):
                    values[some] = made.numpy()
                self._is_made[some] = True
        seconds = time.perf_counter() - start
        self.seconds += seconds
        return seconds

    @property
    def missing_share(self) -> float:
        """The share of the examples without features of their first view; 1 where none are kept."""
        return 1.0 if self.split is None else 1.0 - float(self._is_made[: self._examples].mean())

    def read(self, order: Order) -> list[tf.Tensor]:
        """The features of examples that are prepared: [n, …] for each cut tensor."""
        numbers = self._numbers(order)
        return [tf.constant(values[numbers]) for values in self._values]

    def cut(self, function: BatchFunction, order: Order) -> SplitStep | None:
        """`function` of a batch from the features on; None if it needs others. They are compared on those of `order`.

        Its `variables` must be these.
        """
        cut = find_cut(function) if self.split is not None else None
        if cut is None:
            return None
        split, _ = SplitStep(function, cut), self.prepare(order)
        kept, needed = self.read(order), split.prefix(self._inputs(self._numbers(order)))
        is_same = [one.shape for one in kept] == [one.shape for one in needed] and all(
            np.allclose(one, other, 1e-2, 1e-3 * np.abs(other).max()) for one, other in zip(kept, needed, strict=True)
        )
        return split if is_same else None

    def drop(self) -> None:
        """Keep none from now on."""
        self.split, self.variables, self._values, self.kept_mb = None, (), list[np.ndarray](), 0.0

    def _numbers(self, order: Order) -> np.ndarray:
        return order.rows + order.views % self._views * self._examples

    def _inputs(self, numbers: np.ndarray) -> Structure:
        assert self.data is not None
        return self.data.training_inputs(Order(numbers % self._examples, numbers // self._examples))


def _checked_features(split: SplitStep, inputs: Structure) -> list[np.ndarray]:
    """The features of `inputs`. Raises `ValueError` if they depend on others of its batch."""
    values = [value.numpy() for value in split.prefix(inputs)]
    alone = split.prefix(tf.nest.map_structure(lambda part: tf.repeat(part[-1:], len(part), axis=0), inputs))
    for value, other in zip(values, alone, strict=True):
        has_rows = len(value) == len(other) == len(tf.nest.flatten(inputs)[0])
        if not has_rows or not np.allclose(other[0], value[-1], rtol=1e-2, atol=1e-3 * np.abs(value).max()):
            raise ValueError("the frozen layers compute an example's features from others of its batch, too")
    return values


class Evaluation:
    """The loss and the measures of a task over test examples. The whole forward pass is traced once.

    While the same tensors train, the frozen prefix returns the same for the same batches. So it runs in the first
    validation of a selection, and the later ones start from its features.

    Attributes:
        made_seconds: what computing features took in the last call.
    """

    made_seconds = 0.0

    def __init__(self, task: Task) -> None:
        self._task = task
        self._whole: BatchFunction | None = None
        self._split: SplitStep | None = None
        self._features = list[Any]()  # of each batch

    def keep_features(self, variables: Sequence[keras.Variable], count: int, room_mb: float) -> float:
        """Start from the features of the `count` test examples from now on, if anything before `variables` is frozen.

        None are kept if they take more than `room_mb`. Returns the MB that they take.
        """
        self.drop_features()
        whole = self._traced()
        whole.variables = variables
        cut = find_cut(whole)
        if cut is None or not all(tensor.shape[1:].is_fully_defined() for tensor in cut.tensors):
            return 0.0
        megabytes = count * sum(one.dtype.size * one.shape[1:].num_elements() for one in cut.tensors) / 1e6
        if megabytes > room_mb:
            return 0.0
        self._split = SplitStep(whole, cut)
        return float(megabytes)

    @property
    def has_features(self) -> bool:
        """Whether the next call starts from features that are made."""
        return bool(self._features)

    def drop_features(self) -> None:
        """Start from the examples themselves from now on."""
        self._split, self._features = None, []

    def __call__(self, batches: Iterable[Batch], between: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Loss and measures over all examples of `batches`, means unless the task has running results.

        The batches are the same in each call; `between` is called before each.
        """
        task, totals, count, measures = self._task, dict[str, float](), 0, dict[str, tf.Tensor]()
        self.made_seconds = 0.0
        task.reset()
        for number, batch in enumerate(batches):
            between()
            loss, measures = self._results(number, batch)
            for name, value in {"loss": loss, **({} if task.is_running else measures)}.items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(batch)
            count += len(batch)
        means = {name: total / count for name, total in totals.items()}
        if task.is_running:
            means |= {name: as_number(value) for name, value in measures.items()}
        task.reset()
        return means

    def _results(self, number: int, batch: Batch) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        function = self._split or self._traced()
        if self._split is not None and number == len(self._features):
            start = time.perf_counter()
            self._features.append(self._split.prefix(batch.inputs))
            self.made_seconds += time.perf_counter() - start
        inputs = batch.inputs if self._split is None else self._features[number]
        return function.results(inputs, batch.targets, batch.weights)  # type: ignore[no-any-return]

    def _traced(self) -> BatchFunction:
        task = self._task

        def evaluate(*examples: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            with folded_batch_norm(task.model):
                loss, outputs = task.run(examples, training=False)
            return loss, task.measures(loss, examples, outputs)

        self._whole = self._whole or BatchFunction(evaluate, task.signature(None), ())
        return self._whole
