#!/usr/bin/env python
"""Is rho kept? Step time of short elastic runs over that of full training, whose steps alternate with theirs.

Each elastic run uses the timing table and corrects its budget while it trains, as main.py does. Between any two of its
steps, a second network takes a step of full training, so that whatever disturbs the machine disturbs both. Data:
handwritten digits at the given input size, a few steps an epoch. Three epochs lie between two selections, so that
features are used again; a step includes its share of what making them took. The batch norms of a network with random
weights get the statistics of these digits. Every run starts from the same weights. Pairs of steps from which other
virtual machines took time are left out if enough others remain. Both medians and sums are compared: a selection may use
what earlier ones left of their budget, so its steps may take more than rho, but the entire run should not. The script
prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_rho.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import keras
import numpy as np
from common import Setting

import data
import models
import profiler
from elastic_trainer import Trainer
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.machine import is_undisturbed, stolen_seconds
from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.listener import Listener
from elastic_trainer.selection.budget import LATEST_STEPS, smallest_rho
from elastic_trainer.settings import PAPER, DataSettings, NetworkSettings, Settings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.wall_time import measure_ms
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.step import TrainStep

RHOS = (0.35, 0.4, 0.5, 0.6, 0.7)  # the paper's
EPOCHS = 3  # from one selection to the next, so that features are used again
MIN_UNDISTURBED = 12  # pairs of steps; with fewer, disturbed ones are included
BUSY = (0.0, 0.75)  # from which to which share of a run's steps --busy processes compete
MEDIANS = ("measured", "whole_run", "by_slowdown")  # of the runs of one rho; of the rest, the record has each run's


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


# --- ratios, also of benchmark_fit.py ---------------------------------------------------------------------------------


def step_ratios(times: np.ndarray) -> dict[str, Any]:
    """Medians in ms, over how many pairs of steps, and the ratios by medians and by sums.

    Args:
        times: [steps, 3]: of the run's step and of full training's in ms, and whether both were undisturbed. Steps that
            were not timed, NaN, are left out, and disturbed pairs unless fewer than `MIN_UNDISTURBED` others remain.
    """
    pairs = times[~np.isnan(times[:, 0])]
    quiet = pairs[pairs[:, 2] == 1]
    elastic_ms, full_ms, _ = (quiet if len(quiet) >= MIN_UNDISTURBED else pairs).T
    return {
        "measured": float(np.median(elastic_ms) / np.median(full_ms)),
        "whole_run": float(elastic_ms.sum() / full_ms.sum()),
        "elastic_step_ms": float(np.median(elastic_ms)),
        "full_step_ms": float(np.median(full_ms)),
        "pairs": len(elastic_ms),
        "quiet_pairs": len(quiet),
    }


def run_rounds(
    rounds: int, rhos: Sequence[float], run_one: Callable[[float], dict[str, Any]], name: str = ""
) -> list[dict[str, Any]]:
    """What the JSON holds of each rho, whose runs are one a round. A rho that is below the smallest one is left out."""
    runs: dict[float, list[dict[str, Any]]] = {}
    for rho in rounds * [*rhos]:
        try:
            one = run_one(rho)
        except UserError as error:
            print(f"{name}{error}")
            continue
        runs.setdefault(rho, []).append(one)
        measured = f"median step {one['measured']:.3f} of full training's, entire run {one['whole_run']:.3f}"
        print(f"{name}rho {rho:g}: {measured}", flush=True)
    return [_rho_record(rho, of_rho) for rho, of_rho in runs.items()]


def _rho_record(rho: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    each = {key: [one[key] for one in runs] for key in runs[0]}
    predicted = each["predicted_by_selection"]
    return {
        "asked": rho,
        **{key: float(np.median(values)) if key in MEDIANS else values for key, values in each.items()},
        "predicted": float(np.median(predicted)),
        "predicted_whole_run": float(np.mean(predicted)),
    }


def is_kept(records: Sequence[dict[str, Any]], key: str = "measured") -> bool:
    """Whether each measured ratio is at most 0.02 above its rho and at most 0.03 below it."""
    return all(-0.03 <= one[key] - one["asked"] <= 0.02 for one in records)


# --- short runs -------------------------------------------------------------------------------------------------------


def few_digits(network: NetworkSettings, steps: int) -> ImageData:
    """Digits, cut to `steps` steps an epoch and one batch for the test."""
    digits = data.load(DataSettings("digits"), network.input_size, network.batch_size, network.seed)
    train, test = (
        split._replace(images=split.images[:count], labels=split.labels[:count])
        for split, count in ((digits._train, steps * network.batch_size), (digits._test, network.batch_size))
    )
    return ImageData("digits", digits.class_names, train, test, network.batch_size, network.seed)


@contextlib.contextmanager
def alternating(full: Callable[[], object], busy_processes: int) -> Iterator[tuple[Any, list[tuple[float, ...]]]]:
    """A listener that calls `full` before each step of a run, and the times of each step, which it fills.

    Times are in ms: the run's own step (NaN if it was not timed), making its features, and `full`; then whether other
    virtual machines took no time from them. So many processes compete during `BUSY`.
    """
    times: list[tuple[float, ...]] = []
    children: list[subprocess.Popen[bytes]] = []

    def end_busy() -> None:
        for child in children:
            child.kill()
            child.wait()
        children.clear()

    class Alternating(Listener):
        def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
            first, end = (share * self.trainer.schedule.total_steps for share in BUSY)
            if not first <= step < end:
                end_busy()
            elif not children:
                words = [sys.executable, "-c", "while True: pass"]
                children.extend(subprocess.Popen(words) for _ in range(busy_processes))

        def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            self.on_selection_begin(self.trainer.history.step)
            self.start = time.perf_counter(), stolen_seconds()
            self.full_ms = float(measure_ms([full], 1)[0, 0])

        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            start, stolen = self.start
            is_quiet = is_undisturbed(time.perf_counter() - start, stolen_seconds() - stolen)
            result = self.trainer.history.results[-1]
            own_ms = np.nan if result.step_ms is None else result.step_ms
            times.append((own_ms, result.caching_ms, self.full_ms, is_quiet))

    try:
        yield Alternating(), times
    finally:
        end_busy()


def full_training_step(network: NetworkSettings) -> TrainStep:
    """A step of full training of a new, separate network."""
    model = models.build(network)
    optimizer = make_optimizer(network.optimizer, PAPER["learning_rate"], PAPER["weight_decay"], 100_000)
    optimizer.build(model.trainable_variables)
    return TrainStep(ImageClassification(model), optimizer, network.batch_size)


def run(
    model: keras.Model,
    data: ImageData,
    settings: Settings,
    table: TimingTable,
    full: Callable[[], object],
    busy_processes: int,
) -> dict[str, Any]:
    """One elastic run beside `full`, which runs a step of full training: `step_ratios`, and rho by other measures.

    "measured_by_selection" is the ratio of the medians of each selection, disturbed steps included.
    "predicted_by_selection" is below the requested rho if no further tensor has a positive importance. "by_slowdown" is
    the run's own estimate of its rho. "slowdown_by_full_steps" is the slowdown by full training's own steps, disturbed
    ones included: the latest ones before each selection but the first.
    """
    with alternating(full, busy_processes) as (listener, times):
        trainer = Trainer(model, data, "elastic_training", settings, [listener], table=table)
        results = trainer.run()
    assert results is not None, "it ran to its end"
    selections = trainer.history.selections
    own_ms, caching_ms, full_ms, is_quiet = np.array(times).reshape(len(selections), -1, 4).transpose(2, 0, 1)
    own_ms = own_ms + caching_ms.mean(axis=1, keepdims=True)
    return {
        **step_ratios(np.array([own_ms.ravel(), full_ms.ravel(), is_quiet.ravel()]).T),
        "by_slowdown": results["rho_measured"],
        "allowed_by_selection": [one.rho for one in selections],
        "predicted_by_selection": [one.predicted_share for one in selections],
        "measured_by_selection": (np.nanmedian(own_ms, axis=1) / np.median(full_ms, axis=1)).tolist(),
        "slowdown": [one.slowdown for one in selections],
        "correction": [one.correction for one in selections],
        "slowdown_by_full_steps": (np.median(full_ms[:-1, -LATEST_STEPS:], axis=1) / table.full_step_ms).tolist(),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The timing table, and of each feasible rho its runs, one a round."""
    network = args.network
    model, data = models.build(network), few_digits(network, args.steps // EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))
    batch = next(iter(data.train(0)))
    full = partial(full_training_step(network), batch.inputs, batch.targets)  # of another network
    if network.weights == "none" and not is_custom_model(network.model_name):
        batches = data.importance_batches(0, 32 // network.batch_size or 1)
        standardize(model, np.concatenate([batch.inputs for batch in batches]))
    weights = model.get_weights()  # each run starts from them: after many, a network with random weights may diverge
    settings = Settings(
        optimizer=network.optimizer,
        num_epochs=EPOCHS * args.intervals,
        interval=EPOCHS,
        importance_batches=args.importance_batches,
    )

    def run_one(rho: float) -> dict[str, Any]:
        model.set_weights(weights)
        return run(model, data, replace(settings, rho=rho), table, full, args.busy)

    smallest = smallest_rho(table, head_mask(model), misses=1 / EPOCHS)
    records = run_rounds(args.rounds, [rho for rho in RHOS if rho >= smallest], run_one)
    return {
        "rounds": args.rounds,
        "selections_a_run": args.intervals,
        "steps_between_selections": args.steps,
        "importance_batches": args.importance_batches,
        "busy_processes": args.busy,
        "rho": records,
        "kept": is_kept(records),
        "whole_run_kept": is_kept(records, "whole_run"),
        "profiled_full_step_ms": table.full_step_ms,
    }


SETTINGS = {
    "rounds": Setting(2, 1, "runs for each rho"),
    "steps": Setting(30, 12, "steps between two selections"),
    "intervals": Setting(4, 2, "selections a run"),
    "importance_batches": Setting(1, 1, "averaged for a selection"),
    "busy": Setting(0, 0, "processes that compete for the cores in the first three quarters of each run"),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
