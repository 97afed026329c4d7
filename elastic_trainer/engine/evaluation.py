"""Validation: a task over the test examples, from what the frozen prefix returned for them where that is known.

While the same tensors train, the prefix returns the same for the same examples. So it runs in the first validation of
a selection, and the later ones start from its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, Structure
from elastic_trainer.engine.features import Features
from elastic_trainer.engine.prefix import SplitStep, find_cut
from elastic_trainer.engine.step import BatchFunction, as_number
from elastic_trainer.engine.task import Task
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm


class Evaluation:
    """The loss and the measures of a task over test examples. The whole forward pass is traced once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._whole: BatchFunction | None = None
        self._features: Features | None = None

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
        kinds = [(tuple(tensor.shape[1:]), np.dtype(tensor.dtype.as_numpy_dtype)) for tensor in cut.tensors]
        megabytes = Features.needed_mb(count, kinds)
        if megabytes > room_mb:
            return 0.0
        self._features = Features(SplitStep(whole, cut), count, kinds)
        return megabytes

    def drop_features(self) -> None:
        """Start from the examples themselves from now on."""
        self._features = None

    def __call__(self, batches: Iterable[Batch], between: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Loss and measures over all examples of `batches`, means unless the task has running results.

        The batches are the same in each call; `between` is called before each.
        """
        self._task.reset()
        totals: dict[str, float] = {}
        count, measures = 0, dict[str, tf.Tensor]()
        for batch in batches:
            between()
            loss, measures = self._results(count, batch)
            for name, value in {"loss": loss, **({} if self._task.is_running else measures)}.items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(batch)
            count += len(batch)
        means = {name: total / count for name, total in totals.items()}
        if self._task.is_running:
            means |= {name: as_number(value) for name, value in measures.items()}
        self._task.reset()
        return means

    def _results(self, start: int, batch: Batch) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Of a batch whose first example is the test example of number `start`."""
        if self._features is None:
            return self._traced().results(batch.inputs, batch.targets, batch.weights)  # type: ignore[no-any-return]
        numbers = np.arange(start, start + len(batch))
        if self._features.missing(numbers):
            self._features.make(numbers, batch.inputs)
        values = self._features.read(numbers)
        return self._features.split.results(values, batch.targets, batch.weights)  # type: ignore[no-any-return]

    def _traced(self) -> BatchFunction:
        task = self._task

        def evaluate(
            inputs: Structure, targets: Structure, weights: Structure
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            with folded_batch_norm(task.model):
                loss, outputs = task.run(inputs, targets, weights, training=False)
            return loss, task.measures(loss, inputs, targets, weights, outputs)

        if self._whole is None:
            self._whole = BatchFunction(evaluate, task.signature(None), ())
        return self._whole
