"""A head without gradients: the linear discriminant of what the network returns below its head.

Features of a class are taken to be normal, with one covariance for all classes: the logit of class c is then
μ_c'Σ⁻¹x − μ_c'Σ⁻¹μ_c/2 + log π_c, with its mean μ_c and its share π_c of the images. Σ is shrunk towards a multiple of
the identity (Ledoit and Wolf, J. Multivariate Analysis 2004), and all logits are scaled by one number (Guo et al., ICML
2017). Both are chosen on training images that are held back for that. It takes one forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Order, ShuffledData, Structure, block_rows
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.networks.tensors import last_layers
from elastic_trainer.task import ImageClassification, Task

SHRINKAGES = (0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
SCALES = np.geomspace(0.02, 2, 24)  # of logits
HELD_BACK = 5  # one image in so many of each class
MAX_FEATURES = 4096  # their covariance is solved for in a second or two, in 64 MB
NO_IMAGES = -1e4  # bias of a class without images


class Head(NamedTuple):
    """A dense layer: float32 `kernel` [features, classes] and `bias` [classes]."""

    kernel: np.ndarray
    bias: np.ndarray

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Of features [n, features]: [n, classes]."""
        result: np.ndarray = features @ self.kernel + self.bias
        return result


def fit_head(features: np.ndarray, labels: np.ndarray, classes: int) -> Head:
    """The linear discriminant, see the module's header.

    Args:
        features: float32 [n, features].
        labels: int [n].
        classes: number of outputs; those without an image get the smallest logits.
    """
    turn = np.zeros(len(labels), int)
    order = np.random.default_rng(0).permutation(len(labels))
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        turn[of_class] = np.arange(len(of_class))
    is_held = turn % HELD_BACK == HELD_BACK - 1
    shrinkage, scale = max(SHRINKAGES), 1.0  # where no class has enough images
    if is_held.any():
        shrinkage, scale = _chosen(features, labels, classes, is_held)
    [head] = _discriminant(features, labels, classes, [shrinkage])
    bias = np.where(np.bincount(labels, minlength=classes), head.bias * np.float32(scale), np.float32(NO_IMAGES))
    return Head(head.kernel * np.float32(scale), bias)


def _chosen(features: np.ndarray, labels: np.ndarray, classes: int, is_held: np.ndarray) -> tuple[float, float]:
    """The shrinkage and the scale with the smallest loss on the images of bool [n] `is_held`, fitted to the others."""
    heads = _discriminant(features[~is_held], labels[~is_held], classes, SHRINKAGES)
    held_logits = [head.logits(features[is_held]) for head in heads]
    losses = np.array([[_loss(scale * logits, labels[is_held]) for scale in SCALES] for logits in held_logits])
    shrinkage, scale = np.unravel_index(losses.argmin(), losses.shape)
    return SHRINKAGES[shrinkage], float(SCALES[scale])


def _discriminant(features: np.ndarray, labels: np.ndarray, classes: int, shrinkages: Any) -> list[Head]:
    """A head for each shrinkage, from 0 (the covariance as it is) to 1 (a multiple of the identity)."""
    counts = np.bincount(labels, minlength=classes).astype(np.float32)
    centre = features.mean(axis=0)
    centred = features - centre
    means = np.zeros((classes, features.shape[1]), np.float32)
    np.add.at(means, labels, centred)
    means /= np.maximum(counts, 1)[:, None]
    within = centred - means[labels]
    covariance = within.T @ within / len(labels)
    variance = float(covariance.trace()) / len(covariance)
    if (counts <= 1).all():  # images of a class do not differ, but classes do
        variance = float((centred**2).mean())
    target = max(variance, 1e-12) * np.eye(len(covariance), dtype=np.float32)
    log_shares = np.log(np.maximum(counts, 1e-6) / len(labels))
    heads = []
    for shrinkage in shrinkages:
        kernel = np.linalg.solve((1 - shrinkage) * covariance + shrinkage * target, means.T)
        bias = log_shares - 0.5 * (means.T * kernel).sum(axis=0) - centre @ kernel
        heads.append(Head(kernel.astype(np.float32), bias.astype(np.float32)))
    return heads


def _loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross-entropy."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]))


class ClosedFormHead(NamedTuple):
    """A head for `layer`, the last layer of a network, which stays as it is until `assign`.

    Attributes:
        loss, accuracy: of the training images with it.
        accuracy_before: of the training images with the head that the network has.
    """

    layer: keras.layers.Dense
    head: Head
    loss: float
    accuracy: float
    accuracy_before: float

    def assign(self) -> None:
        """Give the network this head."""
        self.layer.kernel.assign(self.head.kernel)
        self.layer.bias.assign(self.head.bias)


def closed_form_head(task: Task, data: ShuffledData) -> ClosedFormHead | None:
    """The head that `fit_head` gives the network of `task`, by all training images in their first view.

    None if this is no classifier of images that ends in a dense layer with a bias, without an activation, of at most
    `MAX_FEATURES` features.
    """
    layers = last_layers(task.model)
    if not isinstance(task, ImageClassification) or len(layers) != 1 or type(layers[0]) is not keras.layers.Dense:
        return None
    [layer] = layers
    rows = np.arange(data.train_count)
    block = min(block_rows(data.training_inputs(Order(rows[:1], rows[:1]))), data.max_rows)
    inputs_of, found = _head_inputs(task, layer), []
    for start in range(0, len(rows), block):
        some = rows[start : start + block]
        inputs, logits = inputs_of(data.training_inputs(Order(some, np.zeros_like(some))))
        if inputs is None or inputs.shape.rank != 2 or inputs.shape[1] > MAX_FEATURES or not layer.use_bias:
            return None
        follows = layer.activation is not keras.activations.linear
        if not start and (follows or not np.allclose(layer(inputs), logits, rtol=1e-3, atol=1e-3)):
            return None  # something follows the layer
        found.append(inputs.numpy())
    features, labels = np.concatenate(found).astype(np.float32), np.asarray(data.training_targets(rows)[0])
    head, before = fit_head(features, labels, layer.units), Head(np.asarray(layer.kernel), np.asarray(layer.bias))
    logits, logits_before = head.logits(features), before.logits(features)
    accuracy, accuracy_before = (float(np.mean(one.argmax(axis=1) == labels)) for one in (logits, logits_before))
    return ClosedFormHead(layer, head, _loss(logits, labels), accuracy, accuracy_before)


def _head_inputs(task: Task, layer: keras.layers.Dense) -> Any:
    """A function from images to what `layer` reads, or None if it is not called just once, and to the logits."""

    def function(inputs: Structure) -> tuple[tf.Tensor | None, tf.Tensor]:
        seen: list[tf.Tensor] = []
        call = layer.call

        def recorded(values: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
            seen.append(values)
            return call(values, *args, **kwargs)

        with folded_batch_norm(task.model):
            object.__setattr__(layer, "call", recorded)  # past Keras, which would track it as a part of the layer
            try:
                outputs = task.outputs(inputs, training=False)
            finally:
                object.__delattr__(layer, "call")
        return seen[0] if len(seen) == 1 else None, outputs

    return tf.function(function, autograph=False, input_signature=task.signature(None)[:1])
