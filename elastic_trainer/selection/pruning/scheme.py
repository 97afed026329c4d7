"""PruneTrain: removes unimportant channels during training, so that the network gets smaller and faster.

After Lym et al., "PruneTrain: Fast Neural Network Training by Dynamic Sparse Model Reconfiguration" (SC '19,
arXiv 1901.09290). The loss contains a group lasso over channels, with one coefficient lambda, which is set once, from
the first batch: penalty = ratio * (loss + penalty). Every few epochs the network is rebuilt without the least important
channels. It keeps its weights, batch-norm statistics, random state, momentum and step count. A channel of a residual
sum is removed only if all layers that write into the sum and all that read from it can do without it.

Different from the paper:
    - The threshold is relative. A layer gets from a channel the norm of its slice of the kernel (times the scale of the
      batch norm behind it) times the channel's standard deviation over 64 training images. A channel is dead if every
      layer that reads it gets less than `threshold` times the median over that layer's channels at the first removal.
      The paper trains from scratch, and removes channels whose weights the lasso has reduced below 1e-4; in fine-tuning
      it reduces norms by 0.05 %. The norms of the slices alone cost far more accuracy (92 to 12 %, not 89 to 69 %).
    - The mean of a removed channel is folded into the mean of the batch norm or into the bias behind the layer that
      reads it. Where that is impossible, such as where padding adds zeros to the sums of a larger kernel, the root mean
      square takes the place of the standard deviation.
    - The number of channels that stay is rounded up to a multiple of 8. TensorFlow's CPU kernels are slow for other
      numbers: without this rule, a step of MobileNetV2 0.35 with 13 % fewer channels took 1.26 times as long.
    - At least one channel stays everywhere, and the batch size stays the same.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import CompiledTask, classification_loss
from elastic_trainer.networks.saved_model import check_saving
from elastic_trainer.selection.budget import Progress
from elastic_trainer.selection.pruning.channel_groups import ChannelGroups
from elastic_trainer.selection.pruning.dead_channels import ChannelContributions
from elastic_trainer.selection.pruning.rebuild import rebuild_model, rebuild_network
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.selection.select import Selection
from elastic_trainer.system.errors import UserError

SPREAD_IMAGES = 64  # training images over which the standard deviation of each channel is measured


class PruneTrainScheme(Scheme):
    """All tensors train, and the network loses channels. The scheme of `--train_type prunetrain`.

    Args:
        model: the full network with the weights that training starts from.
        data: its batches set lambda and measure what each channel contributes.
        interval: epochs between two removals of channels.
        ratio: share of the group lasso in the first batch's loss.
        threshold: a channel is removed if each of its readers gets less than this share of what it got from a median
            channel at first.
        multiple: the number of a kernel's channels that stay is rounded up to a multiple of this.

    Raises:
        UserError: the network has no channels that could be removed, or Keras cannot rebuild it.
    """

    def __init__(
        self,
        model: keras.Model,
        data: ShuffledData,
        interval: int = 2,
        ratio: float = 0.25,
        threshold: float = 0.7,
        multiple: int = 8,
    ) -> None:
        channels = ChannelGroups(model)
        prunable = channels.prunable()
        if not prunable:
            raise UserError(
                f"--train_type prunetrain: {model.name} has no convolution or dense layer whose channels could be "
                "removed; choose another --train_type"
            )
        rebuild_model(model, channels, np.ones(channels.count, bool))  # fails now, not after some epochs
        self._data, self._threshold, self._multiple = data, threshold, multiple
        self.due = range(0, sys.maxsize, interval * data.steps_per_epoch)
        self._tensor_count = len(model.trainable_variables)
        self._batches_drawn = 1
        self._medians: dict[str, float] = {}  # of the contributions at the first removal, by the reader's name
        self.full_counts = {name: len(numbers) for name, numbers in prunable.items()}  # of channels in the full network
        self.kept = {name: np.arange(count) for name, count in self.full_counts.items()}  # indices of those left
        [batch] = data.importance_batches(0)
        loss = float(classification_loss(batch.targets, model(batch.inputs, training=False)))
        self._lambda = ratio / (1 - ratio) * loss / float(group_lasso(model))

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """All tensors, after the first time of a network without its dead channels."""
        smaller = self.reconfigure(state.model, state.optimizer) if progress.step else None
        if smaller is not None:
            left, all_channels = self.channels()
            tqdm.write(f"step {progress.step}: {left} of {all_channels} channels left")
            state.replace(*smaller)
        everything, epoch = np.ones(self._tensor_count, bool), progress.step / self._data.steps_per_epoch
        return Selection(everything, epoch=epoch)

    def penalty(self, model: keras.Model) -> tf.Tensor:
        """The penalty that the lasso adds to the loss: lambda * `group_lasso(model)`. Called inside the traced step."""
        return self._lambda * group_lasso(model)

    def reconfigure(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> tuple[keras.Model, keras.optimizers.Optimizer] | None:
        """A smaller model without the dead channels, and its optimizer; None if no channel is dead.

        The model computes nearly the same and has the same trainable variables in the same order, with the kept slices
        of their values. Batch-norm statistics, random state, slots, step counts and the learning rate's schedule are
        kept too.
        """
        channels = ChannelGroups(model)
        batches = math.ceil(SPREAD_IMAGES / self._data.batch_size)
        images = [self._data.importance_batches(self._batches_drawn + k)[0].inputs for k in range(batches)]
        contributions = ChannelContributions(channels, model, images)
        self._batches_drawn += batches
        if not self._medians:
            alive = {name: values[values > 0] for name, values in contributions.by_reader.items()}
            self._medians = {name: float(np.median(values)) if len(values) else 0.0 for name, values in alive.items()}
        thresholds = {name: self._threshold * median for name, median in self._medians.items()}
        kept = contributions.kept(thresholds, self._multiple)
        if kept.all():
            return None
        for name, numbers in channels.prunable().items():
            self.kept[name] = self.kept[name][kept[numbers]]
        return rebuild_network(model, optimizer, channels, kept, contributions.folded_means(kept))

    def channels(self) -> tuple[int, int]:
        """Number of removable channels that are left, and that the full network has."""
        return sum(map(len, self.kept.values())), sum(self.full_counts.values())

    def to_record(self) -> dict[str, Any]:
        """As JSON types: lambda, batches drawn, medians, and the kept channels of each kernel."""
        kept = {name: indices.tolist() for name, indices in self.kept.items()}
        own = {"lambda": self._lambda, "batches_drawn": self._batches_drawn, "medians": self._medians}
        return {**own, "channels": kept}

    def resume(self, record: dict[str, Any], selection: Selection | None, state: TrainState) -> None:
        """Cut the full network of `state` down to the kept channels; the caller loads the saved values afterwards."""
        self._lambda, self._batches_drawn = float(record["lambda"]), int(record["batches_drawn"])
        self._medians = dict(record["medians"])
        self.kept = {name: np.array(indices, np.int64) for name, indices in record["channels"].items()}
        channels = ChannelGroups(state.model)
        kept = np.ones(channels.count, bool)
        for name, numbers in channels.prunable().items():
            kept[np.delete(numbers, self.kept[name])] = False
        if not kept.all():
            state.replace(*rebuild_network(state.model, state.optimizer, channels, kept, {}))


def group_lasso(model: keras.Model) -> tf.Tensor:
    """Sum of ‖W[..., c, :]‖ and of ‖W[..., k]‖ over the input channels c and the output channels k of all kernels.

    Fixed channels do not count (see `ChannelGroups`). A slice of zeros has gradient 0.
    """
    channels = ChannelGroups(model)
    halves = []
    for kernel in channels.kernels.values():
        squares = tf.square(kernel.layer.kernel.value)
        rank = squares.shape.rank
        inverse_norms = []
        for axis, numbers in channels.axes(kernel.layer.kernel).items():
            counts = ~channels.is_fixed[numbers]
            if counts.any():
                rest = [other for other in range(rank) if other != axis]
                inverse_norm = tf.math.rsqrt(tf.reduce_sum(squares, rest, keepdims=True) + 1e-20)
                if not counts.all():
                    inverse_norm *= counts.reshape([-1] + [1] * (rank - 1 - axis)).astype(np.float32)
                inverse_norms.append(inverse_norm)
        if inverse_norms:
            # ‖w‖ has the gradient w/‖w‖. With ‖w‖ as a constant, w²/(2‖w‖) has the same gradient, but half the value.
            # It takes fewer small operations than the gradient of the square root.
            constants = tf.stop_gradient(functools.reduce(operator.add, inverse_norms))
            halves.append(0.5 * tf.reduce_sum(squares * constants))
    half = tf.add_n(halves)
    return half + tf.stop_gradient(half)


def prunetrain(context: SchemeContext) -> Scheme:
    """PruneTrain for a run; `UserError` if its network cannot be replaced, or be loaded again if it is saved."""
    if isinstance(context.task, CompiledTask):
        raise UserError("prunetrain: replaces the network while it trains, which a compiled model does not allow")
    if context.settings.save_model:
        check_saving(context.task.model, "--train_type prunetrain", changes_shape=True)
    return PruneTrainScheme(context.task.model, context.data)
