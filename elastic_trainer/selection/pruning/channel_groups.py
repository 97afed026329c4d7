"""Which axes of which weights hold the same channels, so that a channel is removed from all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.networks.batch_norm_folding import find_pairs
from elastic_trainer.networks.graphs import is_graph, walk

_layers = keras.layers
# Layers that compute each output channel from the same channel of their inputs, and from that of their only input.
_MERGES = (_layers.Add, _layers.Subtract, _layers.Multiply, _layers.Average, _layers.Maximum, _layers.Minimum)
_CHANNELWISE = (
    *(_layers.ReLU, _layers.LeakyReLU, _layers.ELU, _layers.Dropout, _layers.SpatialDropout2D),
    *(_layers.MaxPooling2D, _layers.AveragePooling2D, _layers.GlobalMaxPooling2D, _layers.GlobalAveragePooling2D),
    *(_layers.Cropping2D, _layers.UpSampling2D, _layers.ZeroPadding2D),
)
_NORMS = (_layers.BatchNormalization, FrozenBatchNormalization)
ACTIVATIONS = tuple(
    getattr(keras.activations, name)
    for name in (
        *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "sigmoid", "hard_sigmoid"),
        *("hard_silu", "tanh", "softplus", "softsign", "exponential"),
    )
)

Channels = np.ndarray  # int [places of an axis]: the number of the channel at each place


@dataclass(eq=False)
class Kernel:
    """A layer that computes its output channels from its input channels with a kernel."""

    layer: Any  # Conv2D, Dense or DepthwiseConv2D
    source: Channels  # of its input
    target: Channels  # of its output; the same for a depthwise convolution
    depthwise: bool
    padded: bool  # whether padding adds zeros to the sums that it computes
    norm: Any  # the frozen batch norm that alone reads its output (`batch_norm_folding.find_pairs`), or None
    calls: int = 0  # how often the network applies it


class ChannelGroups:
    """The channels of a network, by number, at each place of the axes that hold them.

    Two places have the same channel if the data flow forces them to: through batch norm, activations, pooling,
    depthwise convolutions and additions. Each convolution and each dense layer starts new channels. A concatenated
    tensor holds those of its parts one after the other. A flattened tensor repeats its channels for each place of the
    image. To remove a channel, it is removed from every place.

    The channels of the images and of the logits are fixed: they stay. So are those that an inner model gets, and that
    an unknown layer reads or makes. A model that is neither functional nor sequential has no channels.

    Attributes:
        kernels: the layers with kernels in the order of the data flow, by `id(layer)`.
        count: how many channels there are; their numbers are below it.
        is_fixed: bool [count].
    """

    def __init__(self, model: keras.Model) -> None:
        self.kernels: dict[int, Kernel] = {}
        self._axes: dict[int, dict[int, Channels]] = {}
        self._norms = {id(pair.layer): pair.norm for pair in find_pairs(model)}
        # The walk gives each layer's output new numbers, and notes which of them are the same channel.
        self.count = 0
        none = np.zeros(0, int)
        self._same, self._fixed = [(none, none)], [none]
        if is_graph(model):
            self._fixed += walk(model, [self._new_fixed(tensor.shape) for tensor in model.inputs], self._visit)
        self._renumber()

    def prunable(self) -> dict[str, Channels]:
        """The channels that may be removed, each once, by the path of the first kernel that makes them."""
        readers = self.readers()
        is_read = np.zeros(self.count, bool)
        for kernel in readers.values():
            is_read[kernel.source] = True
        is_open = is_read & ~self.is_fixed
        found = {}
        for name, kernel in readers.items():
            channels = [*dict.fromkeys(kernel.target[is_open[kernel.target]].tolist())]
            if channels:
                found[name] = np.array(channels)
                is_open[channels] = False
        return found

    def readers(self) -> dict[str, Kernel]:
        """The convolutions and dense layers, by the path of their kernel; none is depthwise."""
        found: dict[str, Kernel] = {}
        seen: dict[str, int] = {}
        for kernel in self.kernels.values():
            if not kernel.depthwise:
                path = kernel.layer.kernel.path
                seen[path] = seen.get(path, 0) + 1
                found[path if seen[path] == 1 else f"{path}#{seen[path]}"] = kernel
        return found

    def axes(self, variable: keras.Variable) -> dict[int, Channels]:
        """{axis of a variable that holds channels: its channels}."""
        return self._axes.get(id(variable), {})

    def _renumber(self) -> None:
        """Give places that have the same channel the same number."""
        numbers = np.zeros(0, int)
        if self.count:
            ends = tuple(np.concatenate(side) for side in zip(*self._same, strict=True))
            edges = coo_matrix((np.ones(len(ends[0])), ends), shape=(self.count, self.count))
            self.count, numbers = connected_components(edges, directed=False)
        self.is_fixed = np.zeros(self.count, bool)
        self.is_fixed[numbers[np.concatenate(self._fixed)]] = True
        self._axes = {key: {axis: numbers[old] for axis, old in axes.items()} for key, axes in self._axes.items()}
        for kernel in self.kernels.values():
            kernel.source, kernel.target = numbers[kernel.source], numbers[kernel.target]

    def _visit(self, node: Any, arguments: list[Channels]) -> list[Channels]:
        layer, kind, tensors = node.operation, type(node.operation), node.input_tensors
        shape = node.outputs[0].shape
        last = (-1, len(shape) - 1)
        if is_graph(layer):
            self._fixed += arguments
            return walk(layer, arguments, self._visit)
        if kind in _MERGES and len({tensor.shape[-1] for tensor in tensors}) == 1:
            for others in arguments[1:]:
                self._unite(arguments[0], others)
            return arguments[:1]
        if kind is _layers.Concatenate and layer.axis in last:
            return [np.concatenate(arguments)]
        if len(arguments) == 1 and getattr(layer, "data_format", "channels_last") == "channels_last":
            [channels] = arguments
            if kind in _CHANNELWISE or (kind is _layers.Activation and layer.activation in ACTIVATIONS):
                return [channels]
            if kind is _layers.Flatten and shape[-1]:
                return [np.tile(channels, shape[-1] // tensors[0].shape[-1])]
            if kind in _NORMS and layer.axis in last:
                for variable in (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance):
                    self._bind(variable, 0, channels)
                return [channels]
            if _is_kernel(layer):
                return [self._apply_kernel(layer, channels, shape[-1])]
        self._fixed += arguments
        return [self._new_fixed(tensor.shape) for tensor in node.outputs]

    def _apply_kernel(self, layer: Any, source: Channels, outputs: int) -> Channels:
        rank, depthwise = len(layer.kernel.shape), type(layer) is _layers.DepthwiseConv2D
        target = source if depthwise else self._new(outputs)
        self._bind(layer.kernel, rank - 2, source)
        if not depthwise:
            self._bind(layer.kernel, rank - 1, target)
        self._bind(getattr(layer, "bias", None), 0, target)
        padded = getattr(layer, "padding", "valid") != "valid" and max(layer.kernel_size) > 1
        new = Kernel(layer, source, target, depthwise, padded, self._norms.get(id(layer)))
        self.kernels.setdefault(id(layer), new).calls += 1
        if layer.activation not in ACTIVATIONS:  # for example softmax, where every channel depends on all others
            self._fixed.append(target)
        return target

    def _bind(self, variable: keras.Variable | None, axis: int, channels: Channels) -> None:
        """Let an axis hold `channels`; of a shared variable they are the same as its earlier ones."""
        if variable is not None:
            self._unite(channels, self._axes.setdefault(id(variable), {}).setdefault(axis, channels))

    def _unite(self, channels: Channels, others: Channels) -> None:
        """Make channels the same, place by place. They are fixed if a number of channels is not known."""
        if len(channels) == len(others):
            self._same.append((channels, others))
        else:
            self._fixed += [channels, others]

    def _new(self, count: int) -> Channels:
        self.count += count
        return np.arange(self.count - count, self.count)

    def _new_fixed(self, shape: Sequence[int | None]) -> Channels:
        """New channels that are fixed, of a tensor [batch, ..., channels]."""
        self._fixed.append(self._new((shape[-1] if len(shape) > 1 else None) or 0))
        return self._fixed[-1]


def _is_kernel(layer: Any) -> bool:
    """Whether a layer is dense, an ungrouped convolution, or a depthwise one with an output for each input channel."""
    kind = type(layer)
    if not isinstance(getattr(layer, "kernel", None), keras.Variable):
        return False
    one_to_one = kind is _layers.DepthwiseConv2D and layer.depth_multiplier == 1 and layer.activation in ACTIVATIONS
    return one_to_one or kind is _layers.Dense or (kind is _layers.Conv2D and layer.groups == 1)
