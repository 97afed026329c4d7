"""The functions of a file that trains in LiteRT. Each is a signature of the file, with inputs and outputs by name.

    start      sets the variables to the weights of now, and their momentum to 0
    load       sets them to its inputs; `state` returns them
    features   images -> what passes the cut of the step (`training.prefix`); the frozen weights are constants
    infer      features (or images, if the network has no frozen part) -> logits
    gradients  features, labels, a weight for each image -> loss and accuracy; adds the gradients up
    update     learning rate -> one update of the weights by those gradients, which are then 0 again
    train      both at once, for batches of one part
    fill       the arrays of the file for inference (`board.inference_file`), from the weights of now

A batch is trained in parts of a fixed size, since the memory of the board decides how many images it can compute at a
time. The weight of an image is one over the number of images of the batch, or 0 for one that fills up a part. The
update is that of `training.optimizers.SGDW`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.board.rebuild import random_tensors, rebuild
from elastic_trainer.datasets.batches import Structure
from elastic_trainer.errors import UserError
from elastic_trainer.evaluation.export import convert_module, inference_module, missing_kernels
from elastic_trainer.machine import silenced
from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.optimizers import MIN_NORM, SGDW
from elastic_trainer.training.prefix import Cut, find_cut
from elastic_trainer.training.step import BatchFunction, TrainStep

Values = dict[str, Any]  # tensors by name
_KERNELS = [tf.lite.OpsSet.TFLITE_BUILTINS]


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


class Signature(NamedTuple):
    """A function of tensors by name, and the specs of its inputs."""

    function: Callable[..., Values]
    inputs: dict[str, tf.TensorSpec]


class _Trained(NamedTuple):
    """A variable of the file, its momentum and its summed gradient, for a variable of the network."""

    source: keras.Variable
    weights: tf.Variable
    momentum: tf.Variable
    gradient: tf.Variable
    is_clipped: bool

    @property
    def handle(self) -> int:
        return id(self.source.value.handle)


class TrainingFunctions:
    """The signatures for one selection.

    Args:
        model: a classifier of images that returns logits.
        optimizer: built for all of `model.trainable_variables`.
        mask: bool [N] over them, what trains.
        part: images that are computed at a time.
        arrays: what `fill` returns: a traced function without inputs.

    Attributes:
        signatures: by name.
        trained: the variables of the network that train.
        module: owns the file's variables.
        random_tensors: of the traced step, which are inputs here: uniform numbers from 0 to 1, for dropout.

    Raises:
        UserError: the network has an operation that is not covered, or the optimizer is not SGD.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        mask: np.ndarray,
        part: int,
        arrays: Any,
    ) -> None:
        if not isinstance(optimizer, SGDW):
            raise UserError("training in LiteRT works with --optimizer sgd only")
        task = WeightedImages(model)
        step = TrainStep(task, optimizer, part, mask)
        self._optimizer, self._part, self._step = optimizer, part, step
        self.trained = step.variables
        positions = [index for index, trains in enumerate(mask) if trains]
        self._initial = [variable.numpy() for variable in self.trained]
        zeros = [np.zeros_like(value) for value in self._initial]
        self._variables = [
            _Trained(
                variable,
                tf.Variable(initial, name=f"weights_{index}"),
                tf.Variable(zero, name=f"momentum_{index}"),
                tf.Variable(zero, name=f"gradient_{index}"),
                optimizer.clipping is not None and position not in optimizer.unclipped,
            )
            for index, (variable, initial, zero, position) in enumerate(
                zip(self.trained, self._initial, zeros, positions, strict=True)
            )
        ]
        self.module = tf.Module()
        self.module.kept = [[each.weights, each.momentum, each.gradient] for each in self._variables]
        image = {"images": tf.TensorSpec((part, *model.input_shape[1:]))}
        cut = find_cut(step)
        self._cut = cut.tensors if cut else list(step.inputs)
        names = [f"features_{index}" for index in range(len(self._cut))] if cut else ["images"]
        features = {name: tf.TensorSpec(tensor.shape) for name, tensor in zip(names, self._cut, strict=True)}
        batch = {**features, "labels": tf.TensorSpec((part,), tf.int32), "weights": tf.TensorSpec((part,))}
        graph, given = step.graph, [*self._cut, *step.targets]
        self._results = [*graph.outputs[:2], *step.gradients]
        self.random_tensors = random_tensors(graph, self._results, [tensor.name for tensor in given])
        for index, tensor in enumerate(self.random_tensors):  # after the targets, in this order
            batch[f"random_{index}"] = tf.TensorSpec(tensor.shape)
        self._given = dict(zip(batch, (tensor.name for tensor in (*given, *self.random_tensors)), strict=True))
        rate = {"rate": tf.TensorSpec(())}
        states = {
            f"{kind}_{index}": tf.TensorSpec(each.weights.shape)
            for kind in ("weights", "momentum")
            for index, each in enumerate(self._variables)
        }
        self.signatures = {
            "start": Signature(self._start, {}),
            "load": Signature(self._load, states),
            "state": Signature(self._state, {}),
            "gradients": Signature(self._add_gradients, batch),
            "update": Signature(self._update, rate),
            "train": Signature(self._train, {**batch, **rate}),
        }
        if cut:
            self.signatures["features"] = Signature(self._features, image)
        self.signatures["infer"] = self._inference(task, cut, features, image)
        if arrays is not None:
            self.signatures["fill"] = Signature(lambda: self._filled(arrays), {})

    def _values(self) -> dict[int, tf.Tensor]:
        return {each.handle: each.weights.read_value() for each in self._variables}

    # --- training ---------------------------------------------------------------------------------------------------

    def _features(self, images: tf.Tensor) -> Values:
        [name] = [tensor.name for tensor in self._step.inputs]
        found = rebuild(self._step.graph, self._cut, {name: images}, {})
        return {f"features_{index}": values for index, values in enumerate(found)}

    def _gradients(self, batch: Values) -> tuple[Values, list[tf.Tensor]]:
        feeds = {self._given[name]: value for name, value in batch.items()}
        loss, accuracy, *gradients = rebuild(self._step.graph, self._results, feeds, self._values())
        return {"loss": loss, "accuracy": accuracy}, gradients

    def _add_gradients(self, **batch: tf.Tensor) -> Values:
        results, gradients = self._gradients(batch)
        for each, gradient in zip(self._variables, gradients, strict=True):
            each.gradient.assign(each.gradient.read_value() + gradient)
        return results

    def _update(self, rate: tf.Tensor) -> Values:
        for each in self._variables:
            self._apply(each, each.gradient.read_value(), rate)
            each.gradient.assign(tf.zeros(each.gradient.shape))
        return _done()

    def _train(self, rate: tf.Tensor, **batch: tf.Tensor) -> Values:
        results, gradients = self._gradients(batch)
        for each, gradient in zip(self._variables, gradients, strict=True):
            self._apply(each, gradient, rate)
        return results

    def _apply(self, each: _Trained, gradient: tf.Tensor, rate: tf.Tensor) -> None:
        """The update of `training.optimizers.SGDW`."""
        optimizer, weights = self._optimizer, each.weights.read_value()
        own_rate = rate
        if each.is_clipped and optimizer.clipping is not None:
            most = optimizer.clipping**2 * tf.maximum(tf.reduce_sum(weights * weights), MIN_NORM**2)
            # The smallest normal number: of a gradient of 0, TensorFlow's own factor is 1, too.
            own_rate *= tf.minimum(tf.sqrt(most / tf.maximum(tf.reduce_sum(gradient * gradient), 1e-37)), 1.0)
        moved = optimizer.momentum * each.momentum.read_value() - own_rate * gradient
        each.momentum.assign(moved)
        decay = rate * optimizer.decoupled_weight_decay if optimizer.decoupled_weight_decay else None
        each.weights.assign((weights if decay is None else weights - weights * decay) + moved)

    # --- the state, and inference -----------------------------------------------------------------------------------

    def _start(self) -> Values:
        weights = {f"weights_{index}": tf.constant(value) for index, value in enumerate(self._initial)}
        return self._load(**weights, **{f"momentum_{k}": tf.zeros(w.shape) for k, w in enumerate(self._initial)})

    def _load(self, **state: tf.Tensor) -> Values:
        for index, each in enumerate(self._variables):
            each.weights.assign(state[f"weights_{index}"])
            each.momentum.assign(state[f"momentum_{index}"])
            each.gradient.assign(tf.zeros(each.gradient.shape))
        return _done()

    def _state(self) -> Values:
        weights = {f"weights_{index}": each.weights.read_value() for index, each in enumerate(self._variables)}
        return weights | {f"momentum_{index}": each.momentum.read_value() for index, each in enumerate(self._variables)}

    def _filled(self, arrays: Any) -> Values:
        results = rebuild(arrays.graph, arrays.graph.outputs, {}, self._values())
        return {f"array_{index}": value for index, value in enumerate(results)}

    def _inference(self, task: WeightedImages, cut: Cut | None, features: Values, image: Values) -> Signature:
        """The forward pass from the features of the training step, if it needs no others; else from images."""
        trained = {id(variable) for variable in self.trained}

        def forward(inputs: Structure, targets: Structure, weights: Structure) -> tf.Tensor:
            with folded_batch_norm(task.model, trained):
                return task.outputs(inputs, training=False)

        function = BatchFunction(forward, task.signature(self._part), self.trained)
        own = find_cut(function) if cut else None
        given, inputs = {"images": function.inputs[0].name}, image
        if cut is not None and own is not None:
            images = tf.random.uniform(tuple(image["images"].shape), maxval=255)
            of_step, wanted = (
                _features_of(traced, each, images) for traced, each in ((self._step, cut), (function, own))
            )
            found = [next((k for k, other in enumerate(of_step) if _same(value, other)), None) for value in wanted]
            if None not in found:
                taken = dict(zip((f"features_{index}" for index in found), own.tensors, strict=True))
                given, inputs = {name: tensor.name for name, tensor in taken.items()}, features

        def infer(**values: tf.Tensor) -> Values:
            feeds = {given[name]: value for name, value in values.items() if name in given}
            [logits] = rebuild(function.graph, function.graph.outputs, feeds, self._values())
            return {"logits": logits}

        return Signature(infer, inputs)

    def traced(self) -> dict[str, Any]:
        """The signatures as concrete functions."""
        return {
            name: tf.function(signature.function, autograph=False).get_concrete_function(**signature.inputs)
            for name, signature in self.signatures.items()
        }


