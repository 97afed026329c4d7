"""What is trained: a network, the loss of a batch, and what is reported of it.

A batch has inputs, targets and weights: structures of tensors [batch, …], such as one tensor, a list or a dict. Weights
are those of its examples in the loss, or None. Nothing else in the package looks at what the loss is.

    ImageClassification   images with integer labels: softmax cross-entropy and accuracy
    CompiledTask          a compiled Keras model: its own loss, loss weights and metrics, whatever they are
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import ArrayData, ShuffledData, Structure, mapped
from elastic_trainer.engine.optimizers import unscaled
from elastic_trainer.networks.graphs import needed_operations, written_variables
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.system.errors import UserError

Examples = tuple[Structure, Structure, Structure]  # inputs, targets and weights of a batch


class Score(NamedTuple):
    """The result of a validation that says which model is best: its name, and whether more of it is better."""

    name: str
    is_higher_better: bool

    def of(self, results: dict[str, Any], prefix: str = "") -> float:
        """A number that is higher for a better model. In rows of metrics.csv, `prefix` comes before the names."""
        value: float = results[prefix + self.name]
        return value if self.is_higher_better else -value


class Task:
    """See the module's header. A subclass defines `loss`, and `measures` if it reports more than the loss.

    Args:
        model: the network, with frozen batch norm.
        inputs, targets, weights: structures of `tf.TensorSpec`. The first axis is that of the batch, None if batches
            differ in size.

    Attributes:
        score: says which model is best.
        is_running: whether `measures` are results since `reset`, as of Keras' metrics; else they are of the batch.
        rows: examples of most batches, where functions are traced for any number; None: not known.
        allows_infinite_loss: training goes on where the loss is no longer a finite number.
        suspects: what else than the learning rate may make it infinite, in words.
    """

    score = Score("loss", False)
    is_running = False
    rows: int | None = None
    allows_infinite_loss = False
    suspects = "inputs, targets and weights for values that are not finite"

    def __init__(self, model: keras.Model, inputs: Structure, targets: Structure, weights: Structure = None) -> None:
        self.model, self._specs = model, (inputs, targets, weights)

    def signature(self, batch_size: int | None) -> tuple[Structure, Structure, Structure]:
        """Specs of the inputs, targets and weights of a batch; None: of the size of all batches, or of any size."""
        return mapped(
            lambda spec: tf.TensorSpec((batch_size or spec.shape[0], *spec.shape[1:]), spec.dtype), self._specs
        )

    def with_model(self, model: keras.Model) -> Task:
        """The same for another network."""
        other = copy.copy(self)
        other.model = model
        return other

    @property
    def head(self) -> np.ndarray:
        """Bool [N] over `model.trainable_variables`: what every scheme trains, see `head_mask`."""
        return head_mask(self.model)

    def run(self, examples: Examples, training: bool) -> tuple[tf.Tensor, Structure]:
        """The loss of a batch, a scalar, and what the network returns for it."""
        outputs = self.outputs(examples[0], training)
        return self.loss(examples, outputs, training), outputs

    def outputs(self, inputs: Structure, training: bool) -> Structure:
        """What the network returns, called as `fit` calls it."""
        return self.model(inputs, training=training) if self.model._call_has_training_arg else self.model(inputs)

    def loss(self, examples: Examples, outputs: Structure, training: bool) -> tf.Tensor:
        """The mean loss over a batch; in training with the network's own regularisers."""
        raise NotImplementedError

    def measures(self, loss: tf.Tensor, examples: Examples, outputs: Structure) -> dict[str, tf.Tensor]:
        """What is reported besides the loss: scalars by name."""
        return {}

    def micro_batch_obstacle(self) -> str | None:
        """Why the loss of a batch is not the mean of those of equal parts, in words; None if it is."""
        return None

    def reset(self) -> None:
        """Start `measures` again, at the start of an epoch and of a validation."""


class StepVariables(NamedTuple):
    """What a step does with variables.

    Attributes:
        written: handles of those that the forward pass, the loss and the metrics change.
        used: bool [N] over `model.trainable_variables`, whether the loss depends on them.
    """

    written: list[tf.Tensor]
    used: np.ndarray


def classification_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of logits [batch, classes] against integer labels [batch]."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


class ImageClassification(Task):
    """Images float32 [batch, height, width, channels] with labels int32 [batch]; the network returns logits.

    Args:
        model: the network.
    """

    score = Score("accuracy", True)
    suspects = "--weights, and how --model_name scales images in 0…255"

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model, tf.TensorSpec((None, *model.input_shape[1:])), tf.TensorSpec((None,), tf.int32))

    def loss(self, examples: Examples, outputs: Structure, training: bool) -> tf.Tensor:
        loss = classification_loss(examples[1], tf.cast(outputs, tf.float32))  # also if it computes in half precision
        return tf.add_n([loss, *self.model.losses]) if training else loss

    def measures(self, loss: tf.Tensor, examples: Examples, outputs: Structure) -> dict[str, tf.Tensor]:
        correct = tf.equal(tf.argmax(tf.cast(outputs, tf.float32), axis=-1, output_type=tf.int32), examples[1])
        return {"accuracy": tf.reduce_mean(tf.cast(correct, tf.float32))}


