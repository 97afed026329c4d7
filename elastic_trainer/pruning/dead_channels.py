"""Which channels are dead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.pruning.channel_groups import ChannelGroups, Kernel
from elastic_trainer.pruning.layer_graph import is_graph, walk


class _Moments:
    """Mean and spread of the channels of one tensor over batches, exact where a channel is constant."""

    def __init__(self, values: tf.Tensor) -> None:
        self._origin = tf.reshape(values, [-1, values.shape[-1]])[0]
        self._count = 0
        self._sums = np.zeros((2, values.shape[-1]))  # of the distances from the first value, and of their squares

    def add(self, values: tf.Tensor) -> None:
        """Count `values` [..., channels] in."""
        distances = tf.reshape(values, [-1, values.shape[-1]]) - self._origin
        self._count += distances.shape[0]
        self._sums += [tf.reduce_sum(distances, 0).numpy(), tf.reduce_sum(tf.square(distances), 0).numpy()]

    def mean(self) -> np.ndarray:
        """Float [channels]."""
        return self._origin.numpy() + self._sums[0] / self._count

    def spread(self, about_mean: bool) -> np.ndarray:
        """Standard deviation [channels], or root mean square if not `about_mean`."""
        first, second = self._sums / self._count
        variance = np.maximum(second - first**2, 0.0)
        return np.sqrt(variance if about_mean else variance + self.mean() ** 2)


class ChannelContributions:
    """What each reader gets from each channel: the norm of its slice times the channel's spread over some images.

    Where the channel's mean can be folded into what follows the reader, the spread is about that mean, else about 0.

    Args:
        batches: images [batch, height, width, 3] each.
    """

    def __init__(self, network: ChannelGroups, model: keras.Model, batches: Sequence[tf.Tensor]) -> None:
        self._network = network
        self._moments: dict[int, _Moments] = {}  # of what a layer reads, by its id
        for images in batches:
            walk(model, [images], self._visit)
        self.contributions = {
            name: reading_norms(kernel) * self._moments[id(kernel.layer)].spread(_is_foldable(kernel))
            for name, kernel in network.readers().items()
        }

    def kept(self, group: int, smallest: dict[str, float], multiple: int) -> np.ndarray:
        """Indices of the channels of `group` that contribute more than `smallest` (by the reader's name) somewhere.

        The largest of the others fill up to the next multiple of `multiple`; at least one channel stays.
        """
        shares = [
            self._network.gather(self.contributions[name] / max(smallest[name], 1e-30), kernel.source, group)
            for name, kernel in self._network.readers(group).items()
        ]
        most = np.max(np.concatenate(shares), axis=0)
        alive = int((most > (1.0 if any(smallest.values()) else 0.0)).sum())
        count = math.ceil(max(alive, 1) / multiple) * multiple
        return np.sort(np.argsort(-most, kind="stable")[:count])

    def folded(self, kept: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """New values of batch-norm means and biases, by id of the variable, that stand for the channels not kept."""
        values: dict[int, np.ndarray] = {}
        for kernel in self._network.readers().values():
            means = self._moments[id(kernel.layer)].mean()
            gone = np.setdiff1d(np.arange(len(means)), self._network.places(kernel.source, kept))
            if not (len(gone) and _is_foldable(kernel)):
                continue
            weights = kernel.layer.kernel.numpy()[..., gone, :]
            constant = means[gone] @ weights.reshape(-1, len(gone), weights.shape[-1]).sum(axis=0)
            if kernel.norm is not None:
                values[id(kernel.norm.moving_mean)] = kernel.norm.moving_mean.numpy() - constant
            else:
                values[id(kernel.layer.bias)] = kernel.layer.bias.numpy() + constant
        return values

    def _visit(self, node: Any, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        layer = node.operation
        if is_graph(layer):
            return walk(layer, arguments, self._visit)
        if id(layer) in self._network.kernels:
            self._moments.setdefault(id(layer), _Moments(arguments[0])).add(arguments[0])
        tensors = {id(tensor): values for tensor, values in zip(node.input_tensors, arguments, strict=True)}
        args, kwargs = node.arguments.fill_in(tensors)
        if "training" in inspect.signature(layer.call).parameters:  # random layers take True if nothing is said
            kwargs = {**kwargs, "training": False}
        return tf.nest.flatten(layer(*args, **kwargs))


def _is_foldable(kernel: Kernel) -> bool:
    """Whether a constant that `kernel` reads can become a part of the batch norm or the bias behind it."""
    behind = kernel.norm is not None or getattr(kernel.layer, "bias", None) is not None
    return behind and kernel.calls == 1 and not kernel.padded


def median_contribution(contributions: np.ndarray) -> float:
    """Median of those that are not 0."""
    return float(np.median(contributions[contributions > 0])) if (contributions > 0).any() else 0.0


def reading_norms(kernel: Kernel) -> np.ndarray:
    """Norms of a kernel's slices by input channel, as its batch norm scales what it makes."""
    weights = kernel.layer.kernel.numpy().astype(np.float64)
    if kernel.norm is not None:
        norm = kernel.norm
        gamma = 1.0 if norm.gamma is None else norm.gamma.numpy()
        weights = weights * (gamma / np.sqrt(norm.moving_variance.numpy() + norm.epsilon))
    return np.sqrt((weights**2).sum((*range(weights.ndim - 2), -1)))
