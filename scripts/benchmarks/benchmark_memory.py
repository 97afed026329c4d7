#!/usr/bin/env python
"""Predicted against measured memory of training steps (`engine.step_memory`).

Each selection trains three steps in a fresh process: measured is its largest resident memory above that before the step
was traced, since TensorFlow keeps what it took. Predicted is by the traced step. A second prediction is by the costs of
tensors that selections are solved with: sums, which are above the step's prediction where few tensors train far down.
The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_memory.py --model_name resnet50 --input_size 224 --batch_size 32
"""

from __future__ import annotations

import argparse
import contextlib
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import numpy as np
from common import Setting, errors

import models
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.step_memory import beside_steps_mb, forward_memory, step_memory
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import can_reset_peak, has_gpu, in_own_process, reset_peak
from elastic_trainer.system.memory import peak_memory_mb, resident_memory_mb
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.measuring import HEAD, calibration_masks, idle_training
from elastic_trainer.timing.memory_costs import memory_costs

STEPS = 3  # after which a process takes hardly more
# Depth and density: with the head alone and all tensors, twenty selections. Those of density 1 are upper parts.
CALIBRATION = [HEAD, *product((0.1, 0.2, 0.35, 0.5, 0.7, 0.99), (0.25, 0.5, 1.0))]
SETTINGS = {"selections": Setting(len(CALIBRATION) + 1, 2, "measured selections")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks of some selections, and their predictions."""
    if resident_memory_mb() is None or not can_reset_peak() or has_gpu():
        raise UserError("the system does not report how much memory a process takes")
    network = args.network
    task, optimizer, _ = idle_training(models.build(network), network)
    model = task.model
    full = TrainStep(task, optimizer, network.batch_size)
    attribution = attribute(full, model.trainable_variables)
    costs = memory_costs(full, attribution)
    run_mb = beside_steps_mb(forward_memory(full.graph, full.loss), full.inputs)  # no part of a step
    masks = calibration_masks(attribution.positions, attribution.kernels, head_mask(model), CALIBRATION)
    chosen = [masks[k] for k in np.linspace(0, len(masks) - 1, min(args.selections, len(masks))).round().astype(int)]
    points = []
    for mask in chosen:
        predicted_mb, measured_mb = in_own_process(_send_peak, network, mask)
        by_costs_mb = costs.predict(mask[attribution.positions]) - run_mb
        about = {"tensors": int(mask.sum()), "measured_mb": measured_mb, "predicted_mb": predicted_mb}
        points.append({**about, "predicted_by_costs_mb": by_costs_mb})
    predicted, measured = (np.array([one[key] for one in points]) for key in ("predicted_mb", "measured_mb"))
    return {"selections": points, **errors(predicted, measured)}


def _send_peak(sender: Connection, network: Settings, mask: np.ndarray) -> None:
    """Send predicted and measured MB of steps that train `mask`, above what this process took before their trace."""
    with contextlib.suppress(OSError):  # the system ends this process rather than the one that waits for it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    task, optimizer, batch = idle_training(models.build(network), network)
    values = batch.inputs, batch.targets, batch.weights
    before_mb = resident_memory_mb() or 0.0
    reset_peak()
    step = TrainStep(task, optimizer, len(batch), mask)
    for _ in range(STEPS):
        step(*values)
    measured_mb = (peak_memory_mb() or 0.0) - before_mb
    sender.send((step_memory(step.graph, step.variables).megabytes, measured_mb))


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
