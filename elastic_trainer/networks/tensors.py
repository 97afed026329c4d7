"""Which tensors of a network are which: names, the head, and those each scheme trains."""

from __future__ import annotations

import keras
import numpy as np

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
    """Bool [N] over `model.trainable_variables`: True for those of the head, which every scheme trains.

    The head is what is met first on every way back from the output: the last layers that have trainable weights.
    """
    head = {id(variable) for layer in _last_layers(model) for variable in layer.trainable_variables}
    return np.array([id(variable) in head for variable in model.trainable_variables])


def _last_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    outputs = getattr(layer, "outputs", None)
    if not outputs:  # no graph to follow: whichever inner layer owns the last variable
        last = id(layer.trainable_variables[-1])
        owners = [inner for inner in layer._flatten_layers() if last in map(id, inner._trainable_variables)]
        return owners[:1] or [layer]
    found: list[keras.layers.Layer] = []
    ways, seen = list(outputs), set()
    while ways:
        tensor = ways.pop()
        operation, node, _ = tensor._keras_history
        if (id(operation), node) in seen:
            continue
        seen.add((id(operation), node))
        if getattr(operation, "trainable_variables", None):
            found += _last_layers(operation)
        else:
            ways += operation._inbound_nodes[node].input_tensors
    return found


def all_mask(model: keras.Model) -> np.ndarray:
    """Bool [N], True for each of `model.trainable_variables`."""
    return np.ones(len(model.trainable_variables), bool)


def normalisation_and_bias_mask(model: keras.Model) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: scales and shifts of normalisation layers, biases, and the head."""
    names = np.array([variable.name in ("gamma", "beta", "bias") for variable in model.trainable_variables])
    return names | head_mask(model)


def last_layers_mask(model: keras.Model, count: int) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: those of the last `count` layers that have weights, and the head."""
    layers = [name.rpartition("/")[0] for name in tensor_names(model)]
    last = [*dict.fromkeys(layers)][-count:]
    return np.array([layer in last for layer in layers]) | head_mask(model)
