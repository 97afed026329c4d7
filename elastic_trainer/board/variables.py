"""The variables of a file that trains in LiteRT: weights, their momentum, and gradients that are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.engine.optimizers import MIN_NORM, SGDW
from elastic_trainer.system.errors import UserError

Values = dict[str, Any]  # tensors by name
SMALLEST = 1e-37  # the smallest normal number: of a gradient of 0, TensorFlow's own factor is 1, too


class _Copy(NamedTuple):
    """The variables of the file for a variable of the network, `source`."""

    source: keras.Variable
    weights: tf.Variable
    momentum: tf.Variable
    gradient: tf.Variable
    is_clipped: bool


class BoardVariables:
    """Copies of the network's variables that train, and their update: that of `engine.optimizers.SGDW`.

    `optimizer` is built for all trainable variables; `mask`, bool [N] over them, is what any selection trains. Raises
    `UserError` if a variable has a constraint.
    """

    def __init__(self, model: keras.Model, optimizer: SGDW, mask: np.ndarray) -> None:
        self._optimizer = optimizer
        self.sources = [*compress(model.trainable_variables, mask)]  # of the network
        self._copies: list[_Copy] = []
        for place, source in zip(np.flatnonzero(mask), self.sources, strict=True):
            if source.constraint is not None:
                raise UserError(f"--export: {source.path} has a constraint, which a board does not apply")
            weights = tf.Variable(source.numpy())
            momentum, gradient = (tf.Variable(tf.zeros(weights.shape)) for _ in range(2))
            is_clipped = optimizer.clipping is not None and place not in optimizer.unclipped
            self._copies.append(_Copy(source, weights, momentum, gradient, is_clipped))
        self.module = tf.Module()  # owns the copies
        self.module.kept = [[each.weights, each.momentum, each.gradient] for each in self._copies]

    def values(self) -> dict[int, tf.Tensor]:
        """The current weights, by the `id` of the handles of the network's variables."""
        return {id(each.source.value.handle): each.weights.read_value() for each in self._copies}

    def signatures(self) -> dict[str, Any]:
        """`start`, `load` and `state`."""
        specs = {name: tf.TensorSpec(variable.shape) for name, variable in self._state()}
        initial = {f"weights_{index}": each.source.numpy() for index, each in enumerate(self._copies)}

        def load(**state: tf.Tensor) -> Values:
            for name, variable in self._state():
                variable.assign(state[name])
            for each in self._copies:
                each.gradient.assign(tf.zeros(each.gradient.shape))
            return done()

        def start() -> Values:
            return load(**{name: tf.constant(initial.get(name, 0.0), shape=spec.shape) for name, spec in specs.items()})

        return {
            "start": signature(start),
            "load": signature(load, **specs),
            "state": signature(lambda: {name: variable.read_value() for name, variable in self._state()}),
        }

    def _state(self) -> Iterator[tuple[str, tf.Variable]]:
        for index, each in enumerate(self._copies):
            yield f"weights_{index}", each.weights
            yield f"momentum_{index}", each.momentum

    def add(self, sources: Sequence[keras.Variable], gradients: Sequence[tf.Tensor]) -> None:
        """Add up gradients of some of the network's variables."""
        for each, gradient in zip(self._of(sources), gradients, strict=True):
            each.gradient.assign(each.gradient.read_value() + gradient)

    def update(self, sources: Sequence[keras.Variable], rate: tf.Tensor) -> None:
        """Update these variables by their summed gradients, which are 0 afterwards."""
        optimizer = self._optimizer
        for each in self._of(sources):
            weights, gradient, own_rate = each.weights.read_value(), each.gradient.read_value(), rate
            if each.is_clipped and optimizer.clipping is not None:
                most = optimizer.clipping**2 * tf.maximum(tf.reduce_sum(weights * weights), MIN_NORM**2)
                own_rate *= tf.minimum(tf.sqrt(most / tf.maximum(tf.reduce_sum(gradient * gradient), SMALLEST)), 1.0)
            moved = optimizer.momentum * each.momentum.read_value() - own_rate * gradient
            each.momentum.assign(moved)
            if optimizer.decoupled_weight_decay:
                weights -= weights * (rate * optimizer.decoupled_weight_decay)
            each.weights.assign(weights + moved)
            each.gradient.assign(tf.zeros(each.gradient.shape))

    def _of(self, sources: Sequence[keras.Variable]) -> list[_Copy]:
        wanted = {id(source) for source in sources}
        return [each for each in self._copies if id(each.source) in wanted]


def signature(function: Callable[..., Values], **inputs: tf.TensorSpec) -> Any:
    """A function of tensors by name, traced for inputs of these specs."""
    return tf.function(function, autograph=False).get_concrete_function(**inputs)


def done() -> Values:
    """What a signature returns that has no result: each needs one."""
    return {"done": tf.constant(1.0)}
