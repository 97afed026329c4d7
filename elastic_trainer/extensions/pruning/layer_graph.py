"""The graph of layers in a Keras model, and what each layer does to channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.networks.layer_graph import functional_graph

_layers = keras.layers
_MERGES = (
    _layers.Add,
    _layers.Subtract,
    _layers.Multiply,
    _layers.Average,
    _layers.Maximum,
    _layers.Minimum,
)
_CHANNELWISE = (
    _layers.ReLU,
    _layers.LeakyReLU,
    _layers.ELU,
    _layers.Dropout,
    _layers.SpatialDropout2D,
    _layers.MaxPooling2D,
    _layers.AveragePooling2D,
    _layers.GlobalMaxPooling2D,
    _layers.GlobalAveragePooling2D,
    _layers.Cropping2D,
    _layers.UpSampling2D,
    _layers.ZeroPadding2D,
)
_NORMS = (_layers.BatchNormalization, FrozenBatchNormalization)
ACTIVATIONS = tuple(
    getattr(keras.activations, name)
    for name in (
        *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "sigmoid", "hard_sigmoid"),
        *("hard_silu", "tanh", "softplus", "softsign", "exponential"),
    )
    if hasattr(keras.activations, name)
)


def channel_role(node: Any) -> str:
    """What the layer of a graph node does to channels.

    Returns:
        "merge": adds, multiplies or compares its inputs channel by channel.
        "concatenation": joins the channels of its inputs.
        "norm": batch norm over the channels.
        "flattening": turns every place of an image into channels.
        "channelwise": computes each output channel from the same input channel.
        "kernel": a dense layer or an ungrouped convolution.
        "depthwise": a depthwise convolution with one output for each input channel.
        "opaque": any other layer. Its channels must not change.
    """
    layer, inputs, kind = node.operation, node.input_tensors, type(node.operation)
    if kind in _MERGES:
        return "merge" if len({tensor.shape[-1] for tensor in inputs}) == 1 else "opaque"
    if kind is _layers.Concatenate:
        return "concatenation" if layer.axis in (-1, len(inputs[0].shape) - 1) else "opaque"
    if len(inputs) != 1 or getattr(layer, "data_format", "channels_last") != "channels_last":
        return "opaque"
    if kind in _NORMS:
        return "norm" if layer.axis in (-1, len(inputs[0].shape) - 1) else "opaque"
    if kind is _layers.Flatten:
        return "flattening" if node.outputs[0].shape[-1] else "opaque"
    if kind in _CHANNELWISE or (kind is _layers.Activation and layer.activation in ACTIVATIONS):
        return "channelwise"
    if not isinstance(getattr(layer, "kernel", None), keras.Variable):
        return "opaque"
    if kind is _layers.Dense or (kind is _layers.Conv2D and layer.groups == 1):
        return "kernel"
    one_to_one = kind is _layers.DepthwiseConv2D and layer.depth_multiplier == 1 and layer.activation in ACTIVATIONS
    return "depthwise" if one_to_one else "opaque"


def walk(model: Any, inputs: Sequence[Any], visit: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Propagate one value per tensor through a model's graph, in the order in which Keras runs the layers.

    Args:
        model: a functional or sequential model (see `is_graph`).
        inputs: one value for each input of the model.
        visit: maps a graph node and the values of its input tensors to the values of its output tensors.

    Returns:
        One value for each output of the model.
    """
    graph = functional_graph(model)
    values = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if not node.is_input:
                results = visit(node, [values[id(tensor)] for tensor in node.input_tensors])
                values.update((id(tensor), value) for tensor, value in zip(node.outputs, results, strict=True))
    return [values[id(tensor)] for tensor in graph.outputs]
