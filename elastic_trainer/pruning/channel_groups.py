"""Which axes of which weights hold the same channels, so that a channel is removed from all of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elastic_trainer.networks.batch_norm_folding import find_pairs
from elastic_trainer.networks.layer_graph import functional_graph, is_graph
from elastic_trainer.pruning.disjoint_groups import DisjointGroups, Groups
from elastic_trainer.pruning.layer_graph import ACTIVATIONS, channel_role, walk

# Indices of the channels that stay, by group. A group that is missing keeps all its channels.
KeptChannels = dict[int, np.ndarray]


@dataclass(eq=False)
class Kernel:
    """A layer that computes its output channels from its input channels with a kernel.

    Attributes:
        layer: Conv2D, Dense or DepthwiseConv2D.
        source: groups of the layer's input channels.
        target: groups of the layer's output channels; the same as `source` for a depthwise convolution.
        depthwise: whether the layer is a DepthwiseConv2D.
        padded: whether padding adds zeros to the sums that the layer computes.
        calls: number of times the network applies the layer.
        norm: the frozen batch norm that alone reads the layer's output, see `batch_norm_folding.find_pairs`; or None.
    """

    layer: Any
    source: Groups
    target: Groups
    depthwise: bool
    padded: bool
    calls: int = 0
    norm: Any = None


class ChannelGroups:
    """The groups of channels of a network, and the axes of its weights that these groups index.

    To remove a channel of a group, its index is removed from every axis that belongs to the group. Two axes belong to
    the same group if the data flow forces them to have the same channels: through batch norm, activations, pooling,
    depthwise convolutions and additions. Each convolution and each dense layer starts a new group. A concatenated
    tensor holds the channels of several groups one after the other. A flattened tensor repeats its groups for each
    place of the image.

    The groups of the images and of the logits are fixed: all their channels stay. So are the groups that an unknown
    layer reads or makes.

    Args:
        model: any Keras model. One that is not a functional or sequential model has no groups.

    Attributes:
        kernels: the layers with kernels in the order of the data flow, by `id(layer)`.
    """

    def __init__(self, model: keras.Model) -> None:
        flow = _ChannelFlow(model)
        self.kernels = flow.kernels
        self._groups, self._axes, self._inputs = flow.groups, flow.axes, flow.inputs

    def prunable(self) -> dict[str, int]:
        """The groups whose channels may be removed, by the path of the first kernel that makes them."""
        found: dict[int, str] = {}
        for name, kernel in self.readers().items():
            group = self._groups.root(kernel.target[0])
            if not self._groups.is_fixed(group) and group not in found and self.readers(group):
                found[group] = name
        return {name: group for group, name in found.items()}

    def readers(self, group: int | None = None) -> dict[str, Kernel]:
        """The convolutions and dense layers that read channels of `group`, by the path of their kernel.

        Depthwise convolutions do not count: their output has the same channels. None means any group.
        """
        found: dict[str, Kernel] = {}
        seen: dict[str, int] = {}
        for kernel in self.kernels.values():
            if not kernel.depthwise:
                path = kernel.layer.kernel.path
                seen[path] = seen.get(path, 0) + 1
                if group is None or self._groups.root(group) in self.roots(kernel.source):
                    found[path if seen[path] == 1 else f"{path}#{seen[path]}"] = kernel
        return found

    def roots(self, groups: Groups) -> Groups:
        """The groups of an axis as `prunable` and `KeptChannels` number them: joined groups have one number."""
        return self._groups.roots(groups)

    def size(self, group: int) -> int:
        """Number of channels of a group."""
        return self._groups.size(group)

    def axes(self, variable: keras.Variable) -> dict[int, Groups]:
        """The axes of a variable that index channels: {axis: its groups}."""
        return {axis: self.roots(groups) for axis, groups in self._axes.get(id(variable), {}).items()}

    def input_groups(self, tensor: keras.KerasTensor) -> Groups:
        """The groups of an inner model's input tensor; empty for any other tensor."""
        return self.roots(self._inputs.get(id(tensor), ()))

    def not_fixed(self, groups: Groups) -> np.ndarray:
        """Bool [channels of the axis]: False for the channels of fixed groups."""
        return np.concatenate([np.full(self.size(group), not self._groups.is_fixed(group)) for group in groups])

    def gather(self, values: np.ndarray, groups: Groups, group: int) -> np.ndarray:
        """The values that belong to one group.

        Args:
            values: one value for each channel of an axis.
            groups: the groups of that axis.
            group: one of them.

        Returns:
            [number of times that `group` occurs in `groups`, channels of `group`]
        """
        ends = np.cumsum([self.size(other) for other in groups])[:-1]
        parts = zip(np.split(values, ends), self.roots(groups), strict=True)
        return np.stack([part for part, other in parts if other == self._groups.root(group)])

    def kept_indices(self, groups: Groups, kept: KeptChannels) -> np.ndarray:
        """Indices of the kept channels along an axis with these groups."""
        starts = np.cumsum([0, *(self.size(group) for group in groups)])[:-1]
        indices = [kept.get(group, np.arange(self.size(group))) for group in self.roots(groups)]
        return np.concatenate([start + inside for start, inside in zip(starts, indices, strict=True)])


