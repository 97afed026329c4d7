#!/usr/bin/env python
"""What does --mixed_precision gain? The same network in float32 and in half precision; their steps alternate.

The script times a step of full training, a step of the head alone, and the forward pass in each precision. It trains
both networks a few steps on the handwritten digits, to compare the losses. It draws the step times and prints one JSON
object as its last line.

    python scripts/benchmarks/benchmark_mixed_precision.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np

import utils
from elastic_trainer.files import save_figure
from elastic_trainer.machine import environment, load_tensorflow
from elastic_trainer.settings import PAPER, NetworkSettings

MEASURED = ("full step", "step of the head", "forward pass")


def runs_of(network: NetworkSettings) -> list[Any]:
    """The compiled full step, step of the head, and forward pass of the network, on one batch."""
    import models
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.timing.measuring import compile_steps, idle_training
    from elastic_trainer.training.step import forward_pass

    task, optimizer, batch = idle_training(models.build(network), network)
    steps = [run for _, run in compile_steps(task, optimizer, batch, [None, head_mask(task.model)])]
    return [*steps, partial(forward_pass(task, network.batch_size), *steps[0].args)]


def losses(network: NetworkSettings, steps: int) -> list[float]:
    """Losses of `steps` steps of full training on digits."""
    import data
    import models
    from elastic_trainer.task import ImageClassification
    from elastic_trainer.training.optimizers import make_optimizer
    from elastic_trainer.training.step import TrainStep

    model = models.build(network)
    optimizer = make_optimizer(network.optimizer, PAPER["learning_rate"], PAPER["weight_decay"], steps)
    optimizer.build(model.trainable_variables)
    step = TrainStep(ImageClassification(model), optimizer, network.batch_size)
    digits = data.load("digits", network.input_size, network.batch_size, network.seed)
    return [step(batch.inputs, batch.targets)[0] for batch in digits.train(0, count=steps)]


def draw(title: str, step_ms: dict[str, np.ndarray], stem: Path) -> None:
    """Bars of the median times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.5), layout="constrained")
    axes = figure.add_subplot(ylabel="ms", title=title)
    for offset, (label, values), colour in zip((-0.2, 0.2), step_ms.items(), ("#0072b2", "#e69f00"), strict=True):
        axes.bar(np.arange(len(MEASURED)) + offset, values, 0.4, label=label, color=colour)
    axes.set_xticks(np.arange(len(MEASURED)), MEASURED)
    axes.legend(fontsize="small")
    save_figure(figure, stem)


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_mixed_precision.py",
        __doc__,
        seconds={"type": float, "default": 60, "help": "time for measuring (default: %(default)s)"},
        steps={"type": int, "default": 20, "help": "training steps to compare losses over (default: %(default)s)"},
    )
    load_tensorflow()

    import models
    from elastic_trainer.timing.measuring import measure_steps

    if args.quick:
        args.seconds, args.steps = 3, 3
    policy = models.mixed_precision_policy()
    runs, curves = [], []
    for mixed in (False, True):
        in_precision = replace(network, mixed_precision=mixed)
        runs += runs_of(in_precision)
        curves.append(losses(in_precision, args.steps))
    times = measure_steps(runs, args.seconds)
    single_ms, mixed_ms = np.median(times, axis=0).reshape(2, len(MEASURED))
    title, stem, network_record = common.measured_network(network, "mixed_precision", args.output)
    draw(title, {"float32": single_ms, policy: mixed_ms}, stem)
    names = [what.replace(" ", "_") for what in MEASURED]
    record = {
        **network_record,
        "policy": policy,
        "rounds": len(times),
        "float32_ms": dict(zip(names, single_ms.tolist(), strict=True)),
        "mixed_ms": dict(zip(names, mixed_ms.tolist(), strict=True)),
        "speedup": dict(zip(names, (single_ms / mixed_ms).tolist(), strict=True)),
        "losses": {"float32": curves[0], policy: curves[1]},
        "environment": environment(),
    }
    common.print_result(record, stem)


if __name__ == "__main__":
    utils.run_cli(main)
