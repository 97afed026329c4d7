"""The compiled functions of training: the step that trains a selection, the forward pass, and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, Structure
from elastic_trainer.engine.optimizers import unscaled
from elastic_trainer.engine.task import Task
from elastic_trainer.networks.batch_norm_folding import Pair, folded_batch_norm, frozen_values
from elastic_trainer.networks.graphs import written_variables

FLOAT16_SCALE = 1024.0  # of the loss, since small gradients are 0 in float16

StepValues = tuple[float, dict[str, float], float]  # loss, `Task.measures`, learning rate


class BatchFunction:
    """A traced function of a batch: inputs, targets and weights of examples to any results.

    `signature` are specs of its arguments, as of `Task.signature`; `variables` change between calls (`prefix.py`).

    Attributes:
        results: (inputs, targets, weights) -> what it returns for a batch.
    """

    def __init__(self, function: Callable[..., Any], signature: Structure, variables: Sequence[keras.Variable]) -> None:
        self.variables, self.signature = variables, signature
        self.results: Callable[[Structure, Structure, Structure], Any]
        self.results = traced = tf.function(function, autograph=False).get_concrete_function(*signature)
        self.graph: tf.Graph = traced.graph
        inputs, everything = (tf.nest.flatten(part) for part in (signature[0], signature))
        count = sum(spec is not None for spec in inputs)
        batch = self.graph.inputs[: sum(spec is not None for spec in everything)]
        self.inputs, self.targets = batch[:count], batch[count:]  # weights of examples are among the targets
        # Gives values of `graph.outputs` the structure of the results, without tensors, which would keep the graph.
        names = tf.nest.map_structure(lambda tensor: tensor.name, traced.structured_outputs)
        self.packed = partial(tf.nest.pack_sequence_as, names)


class TrainStep(BatchFunction):
    """One compiled step that trains exactly the selected variables.

    Only they are watched, so TensorFlow prunes every gradient operation that none of them needs; no other variable and
    no other optimizer slot is written. The graph is freed with the object.

    Args:
        task: what is trained.
        optimizer: built for all of `task.model.trainable_variables`.
        batch_size: examples a step; None: any number.
        mask: bool [N] over `task.model.trainable_variables`; all if left out.
        penalty: returns what is added to the loss of the model, or None. It is not part of the reported loss.
        fold: whether frozen batch norm is folded where that saves time (`networks.batch_norm_folding`).
        parts: of a batch, each of `batch_size` examples. With several, a call adds its share of the mean gradient to
            `accumulators`, and `update` trains on their sum: the gradient of the whole batch, if its loss is a mean.
        with_products: as of `folded_batch_norm`.

    Attributes:
        variables: those that train.
        trains_all: whether every trainable variable does.
        folded_pairs: where frozen batch norm was folded.
        accumulators: one for each of `variables` if there are several parts; 0 after `update`.
        loss, gradients: symbolic tensors of the traced graph, for the profiler; None for a variable without influence.
    """

    def __init__(
        self,
        task: Task,
        optimizer: keras.optimizers.Optimizer,
        batch_size: int | None,
        mask: np.ndarray | None = None,
        penalty: Callable[[keras.Model], tf.Tensor | None] = lambda model: None,
        fold: bool = True,
        parts: int = 1,
        with_products: bool = True,
    ) -> None:
        model = task.model
        chosen = np.ones(len(model.trainable_variables), bool) if mask is None else mask
        variables = [variable for variable, trains in zip(model.trainable_variables, chosen, strict=True) if trains]
        trained, self.trains_all = {id(variable) for variable in variables}, bool(chosen.all())
        self._frozen = frozen_values(model, trained) if fold else {}
        self.accumulators = [tf.Variable(tf.zeros_like(each.value)) for each in variables] if parts > 1 else []

        def step(
            inputs: Structure, targets: Structure, weights: Structure
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
            examples = inputs, targets, weights
            rate = tf.identity(optimizer.learning_rate)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([variable.value for variable in variables])
                folding: AbstractContextManager[list[Pair]] = nullcontext([])
                if fold:
                    folding = folded_batch_norm(model, trained, self._frozen, with_products, task.rows)
                with folding as self.folded_pairs:
                    loss, outputs = task.run(examples, training=True)
                added = penalty(model)
                scaled = optimizer.scale_loss(loss if added is None else loss + added)
            gradients = tape.gradient(scaled, [variable.value for variable in variables])
            self.loss, self.gradients = loss, gradients
            if parts > 1:
                for sums, gradient in zip(self.accumulators, gradients, strict=True):
                    if gradient is not None:
                        sums.assign_add(tf.convert_to_tensor(gradient) / parts)
            else:
                with one_replica(optimizer):
                    optimizer.apply(*drop_missing(gradients, variables))
            return loss, task.measures(loss, examples, outputs), rate

        super().__init__(step, task.signature(batch_size), variables)
        pairs = zip(self.gradients, self.accumulators, variables, strict=True) if parts > 1 else ()
        used = [(sums, variable) for gradient, sums, variable in pairs if gradient is not None]

        def update() -> None:
            with one_replica(optimizer):
                optimizer.apply([sums.read_value() for sums, _ in used], [variable for _, variable in used])
            for sums, _ in used:
                sums.assign(tf.zeros_like(sums))

        self.update = tf.function(update, autograph=False).get_concrete_function() if parts > 1 else None

    def __call__(self, inputs: Structure, targets: Structure, weights: Structure = None) -> StepValues:
        """Train on one batch: loss, measures and learning rate. Blocks until the device finishes."""
        return as_numbers(*self.results(inputs, targets, weights))

    def refresh(self) -> None:
        """Follow weights that do not train and were assigned from outside: what was computed from them is, again."""
        for variable, compute in self._frozen.values():
            variable.assign(compute())


def as_numbers(loss: tf.Tensor, measures: dict[str, tf.Tensor], rate: tf.Tensor) -> StepValues:
    """What a step returned, as Python's numbers. Blocks until the device finishes."""
    return float(loss), {name: as_number(value) for name, value in measures.items()}, float(rate)


