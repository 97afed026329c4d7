#!/usr/bin/env python
"""Is a pruned network's step shorter? Step time and FLOPs of full training before and after channels are removed.

The channels that are read least of every group (prunetrain.py) are really removed, share by share, by the very code
that prunes while training; then steps of the full and of the smaller network take turns in this process. Medians; a
band goes from the first to the third quartile. FLOPs are counted in both traced steps. `lasso_ms` is what the group
lasso and its gradient take by themselves. Draws a figure and prints one JSON object as its last line.

    python scripts/benchmark_prunetrain.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import common
import numpy as np

import utils
from elastic_trainer.machine import environment
from elastic_trainer.settings import PAPER
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
QUICK_SHARES = (0.0, 0.5)


class Measured:
    """A network with its optimizer, and compiled calls of what is timed."""

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, batch: tuple[Any, Any]) -> None:
        import tensorflow as tf

        from elastic_trainer.pruning import prunetrain
        from elastic_trainer.training.step import TrainStep

        self.parameters = model.count_params()
        variables = [variable.value for variable in model.trainable_variables]
        step = TrainStep(model, optimizer, batch[0].shape[0])
        self.flops = sum(count_flops(step.graph).values())

        @tf.function
        def lasso() -> tuple[tf.Tensor, list[tf.Tensor]]:
            with tf.GradientTape() as tape:
                penalty = prunetrain.group_lasso(model)
            return penalty, [gradient for gradient in tape.gradient(penalty, variables) if gradient is not None]

        self.step = lambda: step(*batch)
        self.lasso = lambda: float(lasso()[0])
        for _ in range(3):  # TensorFlow optimises a graph at its first calls
            self.step()
            self.lasso()


def weaken(model: keras.Model, share: float) -> None:
    """Zero what reads the `share` of each group's channels that its readers weigh least."""
    from elastic_trainer.pruning import prunetrain

    network = prunetrain._Network(model)
    for group in network.prunable().values():
        readers = network.readers(group).values()
        norms = [network.gather(prunetrain._reading_norms(kernel), kernel.source, group) for kernel in readers]
        total = np.sum([norm.sum(axis=0) / max(float(norm.sum()), 1e-30) for norm in norms], axis=0)
        weakest = np.argsort(total, kind="stable")[: int(share * len(total))]
        for kernel in readers:
            # Which places along the axis these are: keep only them of this group, and nothing of any other.
            only = {other: np.arange(0) for other in network._roots(kernel.source)} | {group: weakest}
            weights = kernel.layer.kernel.numpy()
            weights[..., network.places(kernel.source, only), :] = 0.0
            kernel.layer.kernel.assign(weights)


def new_network(args: Any) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    import models
    from elastic_trainer.training.optimizers import make_optimizer

    model = models.build_from_options(args)
    optimizer = make_optimizer(args.optimizer, PAPER["learning_rate"], PAPER["weight_decay"], 100_000)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def pruned_network(args: Any, share: float, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[Measured, tuple[int, int]]:
    """The network without the weakest `share` of its channels, and how many of how many channels are left."""
    from elastic_trainer.pruning import prunetrain

    model, optimizer = new_network(args)
    data, settings = (
        SimpleNamespace(importance_batches=lambda index: [batch], batch_size=prunetrain.PROBE_IMAGES),
        SimpleNamespace(prune_ratio=0.2, prune_threshold=0.0),
    )
    scheme = prunetrain.PruneTrainScheme(model, data, settings)  # type: ignore[arg-type]
    weaken(model, share)
    model, optimizer = scheme.reconfigure(model, optimizer) or (model, optimizer)
    return Measured(model, optimizer, batch), scheme.channels()


def draw(title: str, rows: list[dict[str, Any]], stem: Path) -> None:
    """Step time and FLOPs over the full network's, by the share of channels removed."""
    from matplotlib.figure import Figure

    removed = [100 * row["removed_share"] for row in rows]
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="channels removed (%)", ylabel="over the full network's", title=title)
    axes.fill_between(
        removed,
        [row["step_ratio_quartiles"][0] for row in rows],
        [row["step_ratio_quartiles"][1] for row in rows],
        color="#0072b2",
        alpha=0.2,
        linewidth=0,
    )
    for key, label, style in (
        ("step_ratio", "step time (median, quartiles)", "o-"),
        ("flops_ratio", "FLOPs", "s--"),
        ("parameters_ratio", "parameters", "^:"),
    ):
        axes.plot(removed, [row[key] for row in rows], style, label=label, markersize=4)
    axes.set_ylim(0, None)
    axes.legend(fontsize="small")
    utils.save_figure(figure, stem)


def main() -> None:
    args = common.parse_benchmark(
        "benchmark_prunetrain.py",
        __doc__,
        rounds={"type": int, "default": 40, "help": "measured steps of each network (default: %(default)s)"},
    )
    utils.load_tensorflow()

    import tensorflow as tf

    if args.quick:
        args.rounds = min(args.rounds, 5)
    args.num_classes = args.num_classes or 10
    rng = np.random.default_rng(args.seed)
    images = rng.uniform(0, 255, (args.batch_size, args.input_size, args.input_size, 3)).astype(np.float32)
    batch = tf.constant(images), tf.constant(rng.integers(0, args.num_classes, args.batch_size), tf.int32)

    full = Measured(*new_network(args), batch)
    rows = []
    for share in QUICK_SHARES if args.quick else SHARES:
        smaller, (left, of) = pruned_network(args, share, batch)
        full_ms, step_ms, lasso_ms = measure_ms([full.step, smaller.step, smaller.lasso], args.rounds).T
        ratios = step_ms / full_ms  # of neighbouring steps
        rows.append(
            {
                "asked_share": share,
                "removed_share": 1 - left / of,
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
        )
        print(
            f"{rows[-1]['removed_share']:.0%} of the channels removed: step {rows[-1]['step_ms']:.1f} ms, "
            f"{rows[-1]['step_ratio']:.2f} of the full network's; FLOPs {rows[-1]['flops_ratio']:.2f}, parameters "
            f"{rows[-1]['parameters_ratio']:.2f}; the lasso takes {rows[-1]['lasso_ms']:.1f} ms",
            flush=True,
        )
        del smaller
        gc.collect()

    title, stem, network = common.measured_network(args, "prunetrain")
    draw(title, rows, stem)
    record = {
        **network,
        "rounds": args.rounds,
        "full_flops": full.flops,
        "full_parameters": full.parameters,
        "pruned": rows,
        "environment": environment(),
    }
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(record))


if __name__ == "__main__":
    utils.run_cli(main)
