"""The variables of a file that trains in LiteRT: weights, their momentum, and gradients that are added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.errors import UserError
from elastic_trainer.training.optimizers import MIN_NORM, SGDW

Values = dict[str, Any]  # tensors by name


class Signature(NamedTuple):
    """A function of tensors by name, and the specs of its inputs."""

    function: Callable[..., Values]
    inputs: dict[str, tf.TensorSpec]


class _Copy(NamedTuple):
    """The variables of the file for a variable of the network."""

    source: keras.Variable
    weights: tf.Variable
    momentum: tf.Variable
    gradient: tf.Variable
    is_clipped: bool


class BoardVariables:
    """Copies of the network's variables that train, and their update: that of `training.optimizers.SGDW`.

    Args:
        model: of the variables.
        optimizer: built for all of `model.trainable_variables`.
        mask: bool [N] over them, what any selection trains.

    Attributes:
        sources: the variables of the network that train.
        module: owns the copies.

    Raises:
        UserError: one has a constraint.
    """

    def __init__(self, model: keras.Model, optimizer: SGDW, mask: np.ndarray) -> None:
        self._optimizer = optimizer
        clips = optimizer.clipping is not None
        chosen = [index for index, trains in enumerate(mask) if trains]
        self.sources = [model.trainable_variables[index] for index in chosen]
        for variable in self.sources:
            if variable.constraint is not None:
                raise UserError(
                    f"--export train_tflite: {variable.path} has a constraint, which a board does not apply"
                )
        self._initial = [variable.numpy() for variable in self.sources]
        self._copies = [
            _Copy(
                source,
                tf.Variable(initial, name=f"weights_{index}"),
                tf.Variable(np.zeros_like(initial), name=f"momentum_{index}"),
                tf.Variable(np.zeros_like(initial), name=f"gradient_{index}"),
                clips and position not in optimizer.unclipped,
            )
            for index, (source, initial, position) in enumerate(zip(self.sources, self._initial, chosen, strict=True))
        ]
        self.module = tf.Module()
        self.module.kept = [[each.weights, each.momentum, each.gradient] for each in self._copies]

    def values(self) -> dict[int, tf.Tensor]:
        """The weights of now, by the `id` of the handles of the network's variables."""
        return {id(each.source.value.handle): each.weights.read_value() for each in self._copies}

    def signatures(self) -> dict[str, Signature]:
        """`start`, `load` and `state`."""
        specs = {
            f"{kind}_{index}": tf.TensorSpec(each.weights.shape)
            for kind in ("weights", "momentum")
            for index, each in enumerate(self._copies)
        }
        return {
            "start": Signature(self._start, {}),
            "load": Signature(self._load, specs),
            "state": Signature(self._state, {}),
        }

    def add(self, sources: Sequence[keras.Variable], gradients: Sequence[tf.Tensor]) -> None:
        """Add gradients of some of the network's variables up."""
        for each, gradient in zip(self._of(sources), gradients, strict=True):
            each.gradient.assign(each.gradient.read_value() + gradient)

    def update(self, sources: Sequence[keras.Variable], rate: tf.Tensor) -> None:
        """Update these variables by their summed gradients, which are 0 afterwards."""
        self.apply(sources, [each.gradient.read_value() for each in self._of(sources)], rate)
        for each in self._of(sources):
            each.gradient.assign(tf.zeros(each.gradient.shape))

    def apply(self, sources: Sequence[keras.Variable], gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """Update these variables by `gradients`."""
        optimizer = self._optimizer
        for each, gradient in zip(self._of(sources), gradients, strict=True):
            weights, own_rate = each.weights.read_value(), rate
            if each.is_clipped and optimizer.clipping is not None:
                most = optimizer.clipping**2 * tf.maximum(tf.reduce_sum(weights * weights), MIN_NORM**2)
                # The smallest normal number: of a gradient of 0, TensorFlow's own factor is 1, too.
                own_rate *= tf.minimum(tf.sqrt(most / tf.maximum(tf.reduce_sum(gradient * gradient), 1e-37)), 1.0)
            moved = optimizer.momentum * each.momentum.read_value() - own_rate * gradient
            each.momentum.assign(moved)
            decay = rate * optimizer.decoupled_weight_decay if optimizer.decoupled_weight_decay else None
            each.weights.assign((weights if decay is None else weights - weights * decay) + moved)

    def _of(self, sources: Sequence[keras.Variable]) -> list[_Copy]:
        wanted = {id(source) for source in sources}
        return [each for each in self._copies if id(each.source) in wanted]

    def _start(self) -> Values:
        weights = {f"weights_{index}": tf.constant(value) for index, value in enumerate(self._initial)}
        return self._load(**weights, **{f"momentum_{k}": tf.zeros(w.shape) for k, w in enumerate(self._initial)})

    def _load(self, **state: tf.Tensor) -> Values:
        for index, each in enumerate(self._copies):
            each.weights.assign(state[f"weights_{index}"])
            each.momentum.assign(state[f"momentum_{index}"])
            each.gradient.assign(tf.zeros(each.gradient.shape))
        return done()

    def _state(self) -> Values:
        weights = {f"weights_{index}": each.weights.read_value() for index, each in enumerate(self._copies)}
        return weights | {f"momentum_{index}": each.momentum.read_value() for index, each in enumerate(self._copies)}


def done() -> Values:
    """What a signature returns that has no result: each needs one."""
    return {"done": tf.constant(1.0)}
