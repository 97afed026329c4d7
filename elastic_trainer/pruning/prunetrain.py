"""PruneTrain: channels that training has made unimportant are removed while it goes on, and the network gets smaller.

After Lym et al., "PruneTrain: Fast Neural Network Training by Dynamic Sparse Model Reconfiguration" (SC '19,
arXiv 1901.09290). A group lasso over channels is part of the loss; every few epochs the channels whose weights are
small are cut out of the network, which is then built anew, smaller, with its weights, batch-norm statistics, random
state, momentum and step count.

As in the paper:
    - One group for each input channel and one for each output channel of every convolution (and dense layer), all with
      one coefficient lambda: the sum of ‖W[..., c, :]‖ and of ‖W[..., k]‖. What the image and the logits fix belongs
      to no group.
    - lambda is set once, by the first batch: penalty = ratio * (loss + penalty).
    - Residual additions: channel union. A channel of the sum goes only when all that write into the addition and all
      that read from it can do without it, so no gather or scatter is ever needed.

Other than in the paper:
    - The threshold is relative. A channel is dead when none of its readers gets much from it: the norm of the reader's
      slice times the channel's spread over 64 training images is below `threshold` times the median over that
      reader's channels at the first removal. That covers both sides: nothing reads it, or nothing writes it. The
      paper trains from scratch and waits until the lasso has pulled weights under 1e-4; it can move a norm by at most
      2 * lambda * (sum of the learning rates) / (1 - momentum). That is much at a rate of 0.1, but fine-tuning at the
      paper's ratio is over long before: 24 epochs of digits at 2e-3 lowered the sum of all norms by 0.05 %, and 1e-4
      would have removed nothing. So the weights that training starts from decide most of what is removed, most goes at
      the first removal, and the training that follows heals the cut. By the norms of slices alone (those that read or
      those that write) the cut went deeper: from 92 % right to 12 % at 0.69 of the FLOPs; so, from 89 to 69 % at 0.67.
    - Norms are those of the kernel times the scale of the batch norm behind it, whose statistics are frozen here.
    - What is left of a removed channel, its mean, goes into the batch norm's mean or the bias behind the reader. That
      is exact for a constant channel. Where it cannot be done, as where padding lets zeros into a larger kernel, the
      channel's spread is taken about 0, not about its mean.
    - Channels go by eights, the least first: for other numbers TensorFlow's CPU kernels are slow (MobileNetV2 0.35 with
      13 % fewer channels took 1.26 of the full network's step before this rule).
    - No layer disappears: at least one channel of each group stays, so there are as many tensors as before.
    - The batch size stays (the paper fills the memory that becomes free).

A channel that is silent on all 64 images counts as dead whatever its weights are.

Which axes of which weights belong together follows from the data flow alone (`_Network`); a layer that is not
understood keeps the channels it reads and those it makes.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.selection.schemes import Scheme
from elastic_trainer.selection.selection import Choice
from elastic_trainer.selection.time_budget import Progress
from elastic_trainer.settings import Settings
from elastic_trainer.training.state import Network
from elastic_trainer.training.step import classification_loss
from utils import UserError

PROBE_IMAGES = 64  # over which the spread of a channel is measured

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
_ACTIVATIONS = tuple(
    getattr(keras.activations, name)
    for name in (
        *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "sigmoid", "hard_sigmoid"),
        *("hard_silu", "tanh", "softplus", "softsign", "exponential"),
    )
    if hasattr(keras.activations, name)
)


class PruneTrainScheme(Scheme):
    """All tensors train; their channels become fewer. The scheme object of `--train_type prunetrain`.

    Args:
        model: the full network, with the weights that training starts from.
        data: gives the batches that set lambda, and the constants that removed channels leave behind.
        settings: `prune_interval`, `prune_ratio` and `prune_threshold` count.
        multiple: channels are removed by so many; TensorFlow's kernels for CPUs are fast for multiples of 8.

    Raises:
        UserError: the network has no channels that could be removed.
    """

    def __init__(self, model: keras.Model, data: ImageData, settings: Settings, multiple: int = 8) -> None:
        network = _Network(model)
        if not network.prunable():
            raise UserError(
                f"--train_type prunetrain: {model.name} has no convolution or dense layer whose channels could be "
                "removed; choose another --train_type"
            )
        if any(type(layer) is _layers.Lambda or _is_own(layer) for layer in model._flatten_layers()):
            _rebuilt(model, network, {})  # what cannot be built anew is refused now, not after some epochs
        self._data, self._settings, self._multiple = data, settings, multiple
        self._tensors = len(model.trainable_variables)
        self._probes = 1
        self._typical: dict[str, float] = {}
        self._channels = {name: network.size(group) for name, group in network.prunable().items()}
        self._kept = {name: np.arange(count) for name, count in self._channels.items()}
        [(images, labels)] = data.importance_batches(0)
        loss = float(classification_loss(labels, model(images, training=False)))
        self._lambda = settings.prune_ratio / (1 - settings.prune_ratio) * loss / float(group_lasso(model))

    def due(self, step: int) -> bool:
        return step % (self._settings.prune_interval * self._data.steps_per_epoch) == 0

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        """All tensors."""
        return Choice(np.ones(self._tensors, bool), epoch=progress.step / self._data.steps_per_epoch)

    def reconfigured(self, progress: Progress, network: Network) -> Network | None:
        smaller = self.reconfigure(*network) if progress.step else None
        if smaller is None:
            return None
        left, all_channels = self.channels()
        tqdm.write(f"step {progress.step}: {left} of {all_channels} channels left")
        return Network(*smaller)

    def resume(self, state: dict[str, Any], choice: Choice, network: Network) -> Network:
        return Network(*self.restore(state, *network))

    def penalty(self, model: keras.Model) -> tf.Tensor:
        """What the lasso adds to the loss: lambda * `group_lasso(model)`; to be called inside the traced step."""
        return self._lambda * group_lasso(model)

    def reconfigure(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> tuple[keras.Model, keras.optimizers.Optimizer] | None:
        """A smaller network that computes nearly the same, and its optimizer; None where no channel is dead.

        Weights, batch-norm statistics and random state, the optimizer's slots, step counts and schedule go on. Neither
        `model` nor `optimizer` changes. There are as many trainable variables as before, in the same order.
        """
        network = _Network(model)
        batches = math.ceil(PROBE_IMAGES / self._data.batch_size)
        probe = _Probe(network, model, [self._data.importance_batches(self._probes + k)[0][0] for k in range(batches)])
        self._probes += batches
        if not self._typical:
            self._typical = {name: _typical(values) for name, values in probe.contributions.items()}
        smallest = {name: self._settings.prune_threshold * typical for name, typical in self._typical.items()}
        kept = {name: probe.kept(group, smallest, self._multiple) for name, group in network.prunable().items()}
        if all(len(indices) == len(self._kept[name]) for name, indices in kept.items()):
            return None
        self._kept = {name: self._kept[name][kept[name]] if name in kept else old for name, old in self._kept.items()}
        groups = {network.prunable()[name]: indices for name, indices in kept.items()}
        return _smaller(model, optimizer, network, groups, probe.folded(groups))

    def channels(self) -> tuple[int, int]:
        """How many of the channels that could be removed are left, and how many there were."""
        return sum(map(len, self._kept.values())), sum(self._channels.values())

    def state(self) -> dict[str, Any]:
        """What `restore` needs, fit for JSON: lambda, batches drawn, medians, and the channels kept by kernel."""
        kept = {
            name: {"of": self._channels[name], "kept": indices.tolist()}
            for name, indices in self._kept.items()
            if len(indices) < self._channels[name]
        }
        return {"lambda": self._lambda, "probes": self._probes, "typical": self._typical, "channels": kept}

    def restore(
        self, state: dict[str, Any], model: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> tuple[keras.Model, keras.optimizers.Optimizer]:
        """Take up `state()`: the full `model` and `optimizer`, freshly built, cut down to the structure they had then.

        Weights and slots are slices of those given; what they held then is to be loaded afterwards.

        Raises:
            UserError: the state is of another network.
        """
        for name, record in state["channels"].items():
            if self._channels.get(name) != record["of"]:
                raise UserError(
                    f"--train_type prunetrain: the saved run had {record['of']} channels at {name}, this network has "
                    f"{self._channels.get(name, 'no such layer')}; resume with the same --model_name and its options"
                )
        self._lambda, self._probes = float(state["lambda"]), int(state["probes"])
        self._typical = dict(state["typical"])
        self._kept = {name: np.arange(count) for name, count in self._channels.items()}
        self._kept |= {name: np.array(record["kept"], np.int64) for name, record in state["channels"].items()}
        if not state["channels"]:
            return model, optimizer
        network = _Network(model)
        groups = {network.prunable()[name]: indices for name, indices in self._kept.items()}
        return _smaller(model, optimizer, network, groups, {})


def group_lasso(model: keras.Model) -> tf.Tensor:
    """Sum over all kernels of the norms of their slices by input and by output channel.

    Only channels that could be removed count. A slice that is all zero has gradient 0.
    """
    network = _Network(model)
    halves = []
    for kernel in network.kernels.values():
        squares = tf.square(kernel.layer.kernel.value)
        rank = squares.shape.rank
        over_norms = []
        for axis, groups in network.axes(kernel.layer.kernel).items():
            counts = network.spread(groups, lambda group: np.full(network.size(group), not network.is_fixed(group)))
            if counts.any():
                rest = [other for other in range(rank) if other != axis]
                over_norm = tf.math.rsqrt(tf.reduce_sum(squares, rest, keepdims=True) + 1e-20)
                if not counts.all():
                    over_norm *= counts.reshape([-1] + [1] * (rank - 1 - axis)).astype(np.float32)
                over_norms.append(over_norm)
        if over_norms:
            # d‖w‖/dw = w/‖w‖: with the norms taken as constants, half of w²/‖w‖ has that gradient, in fewer small
            # operations than going back through the root takes.
            halves.append(0.5 * tf.reduce_sum(squares * tf.stop_gradient(functools.reduce(operator.add, over_norms))))
    half = tf.add_n(halves)
    return half + tf.stop_gradient(half)


# --- which channels belong together -----------------------------------------------------------------------------------


_Groups = tuple[int, ...]  # of an axis that holds the channels of these groups, one group's after the other's


@dataclass(eq=False)
class _Kernel:
    """A layer that maps channels to channels.

    Attributes:
        layer: Conv2D, Dense or DepthwiseConv2D (that one reads and makes the same channels).
        source, target: groups of its input's and its output's channels.
        padded: whether zeros that are no channel's value get into its sums.
        calls: how often the network applies it.
        norm: the batch norm that alone reads what it makes.
    """

    layer: Any
    source: _Groups
    target: _Groups
    depthwise: bool
    padded: bool
    calls: int = 0
    norm: Any = None


@dataclass(eq=False)
class _Signal:
    """A tensor of the graph: the groups of its last axis, what linear layer made it, and how many layers read it."""

    groups: _Groups
    maker: _Kernel | None = None
    readers: int = 0


class _Network:
    """The groups of channels of a network, and the axes of its weights that they index.

    Two axes are of one group when the data flow forces them to have the same channels: through batch norm, activations,
    pooling, depthwise convolutions and additions. A convolution or dense layer begins a new group. Those of the images,
    of the logits, and of what a layer that is not understood reads and makes, are fixed. Concatenated tensors hold one
    group's channels after the other's; a flattened one holds them again for each place.

    Attributes:
        kernels: by the layer's id, in the order of the data flow.
    """

    def __init__(self, model: keras.Model) -> None:
        self.kernels: dict[int, _Kernel] = {}
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._fixed: set[int] = set()
        self._axes: dict[int, dict[int, _Groups]] = {}  # by id of the variable: axis -> groups
        self._inputs: dict[int, _Groups] = {}  # by id of an inner model's input tensor
        self._normed: list[tuple[_Signal, Any]] = []
        self._norm_calls: dict[int, int] = {}
        if _is_graph(model):
            outputs = _walk(model, [self._opaque(tensor.shape) for tensor in model.inputs], self._visit)
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

    def readers(self, group: int | None = None) -> dict[str, _Kernel]:
        """Layers that read the channels of `group` and make others, by their kernels' paths; of any group if None."""
        found: dict[str, _Kernel] = {}
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

    def axes(self, variable: keras.Variable) -> dict[int, _Groups]:
        """The groups of a variable's axes that index channels, by axis."""
        return {axis: self._roots(groups) for axis, groups in self._axes.get(id(variable), {}).items()}

    def input_groups(self, tensor: keras.KerasTensor) -> _Groups:
        """The groups of an inner model's input; none for any other tensor."""
        return self._roots(self._inputs.get(id(tensor), ()))

    def spread(self, groups: _Groups, values: Callable[[int], np.ndarray]) -> np.ndarray:
        """What `values` gives for each group of an axis, one after the other."""
        return np.concatenate([values(group) for group in self._roots(groups)])

    def gather(self, values: np.ndarray, groups: _Groups, group: int) -> np.ndarray:
        """The parts [times the group occurs, its channels] of `values`, one for each channel of an axis."""
        ends = np.cumsum([self.size(other) for other in groups])[:-1]
        parts = zip(np.split(values, ends), self._roots(groups), strict=True)
        return np.stack([part for part, other in parts if other == self._root(group)])

    def places(self, groups: _Groups, kept: dict[int, np.ndarray]) -> np.ndarray:
        """Indices along an axis of the channels that are kept; a group that `kept` does not name keeps all."""
        starts = np.cumsum([0, *(self.size(group) for group in groups)])
        everything = [kept.get(group, np.arange(self.size(group))) for group in self._roots(groups)]
        return np.concatenate([start + indices for start, indices in zip(starts, everything, strict=False)])

    def _visit(self, node: Any, arguments: list[_Signal]) -> list[_Signal]:
        layer = node.operation
        if _is_graph(layer):
            for tensor, signal in zip(_graph(layer).inputs, arguments, strict=True):
                self._inputs[id(tensor)] = self._union(signal.groups, self._inputs.get(id(tensor), signal.groups))
            return _walk(layer, arguments, self._visit)
        for signal in arguments:
            signal.readers += 1
        role = _role(node)
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

    def _apply_kernel(self, layer: Any, source: _Groups, made: int, depthwise: bool) -> _Signal:
        rank = len(layer.kernel.shape)
        source = self._bind(layer.kernel, rank - 2, source)
        target = source if depthwise else self._bind(layer.kernel, rank - 1, self._new_group(made))
        self._bind(getattr(layer, "bias", None), 0, target)
        padded = getattr(layer, "padding", "valid") != "valid" and max(layer.kernel_size) > 1
        kernel = self.kernels.setdefault(id(layer), _Kernel(layer, source, target, depthwise, padded))
        kernel.calls += 1
        if layer.activation not in _ACTIVATIONS:  # such as softmax, which no channel may leave
            self._fix(target)
        return _Signal(target, kernel if layer.activation is keras.activations.linear else None)

    def _bind(self, variable: keras.Variable | None, axis: int, groups: _Groups) -> _Groups:
        if variable is None:
            return groups
        axes = self._axes.setdefault(id(variable), {})
        axes[axis] = self._union(groups, axes.get(axis, groups))
        return axes[axis]

    def _new_group(self, size: int) -> _Groups:
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

    def _roots(self, groups: _Groups) -> _Groups:
        return tuple(map(self._root, groups))

    def _fix(self, groups: _Groups) -> None:
        self._fixed.update(self._roots(groups))

    def _union(self, some: _Groups, others: _Groups) -> _Groups:
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


