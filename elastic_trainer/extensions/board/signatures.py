"""The functions of a file that trains in LiteRT. Each is a signature of the file, with inputs and outputs by name.

    start      sets the variables to the weights of now, and their momentum to 0
    load       sets them to its inputs; `state` returns them
    features   images -> what passes the cut of the step (`training.prefix`), and what `infer` needs besides; the
               images themselves if no part of the network is frozen
    infer      features -> logits
    gradients  features, labels, a weight for each image -> loss and accuracy; adds the gradients up
    update     learning rate [1] -> one update of the weights by those gradients, which are then 0 again
    train      both at once, for batches of one part
    fill       the arrays of the file for inference (`board.inference_file`), from the weights of now

A batch is trained in parts of a fixed size, since the memory of the board decides how many images it can compute at a
time. The weight of an image is one over the number of images of the batch, or 0 for one that fills up a part. The
update is that of `training.optimizers.SGDW`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Structure
from elastic_trainer.errors import UserError
from elastic_trainer.evaluation.export import convert_module, inference_module, missing_kernels
from elastic_trainer.extensions.board.rebuild import random_tensors, rebuild
from elastic_trainer.extensions.board.variables import BoardVariables, Signature, Values, done
from elastic_trainer.machine import silenced
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.optimizers import SGDW
from elastic_trainer.training.prefix import find_cut
from elastic_trainer.training.step import BatchFunction, TrainStep, drop_missing


class WeightedImages(ImageClassification):
    """Images whose losses are summed, each times its weight, so that the parts of a batch add up to its mean loss."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        inputs, targets, _ = self._specs
        self._specs = (inputs, targets, tf.TensorSpec((None,)))

    def loss(
        self, inputs: Structure, targets: Structure, weights: Structure, outputs: Structure, training: bool
    ) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
        regularisers = [tf.reduce_sum(weights) * each for each in self.model.losses] if training else []
        return tf.add_n([tf.reduce_sum(weights * losses), *regularisers])

    def measures(
        self, loss: tf.Tensor, inputs: Structure, targets: Structure, weights: Structure, outputs: Structure
    ) -> dict[str, tf.Tensor]:
        correct = tf.equal(tf.argmax(outputs, axis=-1, output_type=tf.int32), targets)
        return {"accuracy": tf.reduce_sum(weights * tf.cast(correct, tf.float32))}