def converted_file(functions: TrainingFunctions) -> bytes:
    """The file with all signatures, of LiteRT's own kernels.

    Raises:
        UserError: LiteRT lacks the kernel of an operation; the message names it.
    """
    traced = functions.traced()
    functions.module.kept_functions = [*traced.values()]
    with _naming_missing_kernels(), tempfile.TemporaryDirectory() as folder, silenced():
        tf.saved_model.save(functions.module, folder, signatures=traced)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[*traced])
        converter.target_spec.supported_ops = _KERNELS
        converter.experimental_enable_resource_variables = True
        return converter.convert()


def converted_function(model: keras.Model, function: Callable[..., Any]) -> bytes:
    """A function of one image float32 [1, size, size, 3] that calls `model`, for LiteRT. Errors as `converted_file`."""
    with _naming_missing_kernels():
        return convert_module(inference_module(model, function), False, _KERNELS)


@contextmanager
def _naming_missing_kernels() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ConverterError is not public
        raise UserError(f"LiteRT cannot train this network: {missing_kernels(error)}") from error


def _same(value: np.ndarray, other: np.ndarray) -> bool:
    return value.shape == other.shape and bool(np.allclose(value, other, rtol=1e-4, atol=1e-4 * np.abs(value).max()))


def _features_of(function: BatchFunction, cut: Cut, images: tf.Tensor) -> list[np.ndarray]:
    """What passes the cut of a traced function, for `images`."""
    [name] = [tensor.name for tensor in function.inputs]
    compute = tf.function(lambda given: rebuild(function.graph, cut.tensors, {name: given}, {}), autograph=False)
    return [values.numpy() for values in compute(images)]


def _done() -> Values:
    return {"done": tf.constant(1.0)}