def as_number(value: tf.Tensor) -> Any:
    """A float, or lists of them for a metric that has several."""
    return value.numpy().tolist() if np.ndim(value) else float(value)


def drop_missing(
    gradients: Iterable[tf.Tensor | None], variables: Iterable[keras.Variable]
) -> tuple[list[tf.Tensor], list[keras.Variable]]:
    """The gradients that exist, and their variables: Keras' optimizers warn of others, or refuse them."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    return [g for g, _ in pairs], [v for _, v in pairs]


@contextmanager
def one_replica(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Trace updates in this block without Keras' sum of gradients over replicas.

    At every trace, that sum registers a custom gradient in a global table, which keeps the graph in memory: each new
    selection would leak the graph of the one before (10 MB for MobileNetV2).
    """
    inner = unscaled(optimizer)
    object.__setattr__(inner, "_all_reduce_sum_gradients", lambda pairs: pairs)
    try:
        yield
    finally:
        object.__delattr__(inner, "_all_reduce_sum_gradients")


class AllGradients(BatchFunction):
    """Every gradient, without an update: what importance is measured from, and how fast the device is.

    `exist` is bool [N], whether each of `task.model.trainable_variables` has an influence on the loss; `written` are
    handles of the variables that a forward pass changes: random and recurrent states, metrics of losses.
    """

    def __init__(self, task: Task, batch_size: int | None) -> None:
        variables = [variable.value for variable in task.model.trainable_variables]
        scale = FLOAT16_SCALE if keras.config.dtype_policy().name == "mixed_float16" else 1.0

        def gradients(*examples: Any) -> list[tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                with folded_batch_norm(task.model, rows=task.rows):
                    loss = scale * task.run(examples, training=True)[0]
            found = tape.gradient(loss, variables)
            self.exist = np.array([gradient is not None for gradient in found])
            pairs = zip(found, variables, strict=True)
            return [tf.zeros_like(v) if g is None else tf.convert_to_tensor(g) / scale for g, v in pairs]

        super().__init__(gradients, task.signature(batch_size), ())
        self.written = written_variables(self.graph)

    def __call__(self, batch: Batch) -> list[tf.Tensor]:
        """The gradients [N] on a batch; 0 for a variable without influence on the loss."""
        return self.results(batch.inputs, batch.targets, batch.weights)  # type: ignore[no-any-return]

    def run(self, batch: Batch) -> float:
        """Compute them all; blocks until the device finishes."""
        return float(tf.reduce_sum(self(batch)[-1]))