def _role(node: Any) -> str:
    """What a layer does to channels; "opaque" where that is not understood."""
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
    if kind in _CHANNELWISE or (kind is _layers.Activation and layer.activation in _ACTIVATIONS):
        return "channelwise"
    if not isinstance(getattr(layer, "kernel", None), keras.Variable):
        return "opaque"
    if kind is _layers.Dense or (kind is _layers.Conv2D and layer.groups == 1):
        return "kernel"
    one_to_one = kind is _layers.DepthwiseConv2D and layer.depth_multiplier == 1 and layer.activation in _ACTIVATIONS
    return "depthwise" if one_to_one else "opaque"


def _graph(model: Any) -> Any:
    """The graph of a functional or sequential model."""
    return getattr(model, "_functional", None) or model


def _is_graph(layer: Any) -> bool:
    """Whether `layer` is a model of Keras' own kinds, made of the layers in its graph and nothing else."""
    own = isinstance(layer, keras.Model) and type(layer).__module__.partition(".")[0] == "keras"
    return own and bool(getattr(_graph(layer), "_nodes_by_depth", None))


def _walk(model: Any, inputs: Sequence[Any], visit: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Carry one value for each tensor through a model's graph, in the order Keras runs it; returns the outputs'.

    Args:
        inputs: the values of the model's inputs.
        visit: maps a node of the graph and the values of its input tensors to those of its output tensors.
    """
    graph = _graph(model)
    values = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if not node.is_input:
                results = visit(node, [values[id(tensor)] for tensor in node.input_tensors])
                values.update((id(tensor), value) for tensor, value in zip(node.outputs, results, strict=True))
    return [values[id(tensor)] for tensor in graph.outputs]


# --- which channels are dead ------------------------------------------------------------------------------------------


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


class _Probe:
    """What each reader gets from each channel: the norm of its slice times the channel's spread over some images.

    Where the channel's mean can be folded into what follows the reader, the spread is about that mean, else about 0.

    Args:
        batches: images [batch, height, width, 3] each.
    """

    def __init__(self, network: _Network, model: keras.Model, batches: Sequence[tf.Tensor]) -> None:
        self._network = network
        self._moments: dict[int, _Moments] = {}  # of what a layer reads, by its id
        for images in batches:
            _walk(model, [images], self._visit)
        self.contributions = {
            name: _reading_norms(kernel) * self._moments[id(kernel.layer)].spread(_is_foldable(kernel))
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
        if _is_graph(layer):
            return _walk(layer, arguments, self._visit)
        if id(layer) in self._network.kernels:
            self._moments.setdefault(id(layer), _Moments(arguments[0])).add(arguments[0])
        tensors = {id(tensor): values for tensor, values in zip(node.input_tensors, arguments, strict=True)}
        args, kwargs = node.arguments.fill_in(tensors)
        if "training" in inspect.signature(layer.call).parameters:  # random layers take True if nothing is said
            kwargs = {**kwargs, "training": False}
        return tf.nest.flatten(layer(*args, **kwargs))


def _is_foldable(kernel: _Kernel) -> bool:
    """Whether a constant that `kernel` reads can become a part of the batch norm or the bias behind it."""
    behind = kernel.norm is not None or getattr(kernel.layer, "bias", None) is not None
    return behind and kernel.calls == 1 and not kernel.padded


def _typical(contributions: np.ndarray) -> float:
    """Median of those that are not 0."""
    return float(np.median(contributions[contributions > 0])) if (contributions > 0).any() else 0.0


def _reading_norms(kernel: _Kernel) -> np.ndarray:
    """Norms of a kernel's slices by input channel, as its batch norm scales what it makes."""
    weights = kernel.layer.kernel.numpy().astype(np.float64)
    if kernel.norm is not None:
        norm = kernel.norm
        gamma = 1.0 if norm.gamma is None else norm.gamma.numpy()
        weights = weights * (gamma / np.sqrt(norm.moving_variance.numpy() + norm.epsilon))
    return np.sqrt((weights**2).sum((*range(weights.ndim - 2), -1)))


# --- the smaller network ----------------------------------------------------------------------------------------------


def _smaller(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    network: _Network,
    kept: dict[int, np.ndarray],
    changed: dict[int, np.ndarray],
) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """`model` and `optimizer` built anew with the channels of each group that are `kept`.

    Args:
        changed: values, by id of the variable and before any channel is taken out, that differ from those in `model`.
    """
    rebuilt = _rebuilt(model, network, kept)
    for new, old in zip(rebuilt.variables, model.variables, strict=True):
        new.assign(_cut(changed.get(id(old), old.numpy()), old, network, kept))
    return rebuilt, _carried_over(optimizer, model, rebuilt, network, kept)


def _is_own(layer: Any) -> bool:
    """Whether a layer is of a class that neither Keras nor this project defines."""
    return type(layer).__module__.partition(".")[0] != "keras" and type(layer) is not FrozenBatchNormalization


def _rebuilt(model: keras.Model, network: _Network, kept: dict[int, np.ndarray]) -> keras.Model:
    """A new model like `model` but of the `kept` widths, with new weights. Raises `UserError` where Keras cannot."""
    classes = {keras.saving.get_registered_name(type(layer)): type(layer) for layer in model._flatten_layers()}
    try:
        config = model.get_config()
        _set_widths(config, model, network, kept)
        with keras.saving.custom_object_scope(classes):
            rebuilt = type(model).from_config(config)
    except Exception as error:  # Keras and users' layers raise many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--train_type prunetrain: Keras cannot build {model.name} anew from its configuration: {lines[0]}"
        ) from error
    for new, old in zip(rebuilt._flatten_layers(), model._flatten_layers(), strict=True):
        new.trainable = old.trainable  # from_config gives a whole model's to each of its layers
    # Paths may differ inside a layer of one's own that makes layers without a name: Keras numbers these.
    if [_kind_of(variable) for variable in rebuilt.variables] != [_kind_of(variable) for variable in model.variables]:
        raise UserError(f"--train_type prunetrain: Keras builds other tensors from {model.name}'s configuration")
    return rebuilt


