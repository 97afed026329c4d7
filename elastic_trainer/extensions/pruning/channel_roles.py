"""What each layer of a Keras model does to channels."""

from __future__ import annotations

from typing import Any

import keras

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization

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