class CompiledTask(Task):
    """The loss and the metrics that a Keras model was compiled with.

    Args:
        model: compiled; its `train_step` is Keras' own. It is built if it is not.
        inputs, targets, weights: as of `Task`. Weights include those of classes.

    Raises:
        UserError: the model was not compiled, trains by custom code, or a batch norm of it is not frozen.
    """

    is_running = True

    def __init__(self, model: keras.Model, inputs: Structure, targets: Structure, weights: Structure = None) -> None:
        super().__init__(model, inputs, targets, weights)
        if not getattr(model, "compiled", False):
            raise UserError("the model is not compiled; call model.compile(optimizer=…, loss=…) first")
        if type(model).train_step is not keras.Model.train_step:
            raise UserError(
                f"{type(model).__name__} has its own train_step, which says how it trains; override compute_loss "
                "instead, or train it without ElasticTraining"
            )
        if model.run_eagerly:
            raise UserError("run_eagerly=True: elastic steps are compiled; leave it out of model.compile")
        if not hasattr(type(model.optimizer), "learning_rate") or hasattr(model.optimizer, "optimizers"):
            raise UserError("several optimizers for one model: an elastic step needs one for all of its tensors")
        if getattr(unscaled(model.optimizer), "ema_overwrite_frequency", None):
            raise UserError(
                "ema_overwrite_frequency would overwrite tensors that do not train; leave it out: with use_ema=True, "
                "fit sets the averages at its end"
            )
        if not all(layer.built for layer in model._flatten_layers()):  # it makes its variables in its first step
            model(mapped(lambda spec: keras.KerasTensor((None, *spec.shape[1:]), spec.dtype), inputs))
        free = [
            layer.name
            for layer in model._flatten_layers()
            if type(layer) is keras.layers.BatchNormalization and layer.trainable
        ]
        if free:
            raise UserError(
                f"the batch normalisation {free[0]} would change its statistics; call "
                "elastic_trainer.freeze_batch_norm(model) before model.compile, as the paper does"
            )
        self._trainable = [*map(id, model.trainable_variables)]

    def loss(self, examples: Examples, outputs: Structure, training: bool) -> tf.Tensor:
        inputs, targets, weights = examples
        return self.model._compute_loss(inputs, targets, outputs, weights, training)  # also by older overrides

    def measures(self, loss: tf.Tensor, examples: Examples, outputs: Structure) -> dict[str, tf.Tensor]:
        """All that Keras reports, the running mean of the loss included."""
        inputs, targets, weights = examples
        [first, *_] = [part for part in tf.nest.flatten(inputs) if part is not None]
        self.model._loss_tracker.update_state(loss, sample_weight=tf.shape(first)[0])
        return self.model.compute_metrics(inputs, targets, outputs, sample_weight=weights)

    @cached_property
    def variables(self) -> StepVariables:
        """What a step does with variables. It makes those that Keras makes when it first uses a loss or a metric."""
        loss: Any = None

        def step(*examples: Any) -> dict[str, tf.Tensor]:
            nonlocal loss
            loss, outputs = self.run(examples, training=True)
            return self.measures(loss, examples, outputs)

        graph = tf.function(step, autograph=False).get_concrete_function(*self.signature(None)).graph
        needed = needed_operations([loss])
        read = {id(outside) for outside, inside in graph.captures if inside.op.name in needed}
        used = [id(variable.value.handle) in read for variable in self.model.trainable_variables]
        return StepVariables(written_variables(graph), np.array(used, bool))

    @property
    def head(self) -> np.ndarray:
        return head_mask(self.model, self.variables.used)

    def check_variables(self) -> None:
        """Raise `UserError` if other variables are trainable than before, or some that the optimizer does not know."""
        optimizer = unscaled(self.model.optimizer)
        variables = [*map(id, self.model.trainable_variables)]
        is_known = not optimizer.built or {*variables} <= {*map(id, optimizer._trainable_variables)}
        if variables != self._trainable or not is_known:
            raise UserError("`trainable` of a layer has changed; compile the model again after changing trainable")

    def micro_batch_obstacle(self) -> str | None:
        means = ("sum_over_batch_size", "mean", "auto")
        others = [getattr(loss, "reduction", "mean") for loss in tf.nest.flatten(self.model.loss)]
        if any(other not in means for other in others):
            return f"needs losses that are means over a batch, not {others}"
        outputs = tf.nest.flatten(self.model.outputs if hasattr(self.model, "outputs") else None)
        is_masked = any(getattr(output, "_keras_mask", None) is not None for output in outputs)
        return "outputs with a mask have parts of different weight" if is_masked else None

    def reset(self) -> None:
        self.model.reset_metrics()


def task_of(model: keras.Model | Task, data: ShuffledData) -> Task:
    """The task itself, that of a compiled model with its `ArrayData`, or the classification of images.

    Raises:
        UserError: as of `CompiledTask`, or a compiled model has other data.
    """
    if isinstance(model, Task):
        return model
    if isinstance(data, ArrayData):
        return CompiledTask(model, *data.specs)
    if getattr(model, "compiled", False):
        raise UserError("a compiled model takes its examples from elastic_trainer.ArrayData")
    return ImageClassification(model)
