"""Makes a classifier return logits, whatever it ends in, and as many of them as there are classes.

A softmax may be a layer, an operation, an activation or code of the user. It is left out of the model's graph if the
rest, with a softmax, gives the same probabilities. In a model without a graph it stays, and the logarithm of its
probabilities replaces the logits: softmax(log p) = p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from elastic_trainer.networks.tensors import HEAD

TOLERANCE = 1e-2  # of probabilities; half precision has two digits
_IMAGES = 3  # of noise
_SMALLEST = 1e-37  # probability whose logarithm is taken

# (operation, its input, its output) -> what may take the place of the output.
_Replacements = Callable[[Any, Any, Any], Iterator[Any]]


def with_logits(model: keras.Model, shape: Sequence[int], num_classes: int, name: str) -> keras.Model:
    """`model` without a softmax or sigmoid at its end, and with a last dense layer for `num_classes` classes.

    Prints a line for each change, with the model's `name`. The layers are those of `model`, so its weights are too. It
    maps images [batch, *shape] to a tensor [batch, outputs].
    """
    images = np.random.default_rng(0).uniform(0, 255, (_IMAGES, *shape)).astype(np.float32)
    answers = _outputs(model, images)
    for plain in _variants(model, _without_activation):
        found = _outputs(plain, images)
        if np.array_equal(found, answers):  # what was left out does nothing
            continue
        kind = next((kind for kind in ("softmax", "sigmoid") if _agree(getattr(keras.ops, kind)(found), answers)), None)
        if kind is not None:
            print(f"{name}: stripping the final {kind}; what it reads are the logits")
            return _with_new_head(plain, num_classes, name)
    model = _with_new_head(model, num_classes, name)
    if not ((answers >= 0).all() and _agree(answers.sum(axis=-1), np.ones(_IMAGES))):
        return model
    print(f"{name}: returns probabilities; its softmax cannot be left out, so their logarithm is used as logits")
    inputs = keras.Input(tuple(shape), name="image")
    probabilities = keras.ops.cast(model(inputs), "float32")
    return keras.Model(inputs, keras.ops.log(keras.ops.maximum(probabilities, _SMALLEST)), name=model.name)


def _outputs(model: keras.Model, images: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.ops.cast(model(images, training=False), "float32"))


def _agree(found: Any, wanted: np.ndarray) -> bool:
    return np.allclose(found, wanted, atol=TOLERANCE, rtol=0)


def _with_new_head(model: keras.Model, num_classes: int, name: str) -> keras.Model:
    def new_head(operation: Any, source: Any, output: Any) -> Iterator[Any]:
        if isinstance(operation, keras.layers.Dense) and operation.units != num_classes:
            print(
                f"{name}: last layer {operation.name} has {operation.units} outputs; replaced by a new one for "
                f"{num_classes}"
            )
            yield keras.layers.Dense(num_classes, name=HEAD)(source)

    return next(_variants(model, new_head), model)


def _variants(model: keras.Model, replacements: _Replacements) -> Iterator[keras.Model]:
    """`model` with each of `replacements` on the way back from its output to the last layer with weights.

    The way leads into models within the model, and ends where tensors meet. A model has no variants if it has no graph
    or several outputs.
    """
    outputs = getattr(model, "outputs", None) or []
    if len(outputs) == 1:
        inputs = model.inputs[0] if len(model.inputs) == 1 else model.inputs
        for output in _rewired(outputs[0], replacements):
            yield keras.Model(inputs, output, name=model.name)


def _rewired(tensor: Any, replacements: _Replacements) -> Iterator[Any]:
    """What `tensor` would be with each of `replacements`."""
    operation, index, _ = tensor._keras_history
    node = operation._inbound_nodes[index]
    if getattr(operation, "outputs", None):  # a model
        for inner in _variants(operation, replacements):
            yield inner(*node.arguments.args, **node.arguments.kwargs)
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
