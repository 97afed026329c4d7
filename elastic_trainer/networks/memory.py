"""Estimates the memory that training a network needs, and refuses to start if the machine does not have it.

The estimate is a lower bound, computed from the shapes in the network's graph. On a small board, starting anyway would
end in swapping or in a killed process. The paper does not cover memory.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.errors import UserError
from elastic_trainer.machine import available_memory_mb
from elastic_trainer.networks.layer_graph import nested_nodes
from elastic_trainer.registry import OPTIMIZERS
from elastic_trainer.settings import NetworkSettings

# The gradient of their kernel or scale is computed from their input, which is therefore kept until then.
_INPUT_KEEPERS = (
    keras.layers.Dense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.BatchNormalization,
)
# Layers whose output shares the memory of their input.
_SAME_MEMORY = ("Flatten", "Reshape", "Squeeze", "ExpandDims", "Identity")


def memory_needed_mb(
    model: keras.Model, batch_size: int, slots: int, mask: np.ndarray, measures_importance: bool = False
) -> float:
    """Lower bound on the memory in MB that training `model` needs beyond its weights.

    The sum of three parts: the batch; the optimizer's variables; and the largest of the activations that the backward
    pass needs, all gradients, and the input and output of one layer. Of the activations, only the inputs of
    convolutions, dense layers and batch norm count. TensorFlow itself, its buffers, and layers inside custom layers do
    not count.

    Args:
        model: the network.
        batch_size: images per step.
        slots: variables that the optimizer keeps for each trainable variable.
        mask: bool [N] over `model.trainable_variables`: the tensors that train.
        measures_importance: whether the scheme evaluates importance, which needs a copy of the weights and of the
            optimizer's variables.
    """
    trainable_bytes = [prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.trainable_variables]
    gradient_bytes = sum(size for size, taken in zip(trainable_bytes, mask, strict=True) if taken)
    lasting_bytes = slots * sum(trainable_bytes)
    if measures_importance:
        lasting_bytes += (1 + slots) * sum(trainable_bytes)
    trained = {id(v) for v, taken in zip(model.trainable_variables, mask, strict=True) if taken}
    kept: dict[int, int] = {}
    largest_call = 0
    for node in nested_nodes(model):
        layer = node.operation
        if not isinstance(layer, _INPUT_KEEPERS):
            continue
        sources = [source for tensor in node.input_tensors if (source := _source(tensor)) is not None]
        sizes = {id(source): _tensor_bytes(source, batch_size) for source in sources}
        if not isinstance(layer, keras.layers.BatchNormalization):  # batch norm may overwrite its input
            largest_call = max(largest_call, sum(sizes.values()) + _tensor_bytes(node.outputs[0], batch_size))
        if any(id(v) in trained and v.name not in ("bias", "beta") for v in layer.trainable_variables):
            kept |= sizes
    batch_bytes = 4 * batch_size * prod(model.input_shape[1:])
    return (batch_bytes + lasting_bytes + max(sum(kept.values()), largest_call, gradient_bytes)) / 1e6


def _source(tensor: Any) -> Any:
    """The symbolic tensor whose memory `tensor` shares, found through reshapes and inside nested models.

    None for the input of a model: its memory is counted elsewhere.
    """
    while True:
        operation, index, position = tensor._keras_history
        if isinstance(operation, keras.layers.InputLayer):
            return None
        if getattr(operation, "outputs", None):
            tensor = operation.outputs[position]
        elif type(operation).__name__ in _SAME_MEMORY:
            tensor = operation._inbound_nodes[index].input_tensors[0]
        else:
            return tensor


def _tensor_bytes(tensor: Any, batch_size: int) -> int:
    """Size of a symbolic tensor at a batch size, or 0 if its shape is not known."""
    if None in tensor.shape[1:]:
        return 0
    return batch_size * prod(tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size


def fitting_batch(
    model: keras.Model, network: NetworkSettings, mask: np.ndarray, measures_importance: bool = False
) -> int:
    """The batch size of `network`, halved until training fits into memory. Arguments as `check_memory`."""
    available_mb, batch_size = _available_mb(), network.batch_size
    slots = OPTIMIZERS[network.optimizer].slots
    while batch_size > 1 and memory_needed_mb(model, batch_size, slots, mask, measures_importance) > available_mb:
        batch_size //= 2
    return batch_size


def _available_mb() -> float:
    """Memory that training may take; infinity if it is not known, or if a GPU with separate memory trains."""
    available_mb = available_memory_mb()
    return inf if available_mb is None or tf.config.list_physical_devices("GPU") else available_mb


def check_memory(
    model: keras.Model, network: NetworkSettings, mask: np.ndarray, measures_importance: bool = False
) -> None:
    """Raise `UserError` if training needs more memory than the system can give now. Arguments as `memory_needed_mb`.

    Nothing is checked if the system does not report its memory, or if a GPU with separate memory trains.
    """
    available_mb = _available_mb()
    slots = OPTIMIZERS[network.optimizer].slots
    needed_mb = memory_needed_mb(model, network.batch_size, slots, mask, measures_importance)
    if needed_mb > available_mb:
        raise UserError(
            f"--batch_size {network.batch_size}: training {network.model_name} on images of {network.input_size}×"
            f"{network.input_size} takes at least {needed_mb:,.0f} MB more, and {available_mb:,.0f} MB are available; "
            "choose a smaller one, or a smaller --input_size"
        )
