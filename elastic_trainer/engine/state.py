"""The state of training: the network, its optimizer, the tensors that train now, and their compiled step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, ShuffledData
from elastic_trainer.engine.features import Evaluation, FeatureCache
from elastic_trainer.engine.memory import step_memory
from elastic_trainer.engine.step import TrainStep, as_numbers
from elastic_trainer.engine.task import Task
from elastic_trainer.engine.weight_mean import WeightMean, is_mean
from elastic_trainer.system.errors import START_AGAIN, UserError
from elastic_trainer.system.machine import release_memory
from elastic_trainer.system.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from elastic_trainer.engine.closed_form_head import ClosedFormStep


class StepResult(NamedTuple):
    """One training step. Either `step_ms` is None or `first_call_ms`."""

    loss: float  # on the batch
    measures: dict[str, float]  # `Task.measures`
    learning_rate: float
    step_ms: float | None  # wall time
    first_call_ms: float | None = None  # that of the first step of a new graph, which TensorFlow then optimises
    caching_ms: float = 0.0  # what computing features took before, which are kept for this step and later ones


def not_finite(what: str, task: Task, optimizer: keras.optimizers.Optimizer) -> UserError:
    """The error for a value that is not a finite number. `what` names the value and the step."""
    rate = float(optimizer.learning_rate)
    return UserError(f"{what} with learning rate {rate:g}; lower --learning_rate, or check {task.suspects}")


class TrainState:
    """What training changes.

    Args:
        task: what is trained, with the examples of most steps, `task.rows`.
        optimizer: built for all of `task.model.trainable_variables`.
        batch_size: examples a step, or a part of one; None: any number.
        penalty: what is added to the loss within the step, as in `TrainStep`.
        features: the cache of the frozen prefix; by default nothing is cached.
        memory: what the process may take; by default what the machine has.
    """

    compiled = 0  # steps
    _mask: np.ndarray | None
    _step: TrainStep | ClosedFormStep | None
    _warm_step: Any  # the last that was called

    def __init__(
        self,
        task: Task,
        optimizer: keras.optimizers.Optimizer,
        batch_size: int | None,
        penalty: Callable[[keras.Model], tf.Tensor | None] = lambda model: None,
        features: FeatureCache | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._batch_size, self._penalty = batch_size, penalty
        # Of a step: their gradients are added up before the weights are updated.
        self.parts = task.rows // batch_size if batch_size and task.rows else 1
        why_not = task.micro_batch_obstacle()
        if self.parts > 1 and why_not is not None:
            raise UserError(f"--micro_batch: {why_not}; leave it out")
        self.can_split = batch_size is not None and why_not is None  # into (smaller) parts
        self.features, self.memory = features or FeatureCache(), memory or MemoryBudget()
        self.memory.start()
        # What the process is expected to take at most with the adopted step; None if nothing is known of it.
        self.predicted_mb: float | None = None
        self.mean = WeightMean()  # of the weights that train now
        self.folds = True  # frozen batch norm, where that saves time; else steps are those of `fit`, bit for bit
        self.task = task
        self.replace(task.model, optimizer)

    def replace(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        """Train another network from now on; its first step needs `adopt`."""
        gc.unfreeze()  # of `system.machine.frozen_gc`: the network of before is collected
        self.task, self.optimizer = self.task.with_model(model), optimizer
        self.evaluation = Evaluation(self.task)
        self._release()

    @property
    def model(self) -> keras.Model:
        """The network."""
        return self.task.model

    def adopt(self, mask: np.ndarray, uses_features: bool) -> None:
        """Train bool [N] `mask` over `model.trainable_variables` from now on, from cached features if that is possible.

        It compiles the step that does so. The same mask goes on with the step and the features that it has.
        """
        has_features = self.features.split is not None
        is_same = self._mask is not None and (mask == self._mask).all()
        if is_same and (has_features or not (uses_features and self.features.are_possible)):
            return
        self._release()  # the old graph and features are released before there are new ones
        gc.collect()
        self._mask = mask
        self._step = step = self._make_step(self._batch_size)
        self.compiled += 1
        self._predict(step, uses_features)

    def _predict(self, step: TrainStep, uses_features: bool) -> None:
        """Predict what `step` takes, and features, which are kept if they are wanted and there is memory beside it."""
        needed_mb, data = 0.0, self.features.data
        if self._batch_size is not None or self.memory.has_limit:  # else nothing is known of the sizes of tensors
            self._step_memory = step_memory(step if self._batch_size is not None else self._make_step(self.task.rows))
            rows = self._step_memory.rows
            needed_mb = self.memory.needed_mb(self._training_mb(self.parts * rows, rows))
        self.features.adopt(step, uses_features, self.memory.limit_mb - needed_mb)
        needed_mb += self.features.kept_mb
        if self.features.split is not None and data is not None:
            room_mb = min(data.room_mb - self.features.megabytes, self.memory.limit_mb - needed_mb)
            needed_mb += self.evaluation.keep_features(step.variables, data.test_count, room_mb)
        self.predicted_mb = needed_mb if needed_mb and self.memory.start_mb is not None else None

    def train_by(self, step: ClosedFormStep) -> None:
        """Train by `step` from now on, which is no compiled one."""
        self._step, self._mask = step, None

    def _make_step(self, batch_size: int | None) -> TrainStep:
        return TrainStep(self.task, self.optimizer, batch_size, self._mask, self._penalty, self.folds, self.parts)

    def _release(self) -> None:
        """Keep no step and no features: the next step needs `adopt`."""
        self._mask = self._step = self._warm_step = None
        self.features.drop()
        self.evaluation.drop_features()

    def check_memory(self, tolerance_mb: float = 0.0) -> None:
        """Raise `UserError` if the adopted step is expected to take more than there is. It names what fits."""
        if self.predicted_mb is not None and self.predicted_mb - self.memory.total_mb > tolerance_mb:
            rows = self._step_memory.rows
            raise self.memory.refuse("training", self._training_mb, self.parts * rows, rows, self.can_split)

    def _training_mb(self, batch_size: int, micro_batch: int) -> float:
        """MB that training what the adopted step trains takes, features aside."""
        return float(self._step_memory.needed_mb(batch_size, micro_batch)[-1])

    @property
    def is_adopted(self) -> bool:
        """Whether there is a step for the next call of `train`."""
        return self._step is not None

    @property
    def step_graph(self) -> tf.Graph:
        """The traced graph of the current step; without the prefix if its features are cached."""
        step = self.features.split or self._step
        assert step is not None, "nothing is adopted"
        return step.graph

    def train(self, batch: Batch) -> StepResult:
        """One step on one batch, in parts or as a whole; loss and measures are those of all of it."""
        assert self._step is not None, "a scheme must select before the first step"
        caching_ms = 1e3 * self.features.prepare(batch.order, batch.upcoming)
        split, results = self.features.split, []
        step = split or self._step
        if split is None:
            _ = batch.inputs  # as in the timing table, making them is not part of the step
        start = time.perf_counter()
        for part in [batch] if self.parts == 1 else batch.parts(self._batch_size or len(batch)):
            values = part.inputs if split is None else self.features.read(part.order)
            results.append(as_numbers(*step.results(values, part.targets, part.weights)))
        if self.parts > 1:
            assert isinstance(self._step, TrainStep) and self._step.update is not None
            self._step.update()
        wall_ms, was_warm = (time.perf_counter() - start) * 1e3, step is self._warm_step
        self._warm_step = step
        losses, measured, rates = zip(*results, strict=True)
        measures = measured[-1]
        if self.parts > 1 and not self.task.is_running:
            measures = {name: sum(one[name] for one in measured) / len(measured) for name in measures}
        step_ms, first_call_ms = (wall_ms, None) if was_warm else (None, wall_ms)
        return StepResult(sum(losses) / len(losses), measures, rates[-1], step_ms, first_call_ms, caching_ms)

    def take_weights(self) -> None:
        """Add the weights that train to their mean; not with a limit of memory, which does not count it."""
        if isinstance(self._step, TrainStep) and not self.memory.has_limit:
            self.mean.add(self._step.variables)

    def average_weights(self) -> None:
        """Replace the weights that train by their mean, if there is one. No step follows."""
        if isinstance(self._step, TrainStep):
            self.mean.assign(self._step.variables)
        self.mean = WeightMean()

    def average_head(self, data: ShuffledData, between: Callable[[], None]) -> float | None:
        """Replace the head by the mean of itself and the closed-form head of the trained network, if there is one.

        No step follows. Nothing has changed if `between`, which is called before each block of images, raises.
        Returns the seconds that it took, or None if the head stays.

        A head that starts from random weights fits less well than the layers below allow, above all after few steps;
        the closed form alone trusts features that the training images have shaped (docs/log/batches.md).
        """
        from elastic_trainer.engine.closed_form_head import closed_form_head

        start = time.perf_counter()
        if self.features.split is None or self.memory.has_limit:
            self._release()
            release_memory()
        found = closed_form_head(self.task, data, self.memory.left_mb, between, self.features)
        if found is None or not found.is_scaled.any():
            return None
        found.average()
        return time.perf_counter() - start

    def values(self) -> dict[str, np.ndarray]:
        """All variables of the network and the optimizer, by kind and position, and the mean of weights."""
        return {**{name: variable.numpy() for name, variable in self._variables()}, **self.mean.to_arrays()}

    def assign(self, values: dict[str, np.ndarray]) -> None:
        """Restore what `values` returned; the next step needs `adopt`.

        Raises `UserError` if that was another network or optimizer.
        """
        variables, self.mean = dict(self._variables()), WeightMean(values)
        values = {name: value for name, value in values.items() if not is_mean(name)}
        shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
        if shapes != {name: value.shape for name, value in values.items()}:
            raise UserError(
                f"--resume: the checkpoint is of another network or optimizer; give the same options, or {START_AGAIN}"
            )
        for name, variable in variables.items():
            variable.assign(values[name])
        self._release()  # a checkpoint has its own selection

    def refresh(self) -> bool:
        """Let the adopted step follow weights that were assigned from outside; whether it can, without features."""
        if not isinstance(self._step, TrainStep) or self.features.split is not None:
            return False
        self._step.refresh()
        return True

    def check_finite(self, step: int) -> None:
        """Raise `UserError` if a weight or a variable of the optimizer is not finite after `step` steps."""
        variables = [*self.model.trainable_variables, *self.optimizer.variables]
        if not all(np.isfinite(variable.numpy()).all() for variable in variables):
            raise not_finite(f"a weight is not finite after step {step}", self.task, self.optimizer)

    def _variables(self) -> Iterator[tuple[str, Any]]:
        for owner, variables in (("model", self.model.variables), ("optimizer", self.optimizer.variables)):
            for index, variable in enumerate(variables):
                yield f"{owner}/{index}", variable.value
