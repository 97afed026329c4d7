"""Names and groups of a network's tensors: the head, biases and normalisation, the last layers.

"Tensors" are the trainable variables, as in the paper. The groups are what its baselines train (section 6). A mask is
bool [N] over `model.trainable_variables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

HEAD = "head"


def tensor_names(model: keras.Model) -> list[str]:
    """One unique name for each of `model.trainable_variables`, in their order."""
    seen: dict[str, int] = {}
    names = []
    for variable in model.trainable_variables:
        count = seen[variable.path] = seen.get(variable.path, 0) + 1
        names.append(variable.path if count == 1 else f"{variable.path}#{count}")
    return names


def head_mask(model: keras.Model) -> np.ndarray:
    """Mask of the head, which every scheme trains.

    The head consists of the last layers with trainable weights: the first ones on each path back from the output.
    """
    head = {id(variable) for layer in last_layers(model) for variable in layer.trainable_variables}
    return np.array([id(variable) in head for variable in model.trainable_variables])


def last_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The last layers with trainable weights, see `head_mask`."""
    outputs = getattr(layer, "outputs", None)
    if not outputs:  # without a graph: the inner layer that has the last variable
        last = id(layer.trainable_variables[-1])
        owners = [inner for inner in layer._flatten_layers() if last in map(id, inner._trainable_variables)]
        return owners[:1] or [layer]
    found: list[keras.layers.Layer] = []
    paths, seen = list(outputs), set()
    while paths:
        tensor = paths.pop()
        operation, node, _ = tensor._keras_history
        if (id(operation), node) in seen:
            continue
        seen.add((id(operation), node))
        if getattr(operation, "trainable_variables", None):
            found += last_layers(operation)
        else:
            paths += operation._inbound_nodes[node].input_tensors
    return found


def all_mask(model: keras.Model) -> np.ndarray:
    """Mask of all tensors."""
    return np.ones(len(model.trainable_variables), bool)


def normalisation_and_bias_mask(model: keras.Model) -> np.ndarray:
    """Mask of the head, all biases, and the scales and shifts of normalisation layers."""
    names = np.array([variable.name in ("gamma", "beta", "bias") for variable in model.trainable_variables])
    return names | head_mask(model)


def last_layers_mask(model: keras.Model, count: int) -> np.ndarray:
    """Mask of the head and the last `count` layers with trainable weights."""
    layers = [name.rpartition("/")[0] for name in tensor_names(model)]
    last = [*dict.fromkeys(layers)][-count:]
    return np.array([layer in last for layer in layers]) | head_mask(model)


@contextmanager
def restored(variables: Sequence[keras.Variable]) -> Iterator[dict[int, tf.Tensor]]:
    """Restore `variables` afterwards, bit for bit; yields their current values, by `id` of the variable."""
    before = {id(variable): tf.identity(variable.value) for variable in variables}
    try:
        yield before
    finally:
        for variable in variables:
            variable.value.assign(before[id(variable)])
