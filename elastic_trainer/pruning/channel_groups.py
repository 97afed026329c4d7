"""Which axes of which weights hold the same channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elastic_trainer.pruning.layer_graph import ACTIVATIONS, channel_role, functional_graph, is_graph, walk

Groups = tuple[int, ...]  # of an axis that holds the channels of these groups, one group's after the other's


@dataclass(eq=False)
class Kernel:
    """A layer that maps channels to channels.

    Attributes:
        layer: Conv2D, Dense or DepthwiseConv2D (that one reads and makes the same channels).
        source, target: groups of its input's and its output's channels.
        padded: whether zeros that are no channel's value get into its sums.
        calls: how often the network applies it.
        norm: the batch norm that alone reads what it makes.
    """

    layer: Any
    source: Groups
    target: Groups
    depthwise: bool
    padded: bool
    calls: int = 0
    norm: Any = None


@dataclass(eq=False)
class _Signal:
    """A tensor of the graph: the groups of its last axis, what linear layer made it, and how many layers read it."""

    groups: Groups
    maker: Kernel | None = None
    readers: int = 0


class ChannelGroups:
    """The groups of channels of a network, and the axes of its weights that they index.

    Two axes are of one group when the data flow forces them to have the same channels: through batch norm, activations,
    pooling, depthwise convolutions and additions. A convolution or dense layer begins a new group. Those of the images,
    of the logits, and of what a layer that is not understood reads and makes, are fixed. Concatenated tensors hold one
    group's channels after the other's; a flattened one holds them again for each place.

    Attributes:
        kernels: by the layer's id, in the order of the data flow.
    """

    def __init__(self, model: keras.Model) -> None:
        self.kernels: dict[int, Kernel] = {}
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._fixed: set[int] = set()
        self._axes: dict[int, dict[int, Groups]] = {}  # by id of the variable: axis -> groups
        self._inputs: dict[int, Groups] = {}  # by id of an inner model's input tensor
        self._normed: list[tuple[_Signal, Any]] = []
        self._norm_calls: dict[int, int] = {}
        if is_graph(model):
            outputs = walk(model, [self._opaque(tensor.shape) for tensor in model.inputs], self._visit)
            for signal in outputs:
                self._fix(signal.groups)
                signal.readers += 1
        for signal, norm in self._normed:
            maker = signal.maker
            if maker is not None and signal.readers == maker.calls == self._norm_calls[id(norm)] == 1:
                maker.norm = norm

    def prunable(self) -> dict[str, int]:
        """The groups whose channels may be removed, by the path of the first kernel that makes them."""
        found: dict[int, str] = {}
        for name, kernel in self.readers().items():
            group = self._root(kernel.target[0])
            if group not in self._fixed and group not in found and self.readers(group):
                found[group] = name
        return {name: group for group, name in found.items()}

    def readers(self, group: int | None = None) -> dict[str, Kernel]:
        """Layers that read the channels of `group` and make others, by their kernels' paths; of any group if None."""
        found: dict[str, Kernel] = {}
        seen: dict[str, int] = {}
        for kernel in self.kernels.values():
            if not kernel.depthwise:
                path = kernel.layer.kernel.path
                seen[path] = seen.get(path, 0) + 1
                if group is None or self._root(group) in self._roots(kernel.source):
                    found[path if seen[path] == 1 else f"{path}#{seen[path]}"] = kernel
        return found

    def is_fixed(self, group: int) -> bool:
        """Whether all channels of `group` must stay."""
        return self._root(group) in self._fixed

    def size(self, group: int) -> int:
        """Number of channels of a group."""
        return self._sizes[self._root(group)]

    def axes(self, variable: keras.Variable) -> dict[int, Groups]:
        """The groups of a variable's axes that index channels, by axis."""
        return {axis: self._roots(groups) for axis, groups in self._axes.get(id(variable), {}).items()}

    def input_groups(self, tensor: keras.KerasTensor) -> Groups:
        """The groups of an inner model's input; none for any other tensor."""
        return self._roots(self._inputs.get(id(tensor), ()))

    def spread(self, groups: Groups, values: Callable[[int], np.ndarray]) -> np.ndarray:
        """What `values` gives for each group of an axis, one after the other."""
        return np.concatenate([values(group) for group in self._roots(groups)])

    def gather(self, values: np.ndarray, groups: Groups, group: int) -> np.ndarray:
        """The parts [times the group occurs, its channels] of `values`, one for each channel of an axis."""
        ends = np.cumsum([self.size(other) for other in groups])[:-1]
        parts = zip(np.split(values, ends), self._roots(groups), strict=True)
        return np.stack([part for part, other in parts if other == self._root(group)])

    def places(self, groups: Groups, kept: dict[int, np.ndarray]) -> np.ndarray:
        """Indices along an axis of the channels that are kept; a group that `kept` does not name keeps all."""
        starts = np.cumsum([0, *(self.size(group) for group in groups)])
        everything = [kept.get(group, np.arange(self.size(group))) for group in self._roots(groups)]
        return np.concatenate([start + indices for start, indices in zip(starts, everything, strict=False)])

    def _visit(self, node: Any, arguments: list[_Signal]) -> list[_Signal]:
        layer = node.operation
        if is_graph(layer):
            for tensor, signal in zip(functional_graph(layer).inputs, arguments, strict=True):
                self._inputs[id(tensor)] = self._union(signal.groups, self._inputs.get(id(tensor), signal.groups))
            return walk(layer, arguments, self._visit)
        for signal in arguments:
            signal.readers += 1
        role = channel_role(node)
        if role == "opaque":
            for signal in arguments:
                self._fix(signal.groups)
            return [self._opaque(tensor.shape) for tensor in node.outputs]
        groups = arguments[0].groups
        if role == "merge":
            for signal in arguments[1:]:
                groups = self._union(groups, signal.groups)
        elif role == "concatenation":
            groups = tuple(group for signal in arguments for group in signal.groups)
        elif role == "flattening":
            groups = groups * (node.outputs[0].shape[-1] // node.input_tensors[0].shape[-1])
        elif role == "norm":
            for variable in (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance):
                self._bind(variable, 0, groups)
            self._norm_calls[id(layer)] = self._norm_calls.get(id(layer), 0) + 1
            self._normed.append((arguments[0], layer))
        elif role in ("kernel", "depthwise"):
            return [self._apply_kernel(layer, groups, node.outputs[0].shape[-1], role == "depthwise")]
        return [_Signal(groups)]

    def _apply_kernel(self, layer: Any, source: Groups, made: int, depthwise: bool) -> _Signal:
        rank = len(layer.kernel.shape)
        source = self._bind(layer.kernel, rank - 2, source)
        target = source if depthwise else self._bind(layer.kernel, rank - 1, self._new_group(made))
        self._bind(getattr(layer, "bias", None), 0, target)
        padded = getattr(layer, "padding", "valid") != "valid" and max(layer.kernel_size) > 1
        kernel = self.kernels.setdefault(id(layer), Kernel(layer, source, target, depthwise, padded))
        kernel.calls += 1
        if layer.activation not in ACTIVATIONS:  # such as softmax, which no channel may leave
            self._fix(target)
        return _Signal(target, kernel if layer.activation is keras.activations.linear else None)

    def _bind(self, variable: keras.Variable | None, axis: int, groups: Groups) -> Groups:
        if variable is None:
            return groups
        axes = self._axes.setdefault(id(variable), {})
        axes[axis] = self._union(groups, axes.get(axis, groups))
        return axes[axis]

    def _new_group(self, size: int) -> Groups:
        self._parents.append(len(self._parents))
        self._sizes.append(size)
        return (self._parents[-1],)

    def _opaque(self, shape: Sequence[int | None]) -> _Signal:
        groups = self._new_group((shape[-1] if len(shape) > 1 else None) or 0)
        self._fix(groups)
        return _Signal(groups)

    def _root(self, group: int) -> int:
        while self._parents[group] != group:
            group = self._parents[group]
        return group

    def _roots(self, groups: Groups) -> Groups:
        return tuple(map(self._root, groups))

    def _fix(self, groups: Groups) -> None:
        self._fixed.update(self._roots(groups))

    def _union(self, some: Groups, others: Groups) -> Groups:
        """Make two axes' groups the same; where they are cut differently, all of their channels are fixed instead."""
        if [self.size(group) for group in some] != [self.size(group) for group in others]:
            self._fix((*some, *others))
            return some
        for one, other in zip(self._roots(some), self._roots(others), strict=True):
            one, other = self._root(one), self._root(other)  # noqa: PLW2901 - joined meanwhile
            self._parents[other] = one
            if other in self._fixed:
                self._fixed.add(one)
        return some