class _ChannelFlow:
    """Follows the groups of each tensor's last axis from a model's inputs to its outputs.

    Attributes:
        kernels: see `ChannelGroups`.
        groups: all groups of channels.
        axes: {id of a variable: {axis: its groups}}.
        inputs: {id of an inner model's input tensor: its groups}.
    """

    def __init__(self, model: keras.Model) -> None:
        self.kernels: dict[int, Kernel] = {}
        self.groups = DisjointGroups()
        self.axes: dict[int, dict[int, Groups]] = {}
        self.inputs: dict[int, Groups] = {}
        self._norms = {id(pair.layer): pair.norm for pair in find_pairs(model)}
        if is_graph(model):
            for groups in walk(model, [self._fixed_groups(tensor.shape) for tensor in model.inputs], self._visit):
                self.groups.fix(groups)

    def _visit(self, node: Any, arguments: list[Groups]) -> list[Groups]:
        layer = node.operation
        if is_graph(layer):
            for tensor, groups in zip(functional_graph(layer).inputs, arguments, strict=True):
                self.inputs[id(tensor)] = self.groups.join(groups, self.inputs.get(id(tensor), groups))
            return walk(layer, arguments, self._visit)
        role = channel_role(node)
        if role == "opaque":
            for groups in arguments:
                self.groups.fix(groups)
            return [self._fixed_groups(tensor.shape) for tensor in node.outputs]
        groups = arguments[0]
        if role == "merge":
            for others in arguments[1:]:
                groups = self.groups.join(groups, others)
        elif role == "concatenation":
            groups = tuple(itertools.chain.from_iterable(arguments))
        elif role == "flattening":
            groups = groups * (node.outputs[0].shape[-1] // node.input_tensors[0].shape[-1])
        elif role == "norm":
            for variable in (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance):
                self._bind(variable, 0, groups)
        elif role in ("kernel", "depthwise"):
            return [self._apply_kernel(layer, groups, node.outputs[0].shape[-1], role == "depthwise")]
        return [groups]

    def _apply_kernel(self, layer: Any, source: Groups, outputs: int, depthwise: bool) -> Groups:
        rank = len(layer.kernel.shape)
        source = self._bind(layer.kernel, rank - 2, source)
        target = source if depthwise else self._bind(layer.kernel, rank - 1, self.groups.new(outputs))
        self._bind(getattr(layer, "bias", None), 0, target)
        padded = getattr(layer, "padding", "valid") != "valid" and max(layer.kernel_size) > 1
        new = Kernel(layer, source, target, depthwise, padded, norm=self._norms.get(id(layer)))
        self.kernels.setdefault(id(layer), new).calls += 1
        if layer.activation not in ACTIVATIONS:  # for example softmax, where every channel depends on all others
            self.groups.fix(target)
        return target

    def _bind(self, variable: keras.Variable | None, axis: int, groups: Groups) -> Groups:
        """Let an axis of a variable index the channels of `groups`; a shared variable joins them with its earlier ones.

        Returns:
            the groups of the axis
        """
        if variable is None:
            return groups
        axes = self.axes.setdefault(id(variable), {})
        axes[axis] = self.groups.join(groups, axes.get(axis, groups))
        return axes[axis]

    def _fixed_groups(self, shape: Sequence[int | None]) -> Groups:
        """The groups of a tensor [batch, ..., channels]: a new one that is fixed."""
        groups = self.groups.new((shape[-1] if len(shape) > 1 else None) or 0)
        self.groups.fix(groups)
        return groups
