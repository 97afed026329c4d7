"""A head without gradients: the linear discriminant (`feature_sums`) of what the network returns below its head.

It takes one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.batches import Order, ShuffledData, Structure, block_rows
from elastic_trainer.engine.feature_sums import HELD_BACK, Head, cross_entropy, fit_head, mean_head
from elastic_trainer.engine.features import FeatureCache
from elastic_trainer.engine.step import BatchFunction, StepValues
from elastic_trainer.engine.task import ImageClassification, Task
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.networks.tensors import last_layers
from elastic_trainer.system.errors import UserError

MAX_FEATURES = 4096  # their covariance is solved for in a second or two, in 64 MB


class ClosedFormHead(NamedTuple):
    """A head for `layer`, the last layer of a network, which stays as it is until `assign`."""

    layer: keras.layers.Dense
    head: Head
    loss: float  # of the training images with it
    accuracy: float
    accuracy_before: float  # of the training images with the head that the network has
    # Bool [classes], whose logits have the scale of a trained head's: those with images; none if no class had enough
    # images to choose the scale by.
    is_scaled: np.ndarray

    def assign(self) -> None:
        """Give the network this head."""
        self.layer.kernel.assign(self.head.kernel)
        self.layer.bias.assign(self.head.bias)

    def average(self) -> None:
        """Give the network the mean of its head and this one, see `mean_head`."""
        trained = Head(np.asarray(self.layer.kernel), np.asarray(self.layer.bias))
        mean = mean_head(trained, self.head, self.is_scaled, self.loss)
        for variable, values in zip((self.layer.kernel, self.layer.bias), mean, strict=True):
            variable.assign(values)


def linear_head(model: keras.Model) -> keras.layers.Dense | None:
    """The only last layer, if it is dense with a bias, without an activation, and reads at most `MAX_FEATURES`."""
    layers = last_layers(model)
    if len(layers) != 1 or type(layers[0]) is not keras.layers.Dense:
        return None
    [layer] = layers
    is_linear = layer.use_bias and layer.activation is keras.activations.linear
    return layer if is_linear and layer.kernel.shape[0] <= MAX_FEATURES else None


def closed_form_head(
    task: Task,
    data: ShuffledData,
    room_mb: float = inf,
    between: Callable[[], None] = lambda: None,
    kept: FeatureCache | None = None,
) -> ClosedFormHead | None:
    """The head that `fit_head` gives the network of `task`, by all training images in their first view.

    None if this is no classifier of images that ends in a `linear_head`; if sums of its features are not finite; or if
    fitting one takes more than `room_mb`, which is reported. `between` is called before each block of images. It starts
    from `kept` features, if there are some.
    """
    layer, count = linear_head(task.model), data.train_count
    if layer is None or not isinstance(task, ImageClassification):
        return None
    width = layer.kernel.shape[0]
    # Float32, beside the forward pass: features and copies of them; the covariance and its copies.
    needed_mb = 4 * (3.5 * count * width + 8 * width**2) / 1e6
    if needed_mb > room_mb:
        tqdm.write(f"no closed-form head: it takes {needed_mb:.0f} MB, and {max(room_mb, 0.0):.0f} MB are left")
        return None
    rows, first = np.arange(count), np.zeros(count, np.int64)
    block = min(block_rows(data.training_inputs(Order(rows[:1], first[:1]))), data.max_rows)
    kept, found = kept or FeatureCache(), []
    whole = _head_inputs(task, layer, kept.variables)
    split = kept.cut(whole, Order(rows[:block], first[:block]))
    for start in range(0, count, block):
        between()
        order = Order(rows, first).part(slice(start, start + block))
        if split is not None:
            kept.prepare(order)
        values = data.training_inputs(order) if split is None else kept.read(order)
        inputs, outputs = (split or whole).results(values, *data.training_targets(order.rows))
        if len(inputs) != 1 or inputs[0].shape.rank != 2:
            return None
        if not start and not np.allclose(layer(inputs[0]), outputs, rtol=1e-3, atol=1e-3):
            return None  # something follows the layer
        found.append(inputs[0].numpy())
    features, labels = np.concatenate(found).astype(np.float32, copy=False), np.asarray(data.training_targets(rows)[0])
    try:
        head = fit_head(features, labels, layer.units)
    except np.linalg.LinAlgError:
        return None
    before = Head(np.asarray(layer.kernel), np.asarray(layer.bias))
    logits, logits_before = head.logits(features), before.logits(features)
    accuracy, accuracy_before = (float(np.mean(one.argmax(axis=1) == labels)) for one in (logits, logits_before))
    counts = np.bincount(labels, minlength=layer.units)
    is_scaled = (counts > 0) & (np.max(counts) >= HELD_BACK)
    return ClosedFormHead(layer, head, cross_entropy(logits, labels), accuracy, accuracy_before, is_scaled)


class ClosedFormStep:
    """A training step that gives the head its closed form, by all training examples; its batch has no effect."""

    def __init__(self, task: Task, data: ShuffledData) -> None:
        self._task, self._data, self.graph = task, data, tf.Graph()  # without operations

    def results(self, inputs: Structure, targets: Structure, weights: Structure = None) -> StepValues:
        """Loss and measures of all training examples with the new head, and learning rate 0.

        Raises:
            UserError: there is no closed form of this head.
        """
        found = closed_form_head(self._task, self._data)
        if found is None:
            raise UserError(
                "closed_form_head: the network must end in a dense layer with a bias that returns the logits, and that "
                "reads at most 4,096 features; choose another --train_type, or give --deadline more time"
            )
        found.assign()
        return found.loss, {"accuracy": found.accuracy}, 0.0


@contextmanager
def recorded_inputs(layer: keras.layers.Layer) -> Iterator[list[tf.Tensor]]:
    """What `layer` reads at each call in this block."""
    seen: list[tf.Tensor] = []
    call = layer.call

    def recorded(values: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        seen.append(values)
        return call(values, *args, **kwargs)

    object.__setattr__(layer, "call", recorded)  # past Keras, which would track it as a part of the layer
    try:
        yield seen
    finally:
        object.__delattr__(layer, "call")


def _head_inputs(task: Task, layer: keras.layers.Dense, variables: Sequence[keras.Variable]) -> BatchFunction:
    """A function of a batch: what `layer` reads in each call, and the logits. `variables` change between its calls."""

    def function(inputs: Structure, *others: Structure) -> tuple[list[tf.Tensor], tf.Tensor]:
        with folded_batch_norm(task.model, {*map(id, variables)}), recorded_inputs(layer) as seen:
            outputs = task.outputs(inputs, training=False)
        return seen, outputs

    return BatchFunction(function, task.signature(None), variables)