class StepFunctions:
    """The signatures of one selection: `features`, `infer`, `gradients`, `update` and `train`.

    Args:
        model: a classifier of images that returns logits.
        optimizer: built for all of `model.trainable_variables`.
        mask: bool [N] over them, what trains.
        part: images that are computed at a time.
        variables: of the file, these among them.

    Attributes:
        signatures: by name.
        features: specs of the features by name, [part, …].
        random_tensors: of the traced step, by name, which are inputs here: `random_0`, … have uniform numbers from 0
            to 1, as for dropout; `normal_0`, … those of a standard normal distribution.

    Raises:
        UserError: the network has an operation that is not covered.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        mask: np.ndarray,
        part: int,
        variables: BoardVariables,
    ) -> None:
        self._variables, task = variables, WeightedImages(model)
        self._step = step = TrainStep(task, optimizer, part, mask, with_products=False)
        trained = {id(variable) for variable in step.variables}

        def forward(inputs: Structure, targets: Structure, weights: Structure) -> tf.Tensor:
            with folded_batch_norm(model, trained, with_products=False):
                return task.outputs(inputs, training=False)

        self._inference = BatchFunction(forward, task.signature(part), step.variables)
        images = tf.TensorSpec((part, *model.input_shape[1:]))
        self._cut, self._others, wanted = _cuts(step, self._inference, images)
        names = [f"features_{index}" for index in range(len(self._cut) + len(self._others))]
        shapes = [tensor.shape for tensor in (*self._cut, *self._others)]
        self.features = {name: tf.TensorSpec(shape) for name, shape in zip(names, shapes, strict=True)}
        batch = {name: self.features[name] for name in names[: len(self._cut)]}
        batch |= {"labels": tf.TensorSpec((part,), tf.int32), "weights": tf.TensorSpec((part,))}
        given = [*self._cut, *step.targets]
        gradients, self._trained = drop_missing(step.gradients, step.variables)
        with step.graph.as_default():
            self._results = [*step.graph.outputs[:2], *map(tf.convert_to_tensor, gradients)]
        self.random_tensors = random_tensors(step.graph, self._results, [tensor.name for tensor in given])
        batch |= {name: tf.TensorSpec(tensor.shape) for name, tensor in self.random_tensors.items()}
        tensors = (*given, *self.random_tensors.values())  # in the order of `batch`
        self._given = dict(zip(batch, (tensor.name for tensor in tensors), strict=True))
        self._inferred_from = {names[index]: tensor.name for index, tensor in wanted.items()}
        rate = {"rate": tf.TensorSpec((1,))}  # on ARM, LiteRT 1.4.0 and 2.1.0 crash if an input has no axis
        self.signatures = {
            "features": Signature(self._features, {"images": images}),
            "gradients": Signature(self._add_gradients, batch),
            "update": Signature(self._update, rate),
            "train": Signature(self._train, {**batch, **rate}),
            "infer": Signature(self._infer, {name: self.features[name] for name in self._inferred_from}),
        }

    def _features(self, images: tf.Tensor) -> Values:
        found = []
        for function, tensors in ((self._step, self._cut), (self._inference, self._others)):
            found += rebuild(function.graph, tensors, {function.inputs[0].name: images}, self._variables.values())
        return {name: tf.identity(value) for name, value in zip(self.features, found, strict=True)}

    def _infer(self, **features: tf.Tensor) -> Values:
        feeds, graph = {self._inferred_from[name]: value for name, value in features.items()}, self._inference.graph
        [logits] = rebuild(graph, graph.outputs, feeds, self._variables.values())
        return {"logits": logits}

    def _gradients(self, batch: Values) -> tuple[Values, list[tf.Tensor]]:
        feeds = {self._given[name]: value for name, value in batch.items()}
        loss, accuracy, *gradients = rebuild(self._step.graph, self._results, feeds, self._variables.values())
        return {"loss": loss, "accuracy": accuracy}, gradients

    def _add_gradients(self, **batch: tf.Tensor) -> Values:
        results, gradients = self._gradients(batch)
        self._variables.add(self._trained, gradients)
        return results

    def _update(self, rate: tf.Tensor) -> Values:
        self._variables.update(self._trained, tf.reshape(rate, ()))
        return done()

    def _train(self, rate: tf.Tensor, **batch: tf.Tensor) -> Values:
        results, gradients = self._gradients(batch)
        self._variables.apply(self._trained, gradients, tf.reshape(rate, ()))
        return results


def _cuts(
    step: BatchFunction, inference: BatchFunction, images: tf.TensorSpec
) -> tuple[list[tf.Tensor], list[tf.Tensor], dict[int, tf.Tensor]]:
    """Where a step and the forward pass are cut. Both are traced; equal values tell which tensors are the same.

    Returns:
        The tensors of the step; those of the forward pass that the step lacks; and the tensor of the forward pass for
        each place in both lists together that it needs.
    """
    cuts = [(function, find_cut(function)) for function in (step, inference)]
    of_step, own = ([*(cut.tensors if cut else function.inputs)] for function, cut in cuts)
    pixels = tf.random.uniform(images.shape, maxval=255)
    values = [_values(function, tensors, pixels) for (function, _), tensors in zip(cuts, (of_step, own), strict=True)]
    others: list[tf.Tensor] = []
    wanted: dict[int, tf.Tensor] = {}
    for tensor, value in zip(own, values[1], strict=True):
        found = next((index for index, other in enumerate(values[0]) if _same(value, other)), None)
        if found is None:
            found = len(of_step) + len(others)
            others.append(tensor)
        wanted[found] = tensor
    return of_step, others, wanted


class TrainingFunctions:
    """The signatures of a file with one or more selections.

    Args:
        model: a classifier of images that returns logits.
        optimizer: built for all of `model.trainable_variables`.
        masks: bool [N] over them, what each selection trains. The selections share their variables.
        part: images that are computed at a time.
        has_parts: whether a batch has several parts.
        arrays: what `fill` returns: a traced function without inputs, or None.

    Attributes:
        steps: of each selection.
        signatures: by name; those of the second selection end in `_1`, and so on.
        variables: of the file.

    Raises:
        UserError: the network has an operation that is not covered, or the optimizer is not SGD.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        masks: Sequence[np.ndarray],
        part: int,
        has_parts: bool,
        arrays: Any,
    ) -> None:
        if not isinstance(optimizer, SGDW):
            raise UserError("--export train_tflite: works with --optimizer sgd only")
        self.variables = BoardVariables(model, optimizer, np.any(masks, axis=0))
        self.steps = [StepFunctions(model, optimizer, mask, part, self.variables) for mask in masks]
        self.signatures = self.variables.signatures()
        unused = {"train"} if has_parts else {"gradients", "update"}
        for index, step in enumerate(self.steps):
            for name, signature in step.signatures.items():
                if name not in unused:
                    self.signatures[suffixed(name, index)] = signature
        if arrays is not None:
            self.signatures["fill"] = Signature(lambda: self._filled(arrays), {})

    def _filled(self, arrays: Any) -> Values:
        results = rebuild(arrays.graph, arrays.graph.outputs, {}, self.variables.values())
        return {f"array_{index}": value for index, value in enumerate(results)}

    def traced(self) -> dict[str, Any]:
        """The signatures as concrete functions."""
        return {
            name: tf.function(signature.function, autograph=False).get_concrete_function(**signature.inputs)
            for name, signature in self.signatures.items()
        }


