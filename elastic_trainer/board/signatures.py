"""The functions of a file from which a board trains, each a signature with inputs and outputs by name.

In a file for LiteRT they are written with the operations that it has (`board.formulas`); in one for TensorFlow
(`board.graph_file`) they are those of the step.

    start      sets the variables to the exported weights, and their momentum to 0
    load       sets them to its inputs; `state` returns them
    features   images -> what passes the cut of the step (`engine.prefix`), and what `infer` needs besides; the
               images themselves if no part of the network is frozen
    infer      features -> logits, and `head_inputs` if a head in closed form can replace the last layer
    gradients  features, labels, a weight for each image -> loss and accuracy; adds the gradients up
    update     learning rate [1] -> one update of the weights by those gradients, which are then 0 again
    fill       the arrays of the file for inference (`board.inference_file`), from the current weights

A batch is trained in parts of a fixed size, since the memory of the board decides how many images it can compute at a
time. The weight of an image is one over the number of images of the batch, or 0 for one that fills up a part. The
update is that of `engine.optimizers.SGDW`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.board.formulas import FORMULAS, Formulas
from elastic_trainer.board.rebuild import random_tensors, rebuild
from elastic_trainer.board.variables import BoardVariables, Values, done, signature
from elastic_trainer.datasets.batches import Structure
from elastic_trainer.engine.closed_form_head import linear_head, recorded_inputs
from elastic_trainer.engine.optimizers import SGDW
from elastic_trainer.engine.prefix import find_cut
from elastic_trainer.engine.step import BatchFunction, TrainStep, drop_missing
from elastic_trainer.engine.task import Examples, ImageClassification
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.networks.tflite import naming_missing_kernels
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import silenced


class WeightedImages(ImageClassification):
    """Images whose losses are summed, each times its weight, so that the parts of a batch add up to its mean loss."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        inputs, targets, _ = self._specs
        self._specs = (inputs, targets, tf.TensorSpec((None,)))

    def loss(self, examples: Examples, outputs: Structure, training: bool) -> tf.Tensor:
        _, targets, weights = examples
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
        regularisers = [tf.reduce_sum(weights) * each for each in self.model.losses] if training else []
        return tf.add_n([tf.reduce_sum(weights * losses), *regularisers])

    def measures(self, loss: tf.Tensor, examples: Examples, outputs: Structure) -> dict[str, tf.Tensor]:
        _, targets, weights = examples
        correct = tf.equal(tf.argmax(outputs, axis=-1, output_type=tf.int32), targets)
        return {"accuracy": tf.reduce_sum(weights * tf.cast(correct, tf.float32))}


