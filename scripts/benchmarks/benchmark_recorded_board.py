#!/usr/bin/env python
"""How well do steps measured or counted here predict those of a board that the paper's authors recorded?

They trained ResNet50 on Pet on a Raspberry Pi 4B (`paper_figures.RECORDED_STEPS`). Their step of BN+Bias and of the
head over that of full training is compared with what is found without that board, for batches of 4 at 224 pixels, with
batch norm as a layer, as theirs:

    flops      floating-point operations of the step, counted
    trace      times of the operations of a full step here, added up by tensor (paper section 5)
    measured   the step itself here, all three alternating
    tx2        as `trace`, by a trace of a Jetson TX2, if one is given

The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_recorded_board.py --tx2 resnet50.xplane.pb
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import numpy as np
from common import Setting

sys.path.insert(0, str(common.ROOT / "scripts" / "figures"))

from paper_figures import RECORDED_STEPS

import models
from elastic_trainer.networks.graphs import needed_operations
from elastic_trainer.options import existing_file
from elastic_trainer.selection.schemes import trainable_mask
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.measuring import Training, idle_training, measure_steps
from elastic_trainer.timing.profiling import table_of_trace
from elastic_trainer.timing.trace import OperationTrace, read_trace, trace_step
from elastic_trainer.training.step import TrainStep

NETWORK = NetworkSettings("resnet50", 224, 37, 4, weights="none")
COMPARED = ("bn_plus_bias_training", "traditional_tl_training")
STEPS = ("full_training", *COMPARED)


def steps_of(training: Training) -> dict[str, TrainStep]:
    """By scheme: the steps of full training and of those `COMPARED`, with batch norm as a layer."""
    task, optimizer, batch = training
    masks = {scheme: trainable_mask(scheme, task.model, 1) for scheme in STEPS}
    return {scheme: TrainStep(task, optimizer, len(batch), mask, fold=False) for scheme, mask in masks.items()}


def flops_shares(steps: Mapping[str, TrainStep]) -> dict[str, float]:
    """Floating-point operations of each step over those of full training's."""
    found = {}
    for scheme, step in steps.items():
        flops, graph = count_flops(step.graph), step.graph
        executed = needed_operations([*graph.outputs, *graph.control_outputs])
        found[scheme] = sum(count for name, count in flops.items() if name in executed)
    return _over_full(found)


def trace_shares(training: Training, trace: OperationTrace) -> dict[str, float]:
    """Each step over full training's, by a trace of full training's step."""
    table, model = table_of_trace(training, {}, trace, "trace"), training.task.model
    return _over_full({scheme: table.predict_ms(trainable_mask(scheme, model, 1)) for scheme in STEPS})


def measured_shares(training: Training, steps: Mapping[str, TrainStep], seconds: float) -> tuple[dict[str, float], int]:
    """Median step times over full training's, and the number of rounds in which they alternated."""
    batch = training.batch
    calls = [partial(step, batch.inputs, batch.targets, batch.weights) for step in steps.values()]
    for call in calls:
        call()  # the first call compiles
    times = measure_steps(calls, seconds)
    return _over_full(dict(zip(steps, np.median(times, axis=0).tolist(), strict=True))), len(times)


def _over_full(found: Mapping[str, float]) -> dict[str, float]:
    return {scheme: found[scheme] / found["full_training"] for scheme in COMPARED}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    training = idle_training(models.build(NETWORK), NETWORK)
    steps = steps_of(training)
    full, batch = steps["full_training"], training.batch
    measured, rounds = measured_shares(training, steps, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = trace_step(partial(full, batch.inputs, batch.targets, batch.weights), args.traced_steps, Path(folder))
        traced = trace_shares(training, read_trace(path, args.traced_steps))
    found = {
        "recorded": _over_full({scheme: values[0] for scheme, values in RECORDED_STEPS.items()}),
        "flops": flops_shares(steps),
        "trace": traced,
        "measured": measured,
    }
    if args.tx2:
        found["tx2"] = trace_shares(training, read_trace(args.tx2))
    return {"step_over_full": found, "rounds": rounds}


def main() -> None:
    common.run_benchmark(
        __doc__,
        {
            "seconds": Setting(60.0, 10.0, "time for measuring steps"),
            "traced_steps": Setting(10, 3, "full steps that are traced"),
            "tx2": Setting(None, None, "trace of a Jetson TX2", {"type": existing_file, "metavar": "FILE"}),
        },
        measure,
        takes_network=False,
    )


if __name__ == "__main__":
    main()
