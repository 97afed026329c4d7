"""The network in training, its optimizer, and the compiled step."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.runs.history import StepResult
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.training.step import Evaluation, TrainStep
from utils import UserError


class Network(NamedTuple):
    """A model and the optimizer that is built for all of its trainable variables."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer


class _Trainee:
    """The network, its optimizer, the tensors that train at present, and the compiled step that trains them."""

    def __init__(self, network: Network, batch_size: int, penalty: Callable[[keras.Model], tf.Tensor | None]) -> None:
        self._batch_size, self._penalty = batch_size, penalty
        self.replace(network)

    def replace(self, network: Network) -> None:
        """Train another network from now on, once a choice is adopted."""
        self.network = network
        self.model, self.optimizer = network
        self.evaluation = Evaluation(self.model)
        self._mask: np.ndarray | None = None
        self._step: TrainStep | None = None
        self._warm, self.step_flops = False, 0.0

    def adopt(self, mask: np.ndarray) -> None:
        """Train bool [N] `mask` from now on; the old graph goes before a new one comes."""
        if self._mask is not None and (mask == self._mask).all():
            return
        self._step = None
        gc.collect()
        self._step = TrainStep(self.model, self.optimizer, self._batch_size, mask, self._penalty)
        self._warm, self._mask = False, mask
        self.step_flops = sum(count_flops(self._step.graph).values())

    def train(self, images: tf.Tensor, labels: tf.Tensor) -> StepResult:
        """One step on one batch. The first one of a new graph, which TensorFlow then optimises, has no `step_ms`."""
        assert self._step is not None, "a scheme must choose before the first step"
        start = time.perf_counter()
        loss, accuracy, rate = self._step(images, labels)
        step_ms = (time.perf_counter() - start) * 1e3 if self._warm else None
        self._warm = True
        if not math.isfinite(loss):
            step = int(self.optimizer.iterations)
            raise UserError(f"the loss is {loss} at step {step} with learning rate {rate:g}; lower --learning_rate")
        return StepResult(loss, accuracy, rate, step_ms)

    def values(self) -> dict[str, np.ndarray]:
        """All that the network and the optimizer hold, by kind and position."""
        return {name: variable.numpy() for name, variable in self._variables()}

    def assign(self, values: dict[str, np.ndarray]) -> None:
        """Take up what `values` returned.

        Raises:
            UserError: that was another network or optimizer.
        """
        variables = dict(self._variables())
        shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
        if shapes != {name: value.shape for name, value in values.items()}:
            raise UserError("--resume: the checkpoint is of another network or optimizer; give the same options")
        for name, variable in variables.items():
            kind = variable.dtype.as_numpy_dtype  # numpy forgets the name of bfloat16
            variable.assign(values[name] if values[name].dtype == kind else values[name].view(kind))

    def is_finite(self) -> bool:
        """Whether all that training changes still consists of numbers."""
        variables = [*self.model.trainable_variables, *self.optimizer.variables]
        return all(np.isfinite(variable.numpy()).all() for variable in variables)

    def _variables(self) -> Iterator[tuple[str, Any]]:
        for owner, variables in (("model", self.model.variables), ("optimizer", self.optimizer.variables)):
            for index, variable in enumerate(variables):
                yield f"{owner}/{index}", variable.value