class TrainingFunctions:
    """The functions that train one selection.

    Random numbers of a step are inputs of `gradients`: `random_0`, … are uniform from 0 to 1, as for dropout;
    `normal_0`, … have a standard normal distribution.

    Args:
        model: a classifier of images that returns logits.
        optimizer: built for all of `model.trainable_variables`.
        mask: bool [N] over them, what trains.
        part: images that are computed at a time.
        arrays: what `fill` returns: a traced function without inputs, or None.
        formulas: of operations; empty for TensorFlow.

    `traced` has all functions by name.

    Raises:
        UserError: an operation is not covered, or the optimizer is not SGD.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        mask: np.ndarray,
        part: int,
        arrays: Any = None,
        formulas: Formulas = FORMULAS,
    ) -> None:
        if not isinstance(optimizer, SGDW):
            raise UserError("--export: a board trains with --optimizer sgd only")
        self.variables = variables = BoardVariables(model, optimizer, mask)
        self._formulas = formulas
        self.traced = {**variables.signatures(), **self._step(model, optimizer, mask, part)}

        def fill() -> Values:
            results = rebuild(arrays.graph, arrays.graph.outputs, {}, variables.values(), formulas)
            return {f"array_{index}": value for index, value in enumerate(results)}

        if arrays is not None:
            self.traced["fill"] = signature(fill)

    def _step(self, model: keras.Model, optimizer: SGDW, mask: np.ndarray, part: int) -> dict[str, Any]:
        """The signatures of a step."""
        task, variables = WeightedImages(model), self.variables
        step = TrainStep(task, optimizer, part, mask, with_products=False)
        inference = _inference(model, task, step, part)
        images = tf.TensorSpec((part, *model.input_shape[1:]))
        cut, others, inferred_from = _cuts(step, inference, images)
        specs = {f"features_{index}": tf.TensorSpec(tensor.shape) for index, tensor in enumerate((*cut, *others))}
        names = [*specs]
        found, trained = drop_missing(step.gradients, step.variables)
        with step.graph.as_default():
            results = [*step.graph.outputs[:2], *map(tf.convert_to_tensor, found)]
        given = dict(zip([*names[: len(cut)], "labels", "weights"], [*cut, *step.targets], strict=True))
        given |= random_tensors(step.graph, results, [tensor.name for tensor in given.values()])
        batch = {name: tf.TensorSpec(tensor.shape, tensor.dtype) for name, tensor in given.items()}
        batch |= {"labels": tf.TensorSpec((part,), tf.int32), "weights": tf.TensorSpec((part,))}

        def features(images: tf.Tensor) -> Values:
            values = self._compute(step, cut, {step.inputs[0].name: images})
            values += self._compute(inference, others, {inference.inputs[0].name: images})
            return {name: tf.identity(value) for name, value in zip(names, values, strict=True)}

        def infer(**features: tf.Tensor) -> Values:
            feeds = {
                tensor.name: value for name, value in features.items() for tensor in inferred_from[names.index(name)]
            }
            found = inference.packed(self._compute(inference, inference.graph.outputs, feeds))
            return {name: tf.identity(value) for name, value in found.items()}

        def gradients(**values: tf.Tensor) -> Values:
            feeds = {given[name].name: value for name, value in values.items()}
            loss, accuracy, *found = self._compute(step, results, feeds)
            variables.add(trained, found)
            return {"loss": loss, "accuracy": accuracy}

        def update(rate: tf.Tensor) -> Values:
            variables.update(trained, tf.reshape(rate, ()))
            return done()

        return {
            "features": signature(features, images=images),
            "infer": signature(infer, **{names[index]: specs[names[index]] for index in inferred_from}),
            "gradients": signature(gradients, **batch),
            # LiteRT 1.4 to 2.1 on ARM crash without an axis.
            "update": signature(update, rate=tf.TensorSpec((1,))),
        }

    def _compute(self, function: BatchFunction, tensors: Sequence[Any], feeds: dict[str, Any]) -> list[Any]:
        return rebuild(function.graph, tensors, feeds, self.variables.values(), self._formulas)

    def litert_file(self) -> bytes:
        """The file of LiteRT's own kernels. Raises `UserError`, which names the operation, if one is lacking."""
        module = self.variables.module
        module.kept_functions = [*self.traced.values()]
        what = "--export: LiteRT cannot train this network"
        with naming_missing_kernels(what), tempfile.TemporaryDirectory() as folder, silenced():
            tf.saved_model.save(module, folder, signatures=self.traced)
            converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[*self.traced])
            converter.experimental_enable_resource_variables = True
            content: bytes = converter.convert()
        return content


def _inference(model: keras.Model, task: WeightedImages, step: TrainStep, part: int) -> BatchFunction:
    """The forward pass without training, and what the head reads where that is clear."""
    head, folded = linear_head(model), {id(variable) for variable in step.variables}

    def forward(inputs: Structure, targets: Structure, weights: Structure) -> dict[str, tf.Tensor]:
        seen: AbstractContextManager[list[tf.Tensor]] = nullcontext([]) if head is None else recorded_inputs(head)
        with folded_batch_norm(model, folded, with_products=False), seen as read:
            results = {"logits": task.outputs(inputs, training=False)}
        return results | ({"head_inputs": read[0]} if len(read) == 1 and read[0].shape.rank == 2 else {})

    return BatchFunction(forward, task.signature(part), step.variables)


def _cuts(
    step: BatchFunction, inference: BatchFunction, images: tf.TensorSpec
) -> tuple[list[tf.Tensor], list[tf.Tensor], dict[int, list[tf.Tensor]]]:
    """Where a step and the forward pass are cut: equal values tell which of their tensors are the same.

    Returns the tensors of the step; those of the forward pass that the step lacks; and the tensors of the forward pass
    for each place in both lists together that it needs. Two may be one place: ReLU changes nothing above 0.
    """
    pixels, cuts = tf.random.uniform(images.shape, maxval=255), []
    for function in (step, inference):
        cut = find_cut(function)
        tensors = [*(cut.tensors if cut else function.inputs)]
        cuts.append((tensors, _values(function, tensors, pixels)))
    (of_step, step_values), (own, own_values) = cuts
    others: list[tf.Tensor] = []
    wanted: dict[int, list[tf.Tensor]] = {}
    for tensor, value in zip(own, own_values, strict=True):
        place = next((index for index, other in enumerate(step_values) if _same(value, other)), None)
        if place is None:
            place = len(of_step) + len(others)
            others.append(tensor)
        wanted.setdefault(place, []).append(tensor)
    return of_step, others, wanted


def _same(value: np.ndarray, other: np.ndarray) -> bool:
    return value.shape == other.shape and bool(np.allclose(value, other, rtol=1e-4, atol=1e-4 * np.abs(value).max()))


def _values(function: BatchFunction, tensors: Sequence[tf.Tensor], images: tf.Tensor) -> list[np.ndarray]:
    name = function.inputs[0].name
    compute = tf.function(lambda given: rebuild(function.graph, tensors, {name: given}, {}, {}), autograph=False)
    return [value.numpy() for value in compute.get_concrete_function(images)(images)]
