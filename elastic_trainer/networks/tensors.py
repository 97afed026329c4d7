"""Names and groups of a network's tensors: the head, biases and normalisation, the last layers.

"Tensors" are the trainable variables, as in the paper. The groups are what its baselines train. A mask is
bool [N] over `model.trainable_variables`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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


def head_mask(model: keras.Model, used: np.ndarray | None = None) -> np.ndarray:
    """Mask of the head, which every scheme trains.

    The head consists of the last layers with trainable weights: the first ones on each path back from the output.
    A model without a graph does not say which are last; of its tensors, bool [N] `used` says which count.
    """
    variables = model.trainable_variables
    idle = set() if used is None else {id(variables[k]) for k in np.flatnonzero(~used)}
    head = {id(variable) for layer in last_layers(model, idle) for variable in layer.trainable_variables}
    return np.array([id(variable) in head for variable in variables], bool)


def last_layers(layer: keras.layers.Layer, idle: Collection[int] = ()) -> list[keras.layers.Layer]:
    """The last layers with trainable weights, see `head_mask`; variables with an `id` in `idle` are not used."""
    outputs = getattr(layer, "outputs", None)
    if not outputs:  # without a graph: the inner layer that has the last variable
        used = [id(variable) for variable in layer.trainable_variables if id(variable) not in idle]
        if not used:
            return []
        last = used[-1]
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
            found += last_layers(operation, idle)
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
def restored(variables: Sequence[keras.Variable], handles: Sequence[tf.Tensor] = ()) -> Iterator[dict[int, tf.Tensor]]:
    """Restore `variables`, and those of `graphs.written_variables`, afterwards, bit for bit.

    Yields the current values of `variables`, by `id` of the variable.
    """
    before = {id(variable): tf.identity(variable.value) for variable in variables}
    kinds = [tf.as_dtype(handle._handle_data.shape_and_type[0].dtype) for handle in handles]
    written = [tf.raw_ops.ReadVariableOp(resource=each, dtype=kind) for each, kind in zip(handles, kinds, strict=True)]
    try:
        yield before
    finally:
        for variable in variables:
            variable.value.assign(before[id(variable)])
        for handle, value in zip(handles, written, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
