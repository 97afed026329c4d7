#!/usr/bin/env python
"""Is a pruned network's step shorter? Step time and FLOPs of full training, before and after channels are removed.

For several shares, the script zeroes the kernel slices that read the weakest channels of each group. Then the scheme of
`--train_type prunetrain` removes these channels. Steps of the full and of the smaller network alternate in this
process. Times are medians. FLOPs are counted in both traced steps. `lasso_ms` is the time of the group lasso and its
gradient alone. The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_prunetrain.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from common import Setting

import utils
from elastic_trainer.settings import NetworkSettings, Settings
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
QUICK_SHARES = (0.0, 0.5)


class Measured:
    """A network with its optimizer, and the two compiled functions that are timed: the step and the lasso."""

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, batch: tuple[Any, Any]) -> None:
        import tensorflow as tf

        from elastic_trainer.pruning.group_lasso import group_lasso
        from elastic_trainer.task import ImageClassification
        from elastic_trainer.training.step import TrainStep

        self.parameters = model.count_params()
        variables = [variable.value for variable in model.trainable_variables]
        step = TrainStep(ImageClassification(model), optimizer, batch[0].shape[0])
        self.flops = sum(count_flops(step.graph).values())

        @tf.function
        def lasso() -> tuple[tf.Tensor, list[tf.Tensor]]:
            with tf.GradientTape() as tape:
                penalty = group_lasso(model)
            return penalty, [gradient for gradient in tape.gradient(penalty, variables) if gradient is not None]

        self.step = lambda: step(*batch)
        self.lasso = lambda: float(lasso()[0])
        for _ in range(3):  # TensorFlow optimises a graph during its first calls
            self.step()
            self.lasso()


def weaken(model: keras.Model, share: float) -> None:
    """Zero the kernel slices that read the weakest `share` of each kernel's channels.

    The weakest channels have the smallest norms of the slices that read them, as a share of each layer's sum.
    """
    from elastic_trainer.pruning.channel_groups import ChannelGroups
    from elastic_trainer.pruning.dead_channels import reading_norms

    channels = ChannelGroups(model)
    total, is_weak = np.zeros(channels.count), np.zeros(channels.count, bool)
    for kernel in channels.readers().values():
        norms = reading_norms(kernel)
        np.add.at(total, kernel.source, norms / max(float(norms.sum()), 1e-30))
    for numbers in channels.prunable().values():
        is_weak[numbers[np.argsort(total[numbers], kind="stable")[: int(share * len(numbers))]]] = True
    for kernel in channels.readers().values():
        weights = kernel.layer.kernel.numpy()
        weights[..., is_weak[kernel.source], :] = 0.0
        kernel.layer.kernel.assign(weights)


def pruned_network(
    network: NetworkSettings, share: float, batch: tuple[tf.Tensor, tf.Tensor]
) -> tuple[Measured, tuple[int, int]]:
    """The network without the weakest `share` of its channels, the number of channels left and that of the full one."""
    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.pruning.scheme import SPREAD_IMAGES, PruneTrainScheme

    model, optimizer = common.trainable_network(network)
    one_batch = Batch(lambda: batch[0], batch[1])
    data = SimpleNamespace(importance_batches=lambda index: [one_batch], batch_size=SPREAD_IMAGES)
    settings = Settings(prune_ratio=0.2, prune_threshold=0.0)
    scheme = PruneTrainScheme(model, data, settings)  # type: ignore[arg-type]
    weaken(model, share)
    model, optimizer = scheme.reconfigure(model, optimizer) or (model, optimizer)
    return Measured(model, optimizer, batch), scheme.channels()


def measure_share(
    network: NetworkSettings, share: float, batch: tuple[tf.Tensor, tf.Tensor], full: Measured, rounds: int
) -> dict[str, Any]:
    """Compare the `full` network with one that lost the weakest `share` of its channels; prints one line."""
    smaller, (left, full_count) = pruned_network(network, share, batch)
    full_ms, step_ms, lasso_ms = measure_ms([full.step, smaller.step, smaller.lasso], rounds).T
    ratios = step_ms / full_ms  # of neighbouring steps
    row = {
        "asked_share": share,
        "removed_share": 1 - left / full_count,
        "channels": left,
        "step_ms": float(np.median(step_ms)),
        "full_step_ms": float(np.median(full_ms)),
        "step_ratio": float(np.median(ratios)),
        "step_ratio_quartiles": [float(q) for q in np.quantile(ratios, (0.25, 0.75))],
        "flops": smaller.flops,
        "flops_ratio": smaller.flops / full.flops,
        "parameters": smaller.parameters,
        "parameters_ratio": smaller.parameters / full.parameters,
        "lasso_ms": float(np.median(lasso_ms)),
    }
    print(
        f"{row['removed_share']:.0%} of the channels removed: step {row['step_ms']:.1f} ms, "
        f"{row['step_ratio']:.2f} of the full network's; FLOPs {row['flops_ratio']:.2f}, parameters "
        f"{row['parameters_ratio']:.2f}; the lasso takes {row['lasso_ms']:.1f} ms",
        flush=True,
    )
    return row


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The full network, and each smaller one beside it."""
    import tensorflow as tf

    network = args.network
    rng = np.random.default_rng(network.seed)
    images = rng.uniform(0, 255, (network.batch_size, network.input_size, network.input_size, 3)).astype(np.float32)
    labels = rng.integers(0, network.num_classes, network.batch_size)
    batch = tf.constant(images), tf.constant(labels, tf.int32)
    full = Measured(*common.trainable_network(network), batch)
    rows = []
    for share in QUICK_SHARES if args.quick else SHARES:
        rows.append(measure_share(network, share, batch, full, args.rounds))
        gc.collect()
    return {"rounds": args.rounds, "full_flops": full.flops, "full_parameters": full.parameters, "pruned": rows}


SETTINGS = {"rounds": Setting(40, 5, "measured steps of each network")}


if __name__ == "__main__":
    utils.run_cli(lambda: common.run_benchmark("benchmark_prunetrain", __doc__, SETTINGS, measure))
