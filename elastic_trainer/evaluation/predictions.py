"""Predictions of a model for the test images of a data set, from which all else that an evaluation reports follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.system.errors import UserError

SHOWN_MISTAKES = 24  # pictures on the contact sheet


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for the test images, each array [images]."""

    labels: np.ndarray  # true class, int
    predicted: np.ndarray  # int
    losses: np.ndarray  # cross-entropy
    confidences: np.ndarray  # softmax probability of the predicted class
    worst: dict[int, np.ndarray]  # mistakes with the highest loss, highest first: number -> uint8 [size, size, 3]

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.labels == self.predicted))

    @property
    def mistakes(self) -> int:
        """Number of misclassified images, including those that are not in `worst`."""
        return int((self.labels != self.predicted).sum())


def forward_function(model: keras.Model, batch_size: int | None) -> Any:
    """The compiled inference pass: images float32 [batch, size, size, 3] -> logits [batch, outputs]."""

    def forward(images: tf.Tensor) -> tf.Tensor:
        with folded_batch_norm(model):
            return model(images, training=False)

    return tf.function(forward, input_signature=[tf.TensorSpec((batch_size, *model.input_shape[1:]), tf.float32)])


def predict(model: keras.Model, dataset: ImageData) -> Predictions:
    """Predict all test images, with a progress bar; at most `SHOWN_MISTAKES` of them are in the result."""
    forward = forward_function(model, None)
    parts: list[tuple[np.ndarray, ...]] = []
    worst: list[tuple[float, int, np.ndarray]] = []  # loss, number and image
    with tqdm(total=dataset.test_count, unit="image", dynamic_ncols=True, desc="testing") as bar:
        for batch in dataset.test():
            labels, logits = batch.targets.numpy(), forward(batch.inputs)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits).numpy()
            if not np.isfinite(losses).all():
                raise UserError("--evaluate: the model returns logits that are not finite; its training diverged")
            predicted = tf.argmax(logits, axis=-1).numpy()
            images = batch.inputs.numpy().round().clip(0, 255).astype(np.uint8)
            worst += [(losses[k], bar.n + int(k), images[k]) for k in np.flatnonzero(predicted != labels)]
            worst = sorted(worst, key=lambda one: -one[0])[:SHOWN_MISTAKES]
            parts.append((labels, predicted, losses, tf.reduce_max(tf.nn.softmax(logits), axis=-1).numpy()))
            bar.update(len(predicted))
    all_labels, all_predicted, all_losses, confidences = map(np.concatenate, zip(*parts, strict=True))
    pictures = {number: image for _, number, image in worst}
    return Predictions(all_labels, all_predicted, all_losses, confidences, pictures)
