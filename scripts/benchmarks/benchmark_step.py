#!/usr/bin/env python
"""What does a training step cost? The same selections with folded batch norm and from cached features, and Keras' step.

The script measures a timing table, selects tensors for several rho by the importance on one batch of digits, and adds
the upper parts of the network. It compiles the step of full training and of each selection in up to four variants:

    unfolded   frozen batch norm runs as a layer
    folded     it is folded into the layer before it, as main.py does
    prefix     the layers below all trained tensors run as inference, then the rest from their result
    cached     the rest alone, from features that are cached in memory

Keras' step is that of `model.fit`, with the same frozen batch norm. All steps alternate in one process, at learning
rate 0, so no weight changes. The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_step.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import keras
import numpy as np
from common import Setting, few_digits
from tqdm import tqdm

import models
import profiler
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.engine.features import FeatureCache
from elastic_trainer.engine.optimizers import idle_optimizer, make_optimizer
from elastic_trainer.engine.prefix import split_step
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.select import select_tensors
from elastic_trainer.settings import Settings
from elastic_trainer.timing.measuring import MEASURING_SECONDS, measure_steps
from elastic_trainer.timing.table import TimingTable

RHOS, QUICK_RHOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7), (0.5,)
UPPER_SHARES, QUICK_SHARES = (0.8, 0.6, 0.4, 0.2), (0.2,)


def variants_of(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, mask: np.ndarray, data: ImageData
) -> dict[str, Callable[[], Any]]:
    """Calls that run the step of one selection, by variant; a variant that would be the same as another is left out.

    Args:
        model: the network.
        optimizer: built for all of its trainable variables.
        mask: bool [N] over `model.trainable_variables`.
        data: images for exactly one batch.
    """
    [batch] = data.train(0)
    images, labels = batch.inputs, batch.targets
    make = partial(TrainStep, ImageClassification(model), optimizer, data.batch_size, mask)
    step = make()
    runs: dict[str, Callable[[], Any]] = {}
    if step.folded_pairs:
        runs["unfolded"] = partial(make(fold=False), images, labels)
    runs["folded"] = partial(step, images, labels)
    split = split_step(step)
    if split is not None:
        runs["prefix"] = lambda: split(split.prefix(images), labels)
        features = FeatureCache(data)
        features.adopt(step)
        if features.split is not None:  # else an image's features depend on its batch
            features.prepare(batch)
            runs["cached"] = lambda: split(features.read(batch.order), labels)
    return runs


def keras_step(model: keras.Model, network: Settings, data: ImageData) -> Callable[[], Any]:
    """A call that runs the step of `model.fit`: it trains everything, with frozen batch norm as a layer."""
    optimizers = {"adam": keras.optimizers.Adam, "sgd": partial(keras.optimizers.SGD, momentum=0.9)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[network.optimizer](learning_rate=0.0), loss)
    [batch] = data.train(0)
    return partial(model.train_on_batch, batch.inputs, batch.targets)


def elastic_masks(
    model: keras.Model, data: ImageData, table: TimingTable, rhos: Sequence[float]
) -> dict[str, np.ndarray]:
    """What is selected by the importance on one batch: bool [N] for each feasible one of `rhos`.

    Steps without cached features decide. A rho that is too small for them allows steps from features that are cached.
    """
    optimizer = make_optimizer("sgd", Settings.learning_rate, Settings.weight_decay, 100)
    optimizer.build(model.trainable_variables)
    evaluator = ImportanceEvaluator(ImageClassification(model), data.batch_size)
    importance = evaluator.importance(optimizer, data.importance_batches(0))
    head, masks = head_mask(model), {}
    for rho in rhos:
        feasible = [misses for misses in (1.0, 0.0) if rho >= smallest_rho(table, head, misses)]
        if feasible:
            masks[f"rho {rho:g}"] = select_tensors(table, importance, head, rho, misses=feasible[0])
    return masks


def upper_masks(head: np.ndarray, positions: np.ndarray, shares: Sequence[float]) -> dict[str, np.ndarray]:
    """The tensors nearest the output: bool [N] for each share of all tensors, and for the head alone.

    `positions`: int [N], the tensors from the output on (`TimingTable.positions`).
    """
    masks = {}
    for share in shares:
        mask = head.copy()
        mask[positions[: int(share * len(positions))]] = True
        masks[f"upper {100 * share:.0f} %"] = mask
    return {**masks, "head": head}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of all steps, and their ratios."""
    network = args.network
    model, data = models.build(network), few_digits(network, 1)
    head, optimizer = head_mask(model), idle_optimizer(model, network.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder), seconds=3 if args.quick else MEASURING_SECONDS)
    masks = {
        "full": all_mask(model),
        **elastic_masks(model, data, table, QUICK_RHOS if args.quick else RHOS),
        **upper_masks(head, table.positions, QUICK_SHARES if args.quick else UPPER_SHARES),
    }
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, mask in tqdm(masks.items(), desc="compiling steps", unit="selection"):
        runs |= {(name, variant): run for variant, run in variants_of(model, optimizer, mask, data).items()}
    runs["full", "keras"] = keras_step(model, network, data)

    times = measure_steps([*runs.values()], args.seconds)
    step_ms: dict[str, dict[str, float]] = {name: {} for name in masks}
    for (name, variant), median_ms in zip(runs, np.median(times, axis=0).tolist(), strict=True):
        step_ms[name][variant] = median_ms
    return {
        "optimizer": network.optimizer,
        "rounds": len(times),
        "smallest_rho": {
            way: smallest_rho(table, head, misses) for way, misses in (("computed", 1.0), ("cached", 0.0))
        },
        "step_ms": step_ms,
        "over_unfolded": {
            name: {variant: each / ms.get("unfolded", ms["folded"]) for variant, each in ms.items()}
            for name, ms in step_ms.items()
        },
        "full_over_keras": step_ms["full"]["folded"] / step_ms["full"]["keras"],
        "trained_tensors": {name: int(mask.sum()) for name, mask in masks.items()},
    }


SETTINGS = {"seconds": Setting(120.0, 3.0, "time for measuring steps")}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
