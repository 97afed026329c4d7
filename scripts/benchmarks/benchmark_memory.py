#!/usr/bin/env python
"""Predicted against measured memory of training steps (`memory.step_memory`).

Each selection trains three steps in a fresh process: measured is its largest resident memory above that before the step
was traced. Predicted is by the traced step, and by the costs of tensors that selections are solved with. Those are
sums, and above the step's prediction where few tensors train far down. The script prints one JSON object as its last
line.

    python scripts/benchmarks/benchmark_memory.py --model_name resnet50 --input_size 224 --batch_size 32
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import numpy as np
from common import Setting
from tqdm import tqdm

import utils
from elastic_trainer.errors import UserError
from elastic_trainer.machine import load_tensorflow, peak_memory_mb, resident_memory_mb
from elastic_trainer.settings import NetworkSettings

STEPS = 3
# Depth and density: with the head alone and all tensors, twenty selections. Those of density 1 are upper parts.
CALIBRATION = [*product((0.1, 0.2, 0.35, 0.5, 0.7, 0.99), (0.25, 0.5, 1.0))]
SETTINGS = {"selections": Setting(len(CALIBRATION) + 2, 2, "measured selections")}


def measured_mb(network: NetworkSettings, mask: list[bool]) -> float:
    """Of steps that train `mask`; runs in a process of its own."""
    load_tensorflow()
    import models
    from elastic_trainer.timing.measuring import idle_training
    from elastic_trainer.training.step import TrainStep

    task, optimizer, batch = idle_training(models.build(network), network)
    values = batch.inputs, batch.targets, batch.weights
    before = resident_memory_mb()
    if before is None:
        raise UserError("the system does not report how much memory a process takes")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    step = TrainStep(task, optimizer, network.batch_size, np.array(mask))
    for _ in range(STEPS):
        step(*values)
    return (peak_memory_mb() or before) - before


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks of some selections, and their predictions."""
    import models
    from elastic_trainer.memory.costs import memory_costs
    from elastic_trainer.memory.step_memory import beside_steps_mb, forward_memory, step_memory
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.timing.attribution import attribute
    from elastic_trainer.timing.measuring import calibration_masks, idle_training
    from elastic_trainer.training.step import TrainStep

    network = args.network
    model = models.build(network)
    task, optimizer, _ = idle_training(model, network)
    full = TrainStep(task, optimizer, network.batch_size)
    attribution = attribute(full, model.trainable_variables)
    costs = memory_costs(full, attribution)
    run_mb = beside_steps_mb(forward_memory(full.graph, full.loss), full.inputs)  # no part of a step
    masks = calibration_masks(attribution.positions, attribution.kernels, head_mask(model), CALIBRATION)
    chosen = [masks[k] for k in np.linspace(0, len(masks) - 1, min(args.selections, len(masks))).round().astype(int)]
    points = []
    for mask in tqdm(chosen, desc="measuring selections", unit="process"):
        step = TrainStep(task, optimizer, network.batch_size, mask)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            peak = pool.submit(measured_mb, network, mask.tolist()).result()
        points.append(
            {
                "tensors": int(mask.sum()),
                "measured_mb": peak,
                "predicted_mb": step_memory(step.graph, step.variables).megabytes,
                "predicted_by_costs_mb": costs.predict(mask[attribution.positions]) - run_mb,
            }
        )
    errors = 100 * np.array([point["predicted_mb"] / point["measured_mb"] - 1 for point in points])
    return {
        "selections": points,
        "median_error_percent": float(np.median(np.abs(errors))),
        "p95_error_percent": float(np.percentile(np.abs(errors), 95)),
        "bias_percent": float(np.mean(errors)),
    }


def main() -> None:
    common.run_benchmark("benchmark_memory", __doc__, SETTINGS, measure)


if __name__ == "__main__":
    utils.run_cli(main)
