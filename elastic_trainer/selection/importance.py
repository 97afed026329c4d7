"""Tensor Importance Evaluator: how much training each tensor matters now (paper section 4, and Fig 20 for the others).

ImportanceEvaluator   how much the tensor's update lowers the loss: gradient times update
WeightMagnitude       sum of the magnitudes of its weights
GradientMagnitude     sum of the magnitudes of its gradient
Random                a random number
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.timing.wall_time import measure_ms
from elastic_trainer.training.optimizers import in_float16
from elastic_trainer.training.state import not_finite
from elastic_trainer.training.step import batch_spec, training_loss

TRIAL_RATE = 1e-4  # the highest learning rate for which the paper measures importance
FLOAT16_SCALE = 1024.0  # of the loss, since small gradients are 0 in float16
Batch = tuple[tf.Tensor, tf.Tensor]


class ImportanceEvaluator:
    """How much each tensor's update lowers the loss (paper section 4, first-order Taylor share of the loss change).

    dw is the update that the optimizer would make on a batch; sums are over the weights of tensor k.

    On one batch, as in the paper, I_k = -sum(g(w + s·dw) * dw): g is the gradient on the same batch (and with the same
    dropout) after a share s of the update. The paper has s = 1, at learning rates of 1e-5 to 1e-4. At higher ones the
    updates of all tensors together pass the minimum of a batch, and hardly any tensor is left with a positive
    importance. So s is such that the trial is never larger than at `TRIAL_RATE`.

    On several batches, I_k is the mean of -sum(g_b(w) * dw_a) over all pairs of different batches a and b. On its own
    batch every update lowers the loss, noise too, and in a pretrained network most of a small batch's gradient is noise
    (docs/results.md). Between batches noise cancels on average.
    """

    def __init__(self, model: keras.Model, batch_size: int) -> None:
        self._model, self._spec = model, batch_spec(model, batch_size)
        self._is_warm = False
        self._optimizer: keras.optimizers.Optimizer | None = None  # that the traced functions are of
        variables = [variable.value for variable in model.trainable_variables]
        scale = FLOAT16_SCALE if in_float16() else 1.0

        def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                with folded_batch_norm(model):
                    loss, _ = training_loss(model, images, labels)
                loss = loss * scale if scale != 1 else loss
            gradients = tape.gradient(loss, variables)
            self._matters = [gradient is not None for gradient in gradients]
            filled = [
                tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            return [gradient / scale for gradient in filled] if scale != 1 else filled

        self._gradients = tf.function(gradients, autograph=False).get_concrete_function(*self._spec)

    def __call__(self, optimizer: keras.optimizers.Optimizer, batches: Iterable[Batch]) -> np.ndarray:
        """Importance on `batches`, float64 [N] of `model.trainable_variables`, largest magnitude 1 (or all 0).

        Weights, optimizer slots and step count, batch-norm statistics and random state are restored.

        Raises:
            UserError: it is not finite.
        """
        batches = [*batches]
        importance = np.array(self._measure(optimizer, batches), np.float64)
        if not np.isfinite(importance).all():
            step = int(optimizer.iterations)
            is_trial_the_cause = all(self._has_finite_gradients(*batch) for batch in batches)
            raise not_finite(f"importance is not finite at step {step}", step + is_trial_the_cause, optimizer)
        return importance / max(np.abs(importance).max(), np.finfo(np.float64).tiny)

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        """Importance [N] before it is normalised."""
        if self._optimizer is not optimizer:  # tracing takes as long as some hundred steps of a small network
            self._trial = tf.function(partial(self._trial_importance, optimizer), autograph=False)
            self._sums = tf.function(partial(self._summed, optimizer), autograph=False)
            self._optimizer = optimizer
        if len(batches) == 1:
            return np.array(self._trial(*batches[0]))
        zeros = [tf.zeros_like(variable.value) for variable in self._model.trainable_variables]
        sums = zeros, zeros, tf.zeros(len(zeros))
        for batch in batches:
            sums = self._sums(*batch, *sums)
        gradients, updates, own = sums
        every = [float(tf.reduce_sum(gradient * update)) for gradient, update in zip(gradients, updates, strict=True)]
        return (own.numpy() - every) / (len(batches) * (len(batches) - 1))

    def _trial_importance(
        self, optimizer: keras.optimizers.Optimizer, images: tf.Tensor, labels: tf.Tensor
    ) -> tf.Tensor:
        """Importance [N] on one batch. Traced, as an operation by itself takes as long as a step's share of it."""
        share = tf.minimum(1.0, TRIAL_RATE / tf.maximum(_unscaled(optimizer).learning_rate, 1e-30))
        with self._updated(optimizer, images, labels) as (before, _, updates):
            for variable, value, update in zip(self._model.trainable_variables, before, updates, strict=True):
                variable.value.assign(tf.where(share < 1, value + tf.cast(share, value.dtype) * update, variable.value))
            gradients = self._gradients(images, labels)
            return -tf.stack([tf.reduce_sum(g * update) for g, update in zip(gradients, updates, strict=True)])

    def _summed(
        self,
        optimizer: keras.optimizers.Optimizer,
        images: tf.Tensor,
        labels: tf.Tensor,
        gradients: list[tf.Tensor],
        updates: list[tf.Tensor],
        own: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """The sums of gradients, of updates, and of their products [N] with this batch added."""
        with self._updated(optimizer, images, labels) as (_, gradient, update):
            products = [tf.reduce_sum(g * dw) for g, dw in zip(gradient, update, strict=True)]
        added = ([a + b for a, b in zip(*pair, strict=True)] for pair in ((gradients, gradient), (updates, update)))
        return *added, own + tf.stack(products)

    @contextmanager
    def _updated(
        self, optimizer: keras.optimizers.Optimizer, images: tf.Tensor, labels: tf.Tensor
    ) -> Iterator[tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]]:
        """Weights after the update on one batch; yields them before it, gradients and updates. Restored afterwards."""
        variables = self._model.trainable_variables
        with _restored([*self._model.variables, *optimizer.variables]) as values:
            before = [values[id(variable)] for variable in variables]
            with _restored(self._model.non_trainable_variables):
                gradients = self._gradients(images, labels)
                _unscaled(optimizer).apply(gradients, variables)
            yield before, gradients, [v.value - old for v, old in zip(variables, before, strict=True)]

    def _has_finite_gradients(self, images: tf.Tensor, labels: tf.Tensor) -> bool:
        with _restored(self._model.non_trainable_variables):
            return all(np.isfinite(gradient).all() for gradient in self._gradients(images, labels))

    def pass_ms(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        """Wall time in ms of a gradient pass, which does not change the random state.

        A pass that is not timed precedes the very first: TensorFlow optimises the graph in it.
        """
        with _restored(self._model.non_trainable_variables):
            if not self._is_warm:
                self._gradient_pass(images, labels)
            self._is_warm = True
            return float(measure_ms([lambda: self._gradient_pass(images, labels)], 1)[0, 0])

    def _gradient_pass(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        """Compute every gradient and train nothing: a measure of the device's speed. Returns when that is done."""
        return float(tf.reduce_sum(self._gradients(images, labels)[-1]))


class WeightMagnitude(ImportanceEvaluator):
    """I_k = sum(|w|) over the weights of tensor k; 0 if they have no influence on the loss."""

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        sums = [float(tf.reduce_sum(tf.abs(variable.value))) for variable in self._model.trainable_variables]
        return np.where(self._matters, sums, 0.0)


class GradientMagnitude(ImportanceEvaluator):
    """I_k = sum(|g|) over the weights of tensor k."""

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        sums = []
        for batch in batches:
            with _restored(self._model.non_trainable_variables):
                sums.append([float(tf.reduce_sum(tf.abs(gradient))) for gradient in self._gradients(*batch)])
        return np.mean(sums, axis=0)


class Random(ImportanceEvaluator):
    """I_k uniform in 0…1, drawn again at each selection: a baseline (TraDy, arXiv 2510.19675, selects at random)."""

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        images, labels = batches[0]
        seed = zlib.crc32(np.asarray(labels).tobytes() + np.asarray(images).tobytes())  # a resumed run repeats it
        return np.random.default_rng(seed).uniform(size=len(self._model.trainable_variables))


def _unscaled(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer itself, without the scaling of the loss that float16 needs."""
    return getattr(optimizer, "inner_optimizer", optimizer)


@contextmanager
def _restored(variables: list[keras.Variable]) -> Iterator[dict[int, tf.Tensor]]:
    """Restore `variables` afterwards, bit for bit; yields their present values, by `id` of the variable."""
    before = {id(variable): tf.identity(variable.value) for variable in variables}
    try:
        yield before
    finally:
        for variable in variables:
            variable.value.assign(before[id(variable)])
