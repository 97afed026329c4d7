"""The compiled functions of training: the step that trains a selection, the forward pass, and the validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.networks.batch_norm_folding import Pair, folded_batch_norm


def classification_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of logits [batch, classes] against integer labels [batch]."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def training_loss(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss that training lowers, the model's own regularisers included, and the logits [batch, classes]."""
    logits = tf.cast(model(images, training=True), tf.float32)  # also if the network computes in half precision
    return tf.add_n([classification_loss(labels, logits), *model.losses]), logits


def batch_spec(model: keras.Model, batch_size: int | None) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Shapes and types of one batch of (images, labels) for `model`."""
    return tf.TensorSpec((batch_size, *model.input_shape[1:]), tf.float32), tf.TensorSpec((batch_size,), tf.int32)


class TrainStep:
    """One compiled step that trains exactly the selected variables.

    Only they are watched, so TensorFlow prunes every gradient operation that none of them needs; no other variable and
    no other optimizer slot is written. The graph is freed with the object.

    Args:
        model, optimizer: the optimizer is built for all of `model.trainable_variables`.
        batch_size: images a step.
        mask: bool [N] over `model.trainable_variables`; all if left out.
        penalty: returns what is added to the loss of `model`, or None. It is not part of the reported loss.
        fold: whether frozen batch norm is folded where that saves time (`networks.batch_norm_folding`).

    Attributes:
        mask: as given, or all True.
        variables: those that train.
        folded_pairs: where frozen batch norm was folded.
        loss, gradients: symbolic tensors of the traced graph, for the profiler; an entry is None if a variable has
            no influence on the loss.
        graph: the traced graph.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        batch_size: int,
        mask: np.ndarray | None = None,
        penalty: Callable[[keras.Model], tf.Tensor | None] = lambda model: None,
        fold: bool = True,
    ) -> None:
        self.mask = np.ones(len(model.trainable_variables), bool) if mask is None else mask
        variables = [variable for variable, trains in zip(model.trainable_variables, self.mask, strict=True) if trains]
        trained = {id(variable) for variable in variables}
        self.variables = variables

        def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            rate = tf.identity(optimizer.learning_rate)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([variable.value for variable in variables])
                folding: AbstractContextManager[list[Pair]]
                folding = folded_batch_norm(model, trained) if fold else nullcontext([])
                with folding as self.folded_pairs:
                    loss, logits = training_loss(model, images, labels)
                in_float16 = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
                added = penalty(model)
                total = loss if added is None else loss + added
                scaled = optimizer.scale_loss(total) if in_float16 else total
            gradients = tape.gradient(scaled, [variable.value for variable in variables])
            self.loss, self.gradients = loss, gradients
            optimizer.apply(gradients, variables)
            correct = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), labels)
            return loss, tf.reduce_mean(tf.cast(correct, tf.float32)), rate

        self._function = tf.function(step, autograph=False).get_concrete_function(*batch_spec(model, batch_size))
        self.graph: tf.Graph = self._function.graph

    def __call__(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[float, float, float]:
        """Train on one batch; returns loss, accuracy (0…1) and learning rate once the device is done."""
        loss, accuracy, rate = self._function(images, labels)
        return float(loss), float(accuracy), float(rate)


def forward_pass(model: keras.Model, batch_size: int) -> Any:
    """The compiled training-mode forward pass, (images, labels) -> loss as a float. Every step contains it."""

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with folded_batch_norm(model):
            return training_loss(model, images, labels)[0]

    function = tf.function(loss).get_concrete_function(*batch_spec(model, batch_size))
    return lambda images, labels: float(function(images, labels))


class Evaluation:
    """Loss and accuracy over the test images; compiled once, whatever trains."""

    def __init__(self, model: keras.Model) -> None:
        def batch(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with folded_batch_norm(model):
                logits = tf.cast(model(images, training=False), tf.float32)
            correct = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), labels)
            return classification_loss(labels, logits), tf.reduce_mean(tf.cast(correct, tf.float32))

        self._function = tf.function(batch, input_signature=batch_spec(model, None))

    def __call__(
        self, batches: Iterable[tuple[tf.Tensor, tf.Tensor]], between: Callable[[], None] = lambda: None
    ) -> tuple[float, float]:
        """Mean loss and accuracy (0…1) over all images of `batches`; calls `between` before each batch."""
        totals = np.zeros(3)
        for images, labels in batches:
            between()
            loss, accuracy = self._function(images, labels)
            totals += np.array([float(loss), float(accuracy), 1.0]) * len(labels)
        return float(totals[0] / totals[2]), float(totals[1] / totals[2])