def suffixed(name: str, selection: int) -> str:
    """The name of a signature of a selection, counted from 0."""
    return f"{name}_{selection}" if selection else name


def converted_file(functions: TrainingFunctions) -> bytes:
    """The file with all signatures, of LiteRT's own kernels.

    Raises:
        UserError: LiteRT lacks the kernel of an operation; the message names it.
    """
    traced = functions.traced()
    functions.variables.module.kept_functions = [*traced.values()]
    with _naming_missing_kernels(), tempfile.TemporaryDirectory() as folder, silenced():
        tf.saved_model.save(functions.variables.module, folder, signatures=traced)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[*traced])
        converter.experimental_enable_resource_variables = True
        return converter.convert()


def converted_function(model: keras.Model, function: Callable[..., Any]) -> bytes:
    """A function of one image float32 [1, size, size, 3] that calls `model`, for LiteRT. Errors as `converted_file`."""
    with _naming_missing_kernels():
        return convert_module(inference_module(model, function))


@contextmanager
def _naming_missing_kernels() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ConverterError is not public
        raise UserError(f"--export train_tflite: LiteRT cannot train this network: {missing_kernels(error)}") from error


def _same(value: np.ndarray, other: np.ndarray) -> bool:
    return value.shape == other.shape and bool(np.allclose(value, other, rtol=1e-4, atol=1e-4 * np.abs(value).max()))


def _values(function: BatchFunction, tensors: Sequence[tf.Tensor], images: tf.Tensor) -> list[np.ndarray]:
    """Values of tensors of a traced function, for `images`."""
    name = function.inputs[0].name
    compute = tf.function(lambda given: rebuild(function.graph, tensors, {name: given}, {}), autograph=False)
    return [value.numpy() for value in compute.get_concrete_function(images)(images)]
