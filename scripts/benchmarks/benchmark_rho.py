#!/usr/bin/env python
"""Is rho kept? Step time of short elastic runs over that of full training, whose steps alternate with theirs.

Each elastic run uses the timing table (with `--estimated 1`: none), and corrects its budget while it trains, as main.py
does. Between any two of its steps, a second network takes a step of full training, so that whatever disturbs the
machine disturbs both. Data: handwritten digits at the given input size, a few steps an epoch. Three epochs lie between
two selections, so that features are used again; a step includes its share of what making them took. The batch norms of
a network with random weights get the statistics of these digits. Every run starts from the same weights. Both medians
and sums are compared: a selection may use what earlier ones left of their budget, so its steps may take more than rho,
but the entire run should not. The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_rho.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import keras
import numpy as np
from common import Setting, few_digits

import models
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.profiling.measuring import MEASURING_SECONDS, idle_training
from elastic_trainer.profiling.profile import profile_task
from elastic_trainer.runs.listener import Listener
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.settings import Settings
from elastic_trainer.settings.network_names import is_custom_model
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.wall_time import measure_ms

RHOS = (0.35, 0.4, 0.5, 0.6, 0.7)  # the paper's
EPOCHS = 3  # from one selection to the next, so that features are used again


def standardize(model: keras.Model, images: Any) -> None:
    """Give each batch norm the statistics of `images` [batch, height, width, 3].

    With those of a new network, 0 and 1, activations and gradients fade from layer to layer. Then half of the tensors
    have no importance, and the most important selection may leave a tenth of the step unused.
    """
    layers = [layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.__class__, layer.momentum = keras.layers.BatchNormalization, 0.0
    model(images, training=True)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    freeze_batch_norm(model)


class Alternating(Listener):
    """Calls `full` before each step of a run.

    `times` gets, of each step, ms of the run's own step (NaN if it was not timed), of making its features, and of
    `full`.
    """

    def __init__(self, full: Callable[[], object]) -> None:
        self.full, self.times = full, list[tuple[float, ...]]()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.full_ms = float(measure_ms([self.full], 1)[0, 0])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        result = self.trainer.history.results[-1]
        own_ms = np.nan if result.step_ms is None else result.step_ms
        self.times.append((own_ms, result.caching_ms, self.full_ms))

    def by_selection(self) -> list[np.ndarray]:
        """`times` of each selection, [steps, 3]."""
        starts = [selection.step for selection in self.trainer.history.selections[1:]]
        return np.split(np.array(self.times), starts)


def run(
    model: keras.Model,
    data: ImageData,
    settings: Settings,
    table: TimingTable | None,
    full: Callable[[], object],
) -> dict[str, Any]:
    """One elastic run beside `full`, which runs a step of full training: ratios by medians and by sums, and so on.

    "predicted" is below the requested rho if no further tensor fits. "by_slowdown" is the run's
    own estimate of its rho.
    """
    listener = Alternating(full)
    trainer = Trainer(model, data, "elastic_training", settings, [listener], table=table)
    results = trainer.run()
    assert results is not None, "it ran to its end"
    selections, parts = trainer.history.selections, []
    for times in listener.by_selection():
        timed = times[~np.isnan(times[:, 0])]
        parts.append(timed[:, (0, 2)] + [times[:, 1].mean(), 0])
    pairs = np.concatenate(parts)
    elastic, plain = np.median(pairs, axis=0)
    elastic_sum, plain_sum = pairs.sum(axis=0)
    return {
        "measured": elastic / plain,
        "whole_run": elastic_sum / plain_sum,
        "by_slowdown": results["rho_measured"],
        "predicted": float(np.median([one.predicted_share for one in selections])),
        "elastic_step_ms": elastic,
        "full_step_ms": plain,
        "pairs": len(pairs),
    }


def prepared(network: Settings, steps: int) -> tuple[keras.Model, ImageData, Callable[[], object]]:
    """The network, digits for `steps` steps between two selections, and a step of full training of another network."""
    model, data = models.build(network), few_digits(network, steps // EPOCHS)
    batch = next(iter(data.train(0)))
    if network.weights == "none" and not is_custom_model(network.model_name):
        batches = data.importance_batches(0, 32 // network.batch_size or 1)
        standardize(model, np.concatenate([batch.inputs for batch in batches]))
    other = models.build(network)  # a separate network, which trains in full
    optimizer = make_optimizer(network.optimizer, Settings.learning_rate, Settings.weight_decay, 100_000)
    optimizer.build(other.trainable_variables)
    step = TrainStep(ImageClassification(other), optimizer, network.batch_size)
    return model, data, partial(step, batch.inputs, batch.targets)


def profiled_table(model: keras.Model, network: Settings, seconds: float = MEASURING_SECONDS) -> TimingTable:
    with tempfile.TemporaryDirectory() as folder:
        return profile_task(idle_training(model, network), Path(folder), seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The timing table, and of each feasible rho its runs, one a round."""
    network = args.network
    model, data, full = prepared(network, args.steps)
    table = None if args.estimated else profiled_table(model, network)
    weights = model.get_weights()  # each run starts from them: after many, a network with random weights may diverge
    settings = Settings(
        optimizer=network.optimizer,
        num_epochs=EPOCHS * args.intervals,
        interval=EPOCHS,
        feature_cache="float32",
    )
    smallest = 0.0 if table is None else smallest_rho(table, head_mask(model), misses=1 / EPOCHS)
    runs: dict[float, list[dict[str, Any]]] = {rho: [] for rho in RHOS if rho >= smallest}
    for rho in args.rounds * [*runs]:
        model.set_weights(weights)
        runs[rho].append(run(model, data, replace(settings, rho=rho), table, full))
        print(f"rho {rho:g}: median step {runs[rho][-1]['measured']:.3f} of full training's", flush=True)
    records: list[dict[str, Any]] = [
        {"asked": rho, **{key: float(np.median([one[key] for one in each])) for key in each[0]}, "runs": each}
        for rho, each in runs.items()
    ]
    kept = {key: all(-0.03 <= one[key] - one["asked"] <= 0.02 for one in records) for key in ("measured", "whole_run")}
    return {
        "rounds": args.rounds,
        "selections_a_run": args.intervals,
        "steps_between_selections": args.steps,
        "rho": records,
        "kept": kept,
        "profiled_full_step_ms": None if table is None else table.full_step_ms,
    }


SETTINGS = {
    "rounds": Setting(2, 1, "runs for each rho"),
    "steps": Setting(30, 12, "steps between two selections"),
    "intervals": Setting(4, 2, "selections a run"),
    "estimated": Setting(0, 0, "1: without a timing table"),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
