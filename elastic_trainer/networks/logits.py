"""Makes a classifier return logits, whatever it ends in, and as many of them as there are classes.

What comes out decides whether a model returns probabilities: a softmax may be a layer, an operation, an activation or
code of the user. It is left out of the model's graph if the rest then gives the same probabilities. In a model without
a graph it stays, and the logarithm of its probabilities replaces the logits: softmax(log p) = p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from elastic_trainer.networks.tensors import HEAD, head_mask, restored

TOLERANCE = 1e-2  # of probabilities; half precision has two digits
_IMAGES = 3  # of noise, for each setting of the head
_SMALLEST = {"softmax": 1e-37, "sigmoid": 1e-7}  # distance of a probability from 0 and, for a sigmoid, from 1

# (operation, its input, its output) -> what may take the place of the output.
_Replacements = Callable[[Any, Any, Any], Iterator[Any]]


def with_logits(model: keras.Model, shape: Sequence[int], num_classes: int, name: str) -> keras.Model:
    """`model` without a softmax or sigmoid at its end, and with a last dense layer for `num_classes` classes.

    Prints a line for each change, with the model's `name`. The layers are those of `model`, so its weights are too. It
    maps images [batch, *shape] to a tensor [batch, outputs].
    """
    probe = _Probe(model, shape)
    answers = probe(model)
    kind = _kind(answers)
    plain = None if kind is None else _left_out(model, kind, probe, answers)
    if plain is not None:
        print(f"{name}: stripping the final {kind}; what it reads are the logits")
        model, kind = plain, None
    model = _with_new_head(model, num_classes, name)
    if kind is None:
        return model
    print(f"{name}: returns probabilities; its {kind} cannot be left out, so their logarithm is used as logits")
    inputs = keras.Input(tuple(shape), name="image")
    return keras.Model(inputs, _logarithm(model(inputs), kind), name=model.name)


def _left_out(model: keras.Model, kind: str, probe: _Probe, answers: np.ndarray) -> keras.Model | None:
    """`model` without the last activation, if it has a graph and is the same again after an activation of `kind`."""
    activation = getattr(keras.ops, kind)
    for output in _rewired(_graph_output(model), _without_activation):
        plain = _ending_in(output, model)
        if np.allclose(activation(probe(plain)), answers, atol=TOLERANCE, rtol=0, equal_nan=True):
            return plain
    return None


def _with_new_head(model: keras.Model, num_classes: int, name: str) -> keras.Model:
    def new_head(operation: Any, source: Any, output: Any) -> Iterator[Any]:
        if isinstance(operation, keras.layers.Dense) and operation.units != num_classes:
            print(
                f"{name}: last layer {operation.name} has {operation.units} outputs; replaced by a new one for "
                f"{num_classes}"
            )
            yield keras.layers.Dense(num_classes, name=HEAD)(source)

    output = next(_rewired(_graph_output(model), new_head), None)
    return model if output is None else _ending_in(output, model)


def _ending_in(output: Any, model: keras.Model) -> keras.Model:
    inputs = model.inputs
    return keras.Model(inputs[0] if len(inputs) == 1 else inputs, output, name=model.name)


def _graph_output(model: keras.Model) -> Any:
    """The one output in the graph of `model`; None if it has no graph or several outputs."""
    outputs: list[Any] = getattr(model, "outputs", None) or []
    return outputs[0] if len(outputs) == 1 else None


class _Probe:
    """What a model returns for noise, with its own head and with two heads of random weights.

    The weights of the second are those of the first with the other sign. A model whose logits happen to lie between 0
    and 1, or to sum to 1, gives itself away.
    """

    def __init__(self, model: keras.Model, shape: Sequence[int]) -> None:
        rng = np.random.default_rng(0)
        self._images = rng.uniform(0, 255, (_IMAGES, *shape)).astype(np.float32)
        variables = model.trainable_variables
        self._head = [variables[k] for k in np.flatnonzero(head_mask(model))] if variables else []
        self._noise = [rng.normal(0, 10, variable.shape).astype(np.float32) for variable in self._head]

    def __call__(self, model: keras.Model) -> np.ndarray:
        """Outputs [3 * _IMAGES, outputs] of a model with the same head. Its weights are the same afterwards."""
        answers = [self._outputs(model)]
        with restored(self._head):
            for sign in (1, -1):
                for variable, noise in zip(self._head, self._noise, strict=True):
                    variable.assign(sign * noise)
                answers.append(self._outputs(model))
        return np.concatenate(answers)

    def _outputs(self, model: keras.Model) -> np.ndarray:
        return keras.ops.convert_to_numpy(keras.ops.cast(model(self._images, training=False), "float32"))


def _kind(answers: np.ndarray) -> str | None:
    """The activation that makes such `answers`: "softmax", "sigmoid", or None for logits."""
    answers = answers[np.isfinite(answers).all(axis=-1)]
    if not (answers >= 0).all() or not answers.any():  # a new head of zeros returns zeros
        return None
    if np.allclose(answers.sum(axis=-1), 1, atol=TOLERANCE):
        return "softmax"
    return "sigmoid" if (answers <= 1).all() else None


def _logarithm(probabilities: Any, kind: str) -> Any:
    """The logits of probabilities, up to those that are rounded to 0."""
    ops, smallest = keras.ops, _SMALLEST[kind]
    p = ops.cast(probabilities, "float32")
    if kind == "softmax":
        return ops.log(ops.maximum(p, smallest))
    p = ops.clip(p, smallest, 1 - smallest)
    return ops.log(p) - ops.log(1 - p)


def _rewired(tensor: Any, replacements: _Replacements) -> Iterator[Any]:
    """What `tensor` would be with each of `replacements` on the way back to the last layer with weights.

    The way leads into models within the model. It ends where tensors meet. Nothing if `tensor` is None.
    """
    if tensor is None:
        return
    operation, index, position = tensor._keras_history
    node = operation._inbound_nodes[index]
    if getattr(operation, "outputs", None):
        for inner in _rewired(operation.outputs[position], replacements):
            yield _ending_in(inner, operation)(*node.arguments.args, **node.arguments.kwargs)
    elif len(node.input_tensors) == 1:
        [source] = node.input_tensors
        yield from replacements(operation, source, tensor)
        if not getattr(operation, "weights", None):
            for changed in _rewired(source, replacements):
                args, kwargs = node.arguments.fill_in({id(source): changed})
                yield operation(*args, **kwargs)


def _without_activation(operation: Any, source: Any, output: Any) -> Iterator[Any]:
    """`output` without the operation's activation, then without the operation. The layer itself changes."""
    activation = vars(operation).get("activation")
    if activation not in (None, keras.activations.linear):
        operation.activation = keras.activations.linear
        yield output
        operation.activation = activation  # asked for the next one: it was not this
    if source.shape == output.shape and not getattr(operation, "weights", None):
        yield source
