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
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from common import Setting

import utils
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.selection.budget import LATEST_STEPS
from elastic_trainer.settings import DataSettings, Settings
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.settings import NetworkSettings

EPOCHS = 3  # from one selection to the next, so that features are used again
MIN_UNDISTURBED = 12  # pairs of steps; with fewer, disturbed ones are included
BUSY = (0.0, 0.75)  # from which to which share of a run's steps --busy processes compete
MEDIANS = ("measured", "whole_run", "by_slowdown")  # of the runs of one rho; of the rest, the record has each run's


def standardize(model: keras.Model, images: Any) -> None:
    """Give each batch norm the statistics of `images` [batch, height, width, 3].

    With those of a new network, 0 and 1, activations and gradients fade from layer to layer. Then half of the tensors
    have no importance, and the most important selection may leave a tenth of the step unused.
    """
    import keras

    from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm

    layers = [layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.__class__, layer.momentum = keras.layers.BatchNormalization, 0.0
    model(images, training=True)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    freeze_batch_norm(model)


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


def few_digits(network: NetworkSettings, steps: int) -> ImageData:
    """Digits, cut to `steps` steps an epoch and one batch for the test."""
    import data
    from elastic_trainer.datasets.image_data import ImageData

    digits = data.load(DataSettings("digits"), network.input_size, network.batch_size, network.seed)
    train, test = (
        split._replace(images=split.images[:count], labels=split.labels[:count])
        for split, count in ((digits._train, steps * network.batch_size), (digits._test, network.batch_size))
    )
    return ImageData("digits", digits.class_names, train, test, network.batch_size, network.seed)


def run(
    model: keras.Model,
    data: ImageData,
    settings: Settings,
    table: TimingTable,
    full: Callable[[], object],
    busy_processes: int,
) -> dict[str, Any]:
    """One elastic run in a temporary folder: `step_ratios`, and rho by other measures.

    A step includes its share of what making the features of its selection took. `full` runs a step of full training.
    So many processes compete during `BUSY`.

    "measured_by_selection" is the ratio of the medians of each selection, disturbed steps included.
    "predicted_by_selection" is below the requested rho if no further tensor has a positive importance. "by_slowdown" is
    the run's own estimate of its rho. "slowdown_by_full_steps" is the slowdown by full training's own steps, disturbed
    ones included: the latest ones before each selection but the first.
    """
    from short_runs import elastic_run

    summary, log, _, selections = elastic_run(model, data, settings, table, full, busy_processes, BUSY)
    each_elastic, each_full, making = (
        np.array(ms, float).reshape(len(selections), -1)  # None, for a step that was not timed, becomes NaN
        for ms in (log.step_ms, log.full_ms, log.making_ms)
    )
    each_elastic = each_elastic + making.mean(axis=1, keepdims=True)
    allowed, predicted_ms, budget_ms, slowdown, correction = (
        np.array([float(row[name]) for row in selections])
        for name in ("rho", "predicted_step_ms", "budget_step_ms", "slowdown", "correction")
    )
    return {
        **step_ratios(np.array([each_elastic.ravel(), log.full_ms, log.undisturbed]).T),
        "by_slowdown": summary["rho_measured"],
        "allowed_by_selection": allowed.tolist(),
        "predicted_by_selection": (predicted_ms / budget_ms * allowed).tolist(),
        "measured_by_selection": (np.nanmedian(each_elastic, axis=1) / np.median(each_full, axis=1)).tolist(),
        "slowdown": slowdown.tolist(),
        "correction": correction.tolist(),
        "slowdown_by_full_steps": (np.median(each_full[:-1, -LATEST_STEPS:], axis=1) / table.full_step_ms).tolist(),
    }


def is_kept(records: Sequence[dict[str, Any]], key: str = "measured") -> bool:
    """Whether each measured ratio is at most 0.02 above its rho and at most 0.03 below it; see `rho_record`."""
    return all(-0.03 <= one[key] - one["asked"] <= 0.02 for one in records)


def run_rounds(
    rounds: int, rhos: Sequence[float], run_one: Callable[[float], dict[str, Any]], name: str = ""
) -> dict[float, list[dict[str, Any]]]:
    """The runs of each rho, one a round, and a line on each. A rho that is below the smallest one is left out."""
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
    return runs


def feasible_rhos(model: keras.Model, table: TimingTable) -> Sequence[float]:
    """Those of the paper's rhos that training the head alone does not exceed."""
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.budget import smallest_rho

    smallest = smallest_rho(table, head_mask(model), misses=1 / EPOCHS)
    return [rho for rho in common.PAPER_RHOS if rho >= smallest]


def measure(
    network: NetworkSettings, rounds: int, steps: int, settings: Settings, busy_processes: int = 0
) -> tuple[TimingTable, dict[float, list[dict[str, Any]]]]:
    """The timing table, and for each feasible rho its runs, one a round; `steps` are those between two selections."""
    from short_runs import full_training

    import models
    import profiler

    model = models.build(network)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))
    data = few_digits(network, steps // EPOCHS)
    full = full_training(network, data)
    if network.weights == "none" and not is_custom_model(network.model_name):
        batches = data.importance_batches(0, 32 // network.batch_size or 1)
        standardize(model, np.concatenate([batch.inputs for batch in batches]))
    weights = model.get_weights()  # each run starts from them: after many, a network with random weights may diverge

    def run_one(rho: float) -> dict[str, Any]:
        model.set_weights(weights)
        return run(model, data, replace(settings, rho=rho), table, full, busy_processes)

    return table, run_rounds(rounds, feasible_rhos(model, table), run_one)


def rho_record(rho: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the JSON holds of the runs of one rho."""
    each = {key: [one[key] for one in runs] for key in runs[0]}
    predicted = each["predicted_by_selection"]
    return {
        "asked": rho,
        **{key: float(np.median(values)) if key in MEDIANS else values for key, values in each.items()},
        "predicted": float(np.median(predicted)),
        "predicted_whole_run": float(np.mean(predicted)),
    }


def measured_record(args: argparse.Namespace) -> dict[str, Any]:
    """What the JSON holds of all runs."""
    settings = Settings(
        optimizer=args.network.optimizer,
        num_epochs=EPOCHS * args.intervals,
        interval=EPOCHS,
        importance_batches=args.importance_batches,
    )
    table, runs = measure(args.network, args.rounds, args.steps, settings, args.busy)
    records = [rho_record(rho, of_rho) for rho, of_rho in runs.items()]
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
    utils.run_cli(lambda: common.run_benchmark("benchmark_rho", __doc__, SETTINGS, measured_record))
