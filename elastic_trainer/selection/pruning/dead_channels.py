"""Which channels are dead: what each layer gets from each channel that it reads, measured on training images."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.networks.graphs import is_graph, walk
from elastic_trainer.selection.pruning.channel_groups import ChannelGroups, Kernel


class ChannelContributions:
    """What each layer gets from each channel: the norm of its kernel's slice times the channel's spread over images.

    The spread is the standard deviation if the channel's mean can be folded into the batch norm or the bias behind the
    layer. Otherwise it is the root mean square. `by_reader` has them, float [input channels], by the names of
    `ChannelGroups.readers`.
    """

    def __init__(self, channels: ChannelGroups, model: keras.Model, batches: Sequence[tf.Tensor]) -> None:
        self._channels = channels
        self._moments: dict[int, _Moments] = {}  # of the inputs of each layer with a kernel, by id(layer)
        for images in batches:
            walk(model, [images], self._visit)
        self.by_reader = {
            name: reading_norms(kernel) * self._moments[id(kernel.layer)].spread(_is_foldable(kernel))
            for name, kernel in channels.readers().items()
        }

    def kept(self, thresholds: dict[str, float], multiple: int) -> np.ndarray:
        """Choose the channels that stay, bool [channels of the network].

        A channel is alive if it contributes more than the threshold to at least one layer. Of the channels that a
        kernel makes, as many stay as are alive, at least 1, rounded up to a multiple of `multiple` if there are enough;
        those stay that contribute most.
        """
        largest = np.zeros(self._channels.count)
        for name, kernel in self._channels.readers().items():
            np.maximum.at(largest, kernel.source, self.by_reader[name] / max(thresholds[name], 1e-30))
        kept = np.ones(self._channels.count, bool)
        for channels in self._channels.prunable().values():
            count = math.ceil(max(int((largest[channels] > 1.0).sum()), 1) / multiple) * multiple
            kept[channels[np.argsort(-largest[channels], kind="stable")[count:]]] = False
        return kept

    def folded_means(self, kept: np.ndarray) -> dict[int, np.ndarray]:
        """The means of the removed channels, folded into the batch-norm means and biases behind their readers.

        Returns {id of a variable that changes: its new values}.
        """
        values: dict[int, np.ndarray] = {}
        for kernel in self._channels.readers().values():
            means = self._moments[id(kernel.layer)].mean()
            removed = np.flatnonzero(~kept[kernel.source])
            if not (len(removed) and _is_foldable(kernel)):
                continue
            weights = kernel.layer.kernel.numpy()[..., removed, :]
            constant = means[removed] @ weights.reshape(-1, len(removed), weights.shape[-1]).sum(axis=0)
            if kernel.norm is not None:
                values[id(kernel.norm.moving_mean)] = kernel.norm.moving_mean.numpy() - constant
            else:
                values[id(kernel.layer.bias)] = kernel.layer.bias.numpy() + constant
        return values

    def _visit(self, node: Any, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        layer = node.operation
        if is_graph(layer):
            return walk(layer, arguments, self._visit)
        if id(layer) in self._channels.kernels:
            self._moments.setdefault(id(layer), _Moments(arguments[0])).add(arguments[0])
        tensors = {id(tensor): values for tensor, values in zip(node.input_tensors, arguments, strict=True)}
        args, kwargs = node.arguments.fill_in(tensors)
        if "training" in inspect.signature(layer.call).parameters:  # random layers default to True
            kwargs = {**kwargs, "training": False}
        return tf.nest.flatten(layer(*args, **kwargs))


class _Moments:
    """Mean and spread of the channels of one tensor over several batches; exact for constant channels.

    The first batch [..., channels] fixes the origin of the sums, and is not counted.
    """

    def __init__(self, values: tf.Tensor) -> None:
        self._origin = tf.reshape(values, [-1, values.shape[-1]])[0]
        self._count = 0
        self._sums = np.zeros((2, values.shape[-1]))  # of the differences from the origin, and of their squares

    def add(self, values: tf.Tensor) -> None:
        differences = tf.reshape(values, [-1, values.shape[-1]]) - self._origin
        self._count += differences.shape[0]
        self._sums += [tf.reduce_sum(differences, 0).numpy(), tf.reduce_sum(tf.square(differences), 0).numpy()]

    def mean(self) -> np.ndarray:
        return self._origin.numpy() + self._sums[0] / self._count

    def spread(self, about_mean: bool) -> np.ndarray:
        """Standard deviation [channels] if `about_mean`, otherwise root mean square."""
        first, second = self._sums / self._count
        variance = np.maximum(second - first**2, 0.0)
        return np.sqrt(variance if about_mean else variance + self.mean() ** 2)


def reading_norms(kernel: Kernel) -> np.ndarray:
    """Float [input channels]: norms of the kernel's slices, each output channel times the scale of its batch norm."""
    weights = kernel.layer.kernel.numpy().astype(np.float64)
    if kernel.norm is not None:
        norm = kernel.norm
        gamma = 1.0 if norm.gamma is None else norm.gamma.numpy()
        weights = weights * (gamma / np.sqrt(norm.moving_variance.numpy() + norm.epsilon))
    return np.sqrt((weights**2).sum((*range(weights.ndim - 2), -1)))


def _is_foldable(kernel: Kernel) -> bool:
    """Whether a constant input channel can become a part of the batch norm or the bias behind the layer."""
    has_offset = kernel.norm is not None or getattr(kernel.layer, "bias", None) is not None
    return has_offset and kernel.calls == 1 and not kernel.padded
