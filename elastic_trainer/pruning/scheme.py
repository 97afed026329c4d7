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

Which axes of which weights belong together follows from the data flow alone (`ChannelGroups`); a layer that is not
understood keeps the channels it reads and those it makes.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.pruning.channel_groups import ChannelGroups
from elastic_trainer.pruning.dead_channels import ChannelContributions, median_contribution
from elastic_trainer.pruning.group_lasso import group_lasso
from elastic_trainer.pruning.rebuild import is_custom, rebuild_model, rebuild_network
from elastic_trainer.selection.schemes import Scheme
from elastic_trainer.selection.selection import Choice
from elastic_trainer.selection.time_budget import Progress
from elastic_trainer.settings import Settings
from elastic_trainer.training.state import Network
from elastic_trainer.training.step import classification_loss
from utils import UserError

PROBE_IMAGES = 64  # over which the spread of a channel is measured


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
        network = ChannelGroups(model)
        if not network.prunable():
            raise UserError(
                f"--train_type prunetrain: {model.name} has no convolution or dense layer whose channels could be "
                "removed; choose another --train_type"
            )
        if any(type(layer) is keras.layers.Lambda or is_custom(layer) for layer in model._flatten_layers()):
            rebuild_model(model, network, {})  # what cannot be built anew is refused now, not after some epochs
        self._data, self._settings, self._multiple = data, settings, multiple
        self._tensors = len(model.trainable_variables)
        self._probes = 1
        self._typical: dict[str, float] = {}
        self._channels = {name: network.size(group) for name, group in network.prunable().items()}
        self._kept = {name: np.arange(count) for name, count in self._channels.items()}
        [(images, labels)] = data.probe(0)
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
        network = ChannelGroups(model)
        batches = math.ceil(PROBE_IMAGES / self._data.batch_size)
        probe = ChannelContributions(network, model, [self._data.probe(self._probes + k)[0][0] for k in range(batches)])
        self._probes += batches
        if not self._typical:
            self._typical = {name: median_contribution(values) for name, values in probe.contributions.items()}
        smallest = {name: self._settings.prune_threshold * typical for name, typical in self._typical.items()}
        kept = {name: probe.kept(group, smallest, self._multiple) for name, group in network.prunable().items()}
        if all(len(indices) == len(self._kept[name]) for name, indices in kept.items()):
            return None
        self._kept = {name: self._kept[name][kept[name]] if name in kept else old for name, old in self._kept.items()}
        groups = {network.prunable()[name]: indices for name, indices in kept.items()}
        return rebuild_network(model, optimizer, network, groups, probe.folded(groups))

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
        network = ChannelGroups(model)
        groups = {network.prunable()[name]: indices for name, indices in self._kept.items()}
        return rebuild_network(model, optimizer, network, groups, {})
