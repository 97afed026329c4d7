#!/usr/bin/env python
"""Predicted against measured memory of training steps (`memory.step_memory`).

Each selection trains three steps in a fresh process: measured is its largest resident memory above that before the step
was traced. Predicted is by the traced step, then corrected by three measured selections, as profiler.py does. A third
prediction is by the costs of tensors that selections are solved with, uncorrected: sums, which are above the step's
prediction where few tensors train far down. The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_memory.py --model_name resnet50 --input_size 224 --batch_size 32
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any

import common  # first: it sets the import path
import numpy as np
from common import Setting, errors

from elastic_trainer.errors import UserError
from elastic_trainer.memory.costs import memory_costs
from elastic_trainer.memory.step_memory import beside_steps_mb, forward_memory
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.measuring import calibration_masks
from elastic_trainer.timing.memory_peaks import can_measure, measure_peaks, measure_selections
from elastic_trainer.training.step import TrainStep
from profiler import idle_training_of

# Depth and density: with the head alone and all tensors, twenty selections. Those of density 1 are upper parts.
CALIBRATION = [*product((0.1, 0.2, 0.35, 0.5, 0.7, 0.99), (0.25, 0.5, 1.0))]
SETTINGS = {"selections": Setting(len(CALIBRATION) + 2, 2, "measured selections")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks of some selections, and their predictions."""
    if not can_measure():
        raise UserError("the system does not report how much memory a process takes")
    network = args.network
    task, optimizer, _ = idle_training_of(network)
    model = task.model
    head, here = head_mask(model), partial(idle_training_of, network)
    peaks = measure_peaks(here, head)
    full = TrainStep(task, optimizer, network.batch_size)
    attribution = attribute(full, model.trainable_variables)
    costs = memory_costs(full, attribution)
    run_mb = beside_steps_mb(forward_memory(full.graph, full.loss), full.inputs)  # no part of a step
    masks = calibration_masks(attribution.positions, attribution.kernels, head, CALIBRATION)
    chosen = [masks[k] for k in np.linspace(0, len(masks) - 1, min(args.selections, len(masks))).round().astype(int)]
    points: list[dict[str, Any]] = []
    predicted, measured = np.array(measure_selections(here, chosen)).T
    for mask, predicted_mb, measured_mb in zip(chosen, predicted, measured, strict=True):
        points.append(
            {
                "tensors": int(mask.sum()),
                "measured_mb": measured_mb,
                "predicted_mb": predicted_mb,
                "corrected_mb": peaks.corrected_mb(predicted_mb),
                "predicted_by_costs_mb": costs.predict(mask[attribution.positions]) - run_mb,
            }
        )
    return {
        "peaks": peaks._asdict(),
        "selections": points,
        **errors(predicted, measured),
        **errors(np.array([point["corrected_mb"] for point in points]), measured, "corrected_"),
    }


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
