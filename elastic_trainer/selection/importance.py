"""Tensor Importance Evaluator: how much training each tensor matters now (paper section 4, and Fig 20 for the others).

`ImportanceEvaluator` is the paper's, gradient times update. The others override `_measure`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch
from elastic_trainer.engine.optimizers import unscaled
from elastic_trainer.engine.state import not_finite
from elastic_trainer.engine.step import AllGradients, drop_missing, one_replica
from elastic_trainer.engine.task import Task
from elastic_trainer.networks.tensors import restored
from elastic_trainer.timing.wall_time import measure_ms

TRIAL_RATE = 1e-4  # the highest learning rate for which the paper measures importance


class ImportanceEvaluator:
    """How much each tensor's update lowers the loss (paper section 4, first-order Taylor share of the loss change).

    dw is the update that the optimizer would make on a batch; sums are over the weights of tensor k.

    On one batch, as in the paper, I_k = -sum(g(w + s·dw) * dw): g is the gradient on the same batch (and with the same
    dropout) after a share s of the update. The paper has s = 1, at learning rates of 1e-5 to 1e-4. At higher ones the
    updates of all tensors together pass the minimum of a batch, and hardly any tensor is left with a positive
    importance. So s is such that the trial is never larger than at `TRIAL_RATE`.

    On several batches, I_k = -sum(g(w) * dw): dw is made from the mean gradient of one half of them, g is the mean
    gradient of the other half, and the mean is taken of both ways. On the images that it is made from, every update
    lowers the loss, that of noise too, and in a pretrained network most of a small batch's gradient is noise
    (docs/log/importance.md). On other images noise cancels on average.

    Args:
        task: what is trained.
        batch_size: examples of each batch; None: any number.

    Attributes:
        rows: of a batch, examples whose gradients are taken at once, to save memory; they divide it. Set before use.
    """

    reads_gradients = True  # compiles all gradients, whether or not the device's speed is measured

    def __init__(self, task: Task, batch_size: int | None) -> None:
        self._task, self._model, self._batch_size = task, task.model, batch_size
        self.rows, self._is_warm = batch_size, False

    @cached_property
    def _gradients(self) -> AllGradients:
        return AllGradients(self._task, None if self._batch_size is None else self.rows)

    def importance(self, optimizer: keras.optimizers.Optimizer, batches: Iterable[Batch]) -> np.ndarray:
        """Importance on `batches`, float64 [N] of `model.trainable_variables`, largest magnitude 1 (or all 0).

        Weights, optimizer slots and step count, batch-norm statistics and random state are restored.

        Where it is not finite, and `task.allows_infinite_loss`, all count alike.

        Raises:
            UserError: it is not finite.
        """
        batches = [*batches]
        importance = self._measure(optimizer, batches)
        if not np.isfinite(importance).all() and self._task.allows_infinite_loss:
            importance = np.ones(len(importance))
        if not np.isfinite(importance).all():
            step = int(optimizer.iterations.numpy())
            raise not_finite(f"importance is not finite at step {step}", self._task, optimizer)
        return importance / max(np.abs(importance).max(), np.finfo(np.float64).tiny)

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        """Importance [N] before it is normalised."""
        if len(batches) == 1:
            return -_products(*self._after_trial(optimizer, batches[0]))
        halves = [_mean((self._gradients_on(batch), 1.0) for batch in batches[half::2]) for half in (0, 1)]
        updates = [self._updates(optimizer, gradients) for gradients in halves]
        return -(_products(halves[0], updates[1]) + _products(halves[1], updates[0])) / 2

    def _gradients_on(self, batch: Batch) -> list[tf.Tensor]:
        """The gradients on one batch; the random state and whatever else changes in a forward pass is restored."""
        with restored([], self._gradients.written):
            if self.rows is None or self.rows >= len(batch):
                return self._gradients(batch)
            return _mean((self._gradients(part), len(part) / self.rows) for part in batch.parts(self.rows))

    def _updates(self, optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """What the optimizer adds to the weights for `gradients`; weights and optimizer are restored."""
        variables, inner = self._model.trainable_variables, unscaled(optimizer)
        if getattr(inner, "gradient_accumulation_steps", None):  # most calls update nothing
            return [-float(inner.learning_rate) * gradient for gradient in gradients]
        with restored([*variables, *optimizer.variables]) as before:
            with one_replica(optimizer):
                inner.apply(*drop_missing(gradients, variables))
            return [variable.value - before[id(variable)] for variable in variables]

    def _after_trial(
        self, optimizer: keras.optimizers.Optimizer, batch: Batch
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The gradients on a batch after (a share of) the update on it, and that update."""
        variables, gradients = self._model.trainable_variables, self._gradients_on(batch)
        share = min(1.0, TRIAL_RATE / max(float(unscaled(optimizer).learning_rate), 1e-30))
        updates = self._updates(optimizer, gradients)
        with restored(variables):
            for variable, update in zip(variables, updates, strict=True):
                variable.value.assign_add(share * update)
            return self._gradients_on(batch), updates

    def pass_ms(self, batch: Batch) -> float:
        """Wall time in ms of a gradient pass, which does not change the random state; of parts, the first is measured.

        A pass that is not timed precedes the very first: TensorFlow optimises the graph in it.
        """
        if self.rows is not None and self.rows < len(batch):
            return len(batch) / self.rows * self.pass_ms(next(batch.parts(self.rows)))
        with restored([], self._gradients.written):
            if not self._is_warm:
                self._gradients.run(batch)
            self._is_warm = True
            return float(measure_ms([lambda: self._gradients.run(batch)], 1)[0, 0])


class WeightMagnitude(ImportanceEvaluator):
    """I_k = sum(|w|) over the weights of tensor k; 0 if they have no influence on the loss."""

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        sums = [float(tf.reduce_sum(tf.abs(variable.value))) for variable in self._model.trainable_variables]
        return np.where(self._gradients.exist, sums, 0.0)


class GradientMagnitude(ImportanceEvaluator):
    """I_k = sum(|g|) over the weights of tensor k."""

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        sums = [[float(tf.reduce_sum(tf.abs(g))) for g in self._gradients_on(batch)] for batch in batches]
        return np.mean(sums, axis=0)


class Random(ImportanceEvaluator):
    """I_k uniform in 0…1, drawn again at each selection: a baseline (TraDy, arXiv 2510.19675, selects at random)."""

    reads_gradients = False

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        parts = tf.nest.flatten((batches[0].targets, batches[0].inputs))
        seed = zlib.crc32(b"".join(np.asarray(part).tobytes() for part in parts))  # a resumed run repeats it
        return np.random.default_rng(seed).uniform(size=len(self._model.trainable_variables))


def _mean(each: Iterable[tuple[list[tf.Tensor], float]]) -> list[tf.Tensor]:
    """The mean of lists of tensors by their weights; one of them is alive at a time beside their sum."""
    sums, weights = list[tf.Tensor](), 0.0
    for tensors, weight in each:
        parts = (weight * tensor for tensor in tensors)
        sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else [*parts]
        weights += weight
    return [total / weights for total in sums]


def _products(gradients: list[tf.Tensor], updates: list[tf.Tensor]) -> np.ndarray:
    """Of each tensor, float64 [N]."""
    return np.array([float(tf.reduce_sum(g * dw)) for g, dw in zip(gradients, updates, strict=True)])
