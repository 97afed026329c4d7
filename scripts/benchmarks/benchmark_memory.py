#!/usr/bin/env python
"""Predicted against measured memory of training, by depth (`engine.memory`).

Each selection trains three steps in a fresh process, and validates: measured is its largest resident memory above that
before training. Predicted is the memory of its depth, which is an upper bound for selections with gaps. The points go
to records/memory_depth.csv, in place of earlier ones of the same network and batch. The script prints one JSON object
as its last line: `covered_percent` is the share of the points that take at most what was predicted.

    python scripts/benchmarks/benchmark_memory.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import numpy as np
from common import Setting

import models
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import Images
from elastic_trainer.engine.memory import step_memory
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.profiling.measuring import HEAD, calibration_masks, idle_training
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.schemes import FixedScheme
from elastic_trainer.settings import Settings
from elastic_trainer.settings.network_names import model_label
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_csv
from elastic_trainer.system.machine import has_gpu
from elastic_trainer.system.memory import peak_memory_mb, resident_memory_mb
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.fit import depth_of

PEAK_RESET = Path("/proc/self/clear_refs")  # writing 5 sets the peak of memory to what the process takes now
STEPS = 3  # after which a process takes hardly more
# Depth and density: with the head alone and all tensors, twenty selections. Those of density 1 are upper parts.
CALIBRATION = [HEAD, *product((0.1, 0.2, 0.35, 0.5, 0.7, 0.99), (0.25, 0.5, 1.0))]
SETTINGS = {"selections": Setting(len(CALIBRATION) + 1, 2, "measured selections")}
POINTS = Path(__file__).with_name("records") / "memory_depth.csv"
COLUMNS = ("network", "batch", "depth", "tensors", "measured_mb", "predicted_mb")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks of some selections, and their predictions."""
    if resident_memory_mb() is None or not os.access(PEAK_RESET, os.W_OK) or has_gpu():
        raise UserError("the system does not report how much memory a process takes")
    network, rows = args.network, args.network.batch_size
    task, optimizer, _ = idle_training(models.build(network), network)
    full = TrainStep(task, optimizer, rows)
    attribution = attribute(full, task.model.trainable_variables)
    needed_mb = step_memory(full, attribution.places, attribution.positions).needed_mb(rows)
    masks = calibration_masks(attribution.positions, attribution.kernels, head_mask(task.model), CALIBRATION)
    chosen = [masks[k] for k in np.linspace(0, len(masks) - 1, min(args.selections, len(masks))).round().astype(int)]
    depths = [depth_of(mask[attribution.positions]) for mask in chosen]
    predicted = np.array([needed_mb[depth - 1] for depth in depths])
    measured = np.array([_peak_of_new_process(network, mask) for mask in chosen])
    label = f"{model_label(network.model_name, network.alpha)} {network.input_size}"
    counts = (int(mask.sum()) for mask in chosen)
    points = zip(depths, counts, measured.round(1).tolist(), predicted.round(1).tolist(), strict=True)
    _keep([(label, str(rows), *map(str, point)) for point in points])
    error = float(np.median(np.abs(predicted / measured - 1)))
    return {"covered_percent": 100 * float((measured <= predicted).mean()), "median_error_percent": 100 * error}


def _keep(points: list[tuple[str, ...]]) -> None:
    known = list[tuple[str, ...]]()
    if POINTS.exists():
        with POINTS.open(encoding="utf-8", newline="") as file:
            known = [tuple(row) for row in csv.reader(file)][1:]
    write_csv(POINTS, COLUMNS, [*(row for row in known if row[:2] != points[0][:2]), *points])


def _peak_of_new_process(network: Settings, mask: np.ndarray) -> float:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_peak, network, mask).result()


def _peak(network: Settings, mask: np.ndarray) -> float:
    """MB that a run which trains `mask` takes at most above what this process took before."""
    with contextlib.suppress(OSError):  # the system ends this process rather than the one that waits for it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    size, count, classes = network.input_size, STEPS * network.batch_size, network.num_classes or 1
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    noise = Images(images, np.arange(count, dtype=np.int32) % classes)
    data = ImageData("noise", [str(k) for k in range(classes)], noise, noise, network.batch_size)
    settings = replace(network, num_epochs=1, learning_rate=1e-4, feature_cache="off", memory=1e6)  # as within a limit
    trainer = Trainer(models.build(network), data, FixedScheme(mask), settings)
    PEAK_RESET.write_text("5", encoding="ascii")
    trainer.run()
    return peak_memory_mb() - (trainer.training.memory.start_mb or 0.0)


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