def _kind_of(variable: keras.Variable) -> tuple[str, int, bool]:
    return variable.name, len(variable.shape), variable.trainable


def _set_widths(config: dict[str, Any], model: Any, network: _Network, kept: dict[int, np.ndarray]) -> None:
    """Write the new numbers of channels into the configuration of a functional or sequential model."""
    layers = {layer.name: layer for layer in _graph(model).operations}
    if config.get("build_input_shape"):
        _set_width(config, "build_input_shape", network, network.input_groups(_graph(model).inputs[0]), kept)
    for entry in config["layers"]:
        inner = entry["config"]
        layer = layers[entry.get("name") or inner["name"]]
        if _is_graph(layer):
            entry.pop("build_config", None)
            _set_widths(inner, layer, network, kept)
        elif isinstance(layer, _layers.InputLayer):
            _set_width(inner, "batch_shape", network, network.input_groups(layer.output), kept)
        elif any(network.axes(variable) for variable in getattr(layer, "variables", ())):
            entry.pop("build_config", None)  # would build it for the old shapes, before it is called
            if id(layer) in network.kernels and not network.kernels[id(layer)].depthwise:
                groups = network.axes(layer.kernel)[len(layer.kernel.shape) - 1]
                inner["units" if isinstance(layer, _layers.Dense) else "filters"] = len(network.places(groups, kept))


