#!/usr/bin/env python
"""What does --mixed_precision gain? The same network in float32 and in half precision; their steps alternate.

The script times a step of full training, a step of the head alone, and the forward pass in each precision. It trains
both networks a few steps on the handwritten digits, to compare the losses. It prints one JSON object as its last
line.

    python scripts/benchmarks/benchmark_mixed_precision.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import common
import numpy as np
from common import Setting

import utils
from elastic_trainer.settings import NetworkSettings

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

    step = common.full_training_step(network, steps)
    digits = data.load("digits", network.input_size, network.batch_size, network.seed)
    return [step(batch.inputs, batch.targets)[0] for batch in digits.train(0, count=steps)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Median times in each precision in ms, their ratios, and the losses."""
    import models
    from elastic_trainer.timing.measuring import measure_steps

    networks = [replace(args.network, mixed_precision=mixed) for mixed in (False, True)]
    runs = [run for network in networks for run in runs_of(network)]
    curves = [losses(network, args.steps) for network in networks]
    times = measure_steps(runs, args.seconds)
    single_ms, mixed_ms = np.median(times, axis=0).reshape(2, len(MEASURED))
    names, policy = [what.replace(" ", "_") for what in MEASURED], models.mixed_precision_policy()
    return {
        "policy": policy,
        "rounds": len(times),
        "float32_ms": dict(zip(names, single_ms.tolist(), strict=True)),
        "mixed_ms": dict(zip(names, mixed_ms.tolist(), strict=True)),
        "speedup": dict(zip(names, (single_ms / mixed_ms).tolist(), strict=True)),
        "losses": {"float32": curves[0], policy: curves[1]},
    }


SETTINGS = {
    "seconds": Setting(60.0, 3.0, "time for measuring"),
    "steps": Setting(20, 3, "training steps to compare losses over"),
}


if __name__ == "__main__":
    utils.run_cli(lambda: common.run_benchmark("benchmark_mixed_precision", __doc__, SETTINGS, measure))
