"""Predictions of a model for the test images of a data set, from which all else that an evaluation reports follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.system.errors import UserError

SHOWN_MISCLASSIFIED = 24  # pictures on the contact sheet


@dataclass
class Misclassified:
    """A misclassified test image."""

    loss: float  # cross-entropy
    index: int  # in the test split
    label: int
    predicted: int
    confidence: float  # softmax probability of the predicted class
    image: np.ndarray  # uint8 [size, size, 3]


@dataclass
class Predictions:
    """Predictions of a model for the test images."""

    labels: np.ndarray  # true class of each image, int [images]
    predicted: np.ndarray  # int [images]
    losses: np.ndarray  # cross-entropy, [images]
    misclassified: list[Misclassified]  # those with the highest loss, highest first

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.labels == self.predicted))

    @property
    def mistakes(self) -> int:
        """Number of misclassified images, including those that are not in `misclassified`."""
        return int((self.labels != self.predicted).sum())


def output_names(class_names: Sequence[str], outputs: int) -> list[str]:
    """`class_names`, followed by "output k" for each of the `outputs` beyond the classes of the data set."""
    return [*class_names, *(f"output {k}" for k in range(len(class_names), outputs))]


def forward_function(model: keras.Model, batch_size: int | None) -> Any:
    """The compiled inference pass: images float32 [batch, size, size, 3] -> logits [batch, outputs]."""

    def forward(images: tf.Tensor) -> tf.Tensor:
        with folded_batch_norm(model):
            return model(images, training=False)

    return tf.function(forward, input_signature=[tf.TensorSpec((batch_size, *model.input_shape[1:]), tf.float32)])


def predict(model: keras.Model, dataset: ImageData, kept: int = SHOWN_MISCLASSIFIED) -> Predictions:
    """Predict all test images, with a progress bar; at most `kept` misclassified ones are in the result."""
    forward = forward_function(model, None)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # labels, predictions and losses of each batch
    worst: list[Misclassified] = []
    with tqdm(total=dataset.test_count, unit="image", dynamic_ncols=True, desc="testing") as bar:
        for batch in dataset.test():
            images, labels = batch.inputs, batch.targets.numpy()
            logits = forward(images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits).numpy()
            if not np.isfinite(losses).all():
                raise UserError("--evaluate: the model returns logits that are not finite; its training diverged")
            confidences = tf.reduce_max(tf.nn.softmax(logits), axis=-1).numpy()
            predicted = tf.argmax(logits, axis=-1).numpy()
            worst += [
                Misclassified(
                    loss=float(losses[k]),
                    index=bar.n + int(k),
                    label=int(labels[k]),
                    predicted=int(predicted[k]),
                    confidence=float(confidences[k]),
                    image=np.clip(np.round(images[k].numpy()), 0, 255).astype(np.uint8),
                )
                for k in np.flatnonzero(predicted != labels)
            ]
            worst = sorted(worst, key=lambda one: -one.loss)[:kept]
            parts.append((labels, predicted, losses))
            bar.update(len(predicted))
    all_labels, all_predicted, all_losses = map(np.concatenate, zip(*parts, strict=True))
    return Predictions(all_labels, all_predicted, all_losses, worst)