def _set_width(
    config: dict[str, Any], key: str, network: _Network, groups: _Groups, kept: dict[int, np.ndarray]
) -> None:
    """Write the number of channels of an inner model's input into the last place of a shape in its configuration."""
    if any(group in kept for group in groups):
        config[key] = (*config[key][:-1], len(network.places(groups, kept)))


def _cut(values: np.ndarray, variable: keras.Variable, network: _Network, kept: dict[int, np.ndarray]) -> np.ndarray:
    """`values`, of the shape of `variable`, with the channels that are kept."""
    for axis, groups in network.axes(variable).items():
        values = np.take(values, network.places(groups, kept), axis)
    return values


def _carried_over(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    rebuilt: keras.Model,
    network: _Network,
    kept: dict[int, np.ndarray],
) -> keras.optimizers.Optimizer:
    """A new optimizer for `rebuilt` with the slots, counts and rate of that for `model`."""
    variables = model.trainable_variables
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build(rebuilt.trainable_variables)
    slot_of: dict[int, keras.Variable] = {}
    for slots in vars(optimizer).values():  # whatever lists of one variable for each tensor it keeps
        if isinstance(slots, list) and len(slots) == len(variables):
            slot_of |= {id(slot): variable for slot, variable in zip(slots, variables, strict=True)}
    for new, old in zip(copy.variables, optimizer.variables, strict=True):
        values = old.numpy()
        variable = slot_of.get(id(old))
        if variable is not None and values.shape == tuple(variable.shape):
            values = _cut(values, variable, network, kept)
        new.assign(values)
    return copy
