#!/usr/bin/env python
"""Is rho kept? Step time of short elastic runs over that of full training, whose steps alternate with theirs.

Each elastic run uses the timing table and corrects its budget while it trains, as main.py does. Between any two of its
steps, a second network takes a step of full training, so that whatever disturbs the machine disturbs both. Data:
handwritten digits at the given input size, a few steps an epoch. Three epochs lie between two selections, so that
features are used again; a step includes its share of what making them took. The batch norms of a network with random
weights get the statistics of these digits. Every run starts from the same weights. Pairs of steps from which other
virtual machines took time are left out if enough others remain. Both medians and sums are compared: a selection may use
what earlier ones left of their budget, so its steps may take more than rho, but the entire run should not. The script
draws measured over requested rho and prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_rho.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from alternating import AlternatingDigits, full_training_step

import utils
from elastic_trainer.files import save_figure
from elastic_trainer.machine import environment, load_tensorflow
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.runs.reader import SELECTIONS, read_rows
from elastic_trainer.selection.time_budget import LATEST_STEPS
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    import keras
    from matplotlib.axes import Axes

    from elastic_trainer.settings import NetworkSettings

EPOCHS = 3  # from one selection to the next, so that features are used again
MIN_UNDISTURBED = 12  # pairs of steps; with fewer, disturbed ones are included


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


def step_pairs(elastic_ms: np.ndarray, dataset: AlternatingDigits) -> tuple[np.ndarray, np.ndarray, int]:
    """Times [pairs] in ms of the run's steps and of full training's, and the number of undisturbed pairs.

    Steps that were not timed, NaN in `elastic_ms` [steps], are left out, and disturbed pairs unless fewer than
    `MIN_UNDISTURBED` others remain.
    """
    steps = zip(elastic_ms, dataset.full_ms, dataset.undisturbed, strict=True)
    pairs = [(elastic, full, undisturbed) for elastic, full, undisturbed in steps if not np.isnan(elastic)]
    undisturbed_pairs = [pair for pair in pairs if pair[-1]]
    if len(undisturbed_pairs) >= MIN_UNDISTURBED:
        pairs = undisturbed_pairs
    timed_ms, full_ms, _ = np.array(pairs).T
    return timed_ms, full_ms, len(undisturbed_pairs)


def run(model: keras.Model, dataset: AlternatingDigits, settings: Settings, table: TimingTable) -> dict[str, Any]:
    """One elastic run in a temporary folder: medians in ms, over how many pairs of steps, and rho by each.

    A step includes its share of what making the features of its selection took.

    "measured" is the ratio of the medians, "whole_run" that of the sums, "rho_measured" that of the medians of each
    selection, disturbed steps included. Each selection also has "rho_allowed", "rho_predicted", "slowdown" and
    "correction". "rho_by_slowdown" is the run's own estimate of its rho. "slowdown_by_full_steps" is the slowdown by
    full training's own steps, disturbed ones included: the latest ones before each selection but the first.
    """
    from step_times import StepTimesLog

    import train
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.selection.schemes import make_budget

    dataset.full_ms, dataset.undisturbed = [], []
    names = tensor_names(model)
    with tempfile.TemporaryDirectory() as folder, (log := StepTimesLog(Path(folder), {}, names)):
        budget = make_budget(model, dataset, settings, table, features_possible=True)  # type: ignore[arg-type]
        summary = train.elastic_training(model, dataset, settings, log, budget)  # type: ignore[arg-type]
        selections = read_rows(Path(folder) / SELECTIONS)[:: len(names)]
    each_elastic, each_full, making = (
        np.array(ms, float).reshape(len(selections), -1)  # None, for a step that was not timed, becomes NaN
        for ms in (log.step_ms, dataset.full_ms, log.making_ms)
    )
    each_elastic = each_elastic + making.mean(axis=1, keepdims=True)
    elastic_ms, full_ms, undisturbed = step_pairs(each_elastic.ravel(), dataset)
    return {
        "measured": float(np.median(elastic_ms) / np.median(full_ms)),
        "whole_run": float(elastic_ms.sum() / full_ms.sum()),
        "elastic_ms": float(np.median(elastic_ms)),
        "full_ms": float(np.median(full_ms)),
        "pairs": len(elastic_ms),
        "quiet_pairs": undisturbed,
        "rho_allowed": [float(row["rho"]) for row in selections],
        "rho_measured": (np.nanmedian(each_elastic, axis=1) / np.median(each_full, axis=1)).tolist(),
        "rho_predicted": [
            float(row["predicted_step_ms"]) / float(row["budget_step_ms"]) * float(row["rho"]) for row in selections
        ],
        "rho_by_slowdown": summary["rho_measured"],
        "slowdown": [float(row["slowdown"]) for row in selections],
        "correction": [float(row["correction"]) for row in selections],
        "slowdown_by_full_steps": (np.median(each_full[:-1, -LATEST_STEPS:], axis=1) / table.full_step_ms).tolist(),
    }


def draw(title: str, medians: dict[float, float], sums: dict[float, float], stem: Path) -> None:
    """Measured over requested rho, with the band in which rho counts as kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="ρ asked", ylabel="ρ measured (time over full training's)", title=title)
    asked = np.array([*medians])
    ends = np.array([asked.min() - 0.04, asked.max() + 0.04])
    draw_band(axes, ends)
    axes.plot(asked, [*medians.values()], "o", color="#0072b2", label="median step")
    axes.plot(asked, [*sums.values()], "x", color="#d55e00", label="entire run")
    axes.legend(fontsize="small", loc="upper left")
    save_figure(figure, stem)


def draw_band(axes: Axes, ends: np.ndarray) -> None:
    """The line on which what is measured is what was asked, from `ends` [2], and the band of `is_kept`."""
    axes.fill_between(ends, ends - 0.03, ends + 0.02, color="0.9", label="+0.02, -0.03")
    axes.plot(ends, ends, color="0.4", linewidth=0.8)


def is_kept(ratios: dict[float, float]) -> bool:
    """Whether each measured ratio is at most 0.02 above its rho and at most 0.03 below it."""
    return all(-0.03 <= ratio - rho <= 0.02 for rho, ratio in ratios.items())


def feasible_rhos(model: keras.Model, table: TimingTable) -> Sequence[float]:
    """Those of the paper's rhos that training the head alone does not exceed."""
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.time_budget import smallest_rho

    smallest = smallest_rho(table, head_mask(model), share=1 / EPOCHS)
    return [rho for rho in common.PAPER_RHOS if rho >= smallest]


def measure(
    network: NetworkSettings, rounds: int, steps: int, settings: Settings
) -> tuple[TimingTable, dict[float, list[dict[str, Any]]]]:
    """The timing table, and for each feasible rho its runs, one a round; `steps` are those between two selections."""
    import models
    import profiler

    model = models.build(network)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))
    dataset = AlternatingDigits(network, steps // EPOCHS, full_training_step(network))
    if network.weights == "none" and not is_custom_model(network.model_name):
        batches = dataset.importance_batches(0, 32 // network.batch_size or 1)
        standardize(model, np.concatenate([batch.inputs for batch in batches]))
    runs: dict[float, list[dict[str, Any]]] = {rho: [] for rho in feasible_rhos(model, table)}
    weights = model.get_weights()  # each run starts from them: after many, a network with random weights may diverge
    for _ in range(rounds):
        for rho, of_rho in runs.items():
            model.set_weights(weights)
            of_rho.append(one := run(model, dataset, replace(settings, rho=rho), table))
            measured = f"median step {one['measured']:.3f} of full training's, entire run {one['whole_run']:.3f}"
            print(f"rho {rho:g}: {measured}", flush=True)
    return table, runs


def rho_record(rho: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the JSON holds of the runs of one rho."""

    def each(key: str) -> list[Any]:
        return [one[key] for one in runs]

    return {
        "asked": rho,
        "measured": float(np.median(each("measured"))),
        "whole_run": float(np.median(each("whole_run"))),
        # Below the requested rho if no further tensor has a positive importance.
        "predicted": float(np.median(each("rho_predicted"))),
        "predicted_whole_run": float(np.mean(each("rho_predicted"))),
        "allowed_by_selection": each("rho_allowed"),
        "predicted_by_selection": each("rho_predicted"),
        "measured_by_selection": each("rho_measured"),
        "by_slowdown": float(np.median(each("rho_by_slowdown"))),
        "elastic_step_ms": each("elastic_ms"),
        "full_step_ms": each("full_ms"),
        "pairs": each("pairs"),
        "quiet_pairs": each("quiet_pairs"),
        "slowdown": each("slowdown"),
        "correction": each("correction"),
        "slowdown_by_full_steps": each("slowdown_by_full_steps"),
    }


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_rho.py",
        __doc__,
        rounds={"type": int, "default": 2, "help": "runs for each rho (default: %(default)s)"},
        steps={"type": int, "default": 30, "help": "steps between two selections (default: %(default)s)"},
        intervals={"type": int, "default": 4, "help": "selections a run (default: %(default)s)"},
        importance_batches={"type": int, "default": 1, "help": "averaged for a selection (default: %(default)s)"},
    )
    load_tensorflow()
    if args.quick:
        args.rounds, args.steps, args.intervals = 1, 12, 2
    settings = Settings(
        optimizer=network.optimizer,
        num_epochs=EPOCHS * args.intervals,
        interval=EPOCHS,
        importance_batches=args.importance_batches,
    )
    table, runs = measure(network, args.rounds, args.steps, settings)
    records = [rho_record(rho, of_rho) for rho, of_rho in runs.items()]
    medians, sums = ({one["asked"]: one[key] for one in records} for key in ("measured", "whole_run"))
    title, stem, network_record = common.measured_network(network, "rho", args.output)
    draw(title, medians, sums, stem)
    record = {
        **network_record,
        "rounds": args.rounds,
        "selections_a_run": args.intervals,
        "steps_between_selections": args.steps,
        "importance_batches": args.importance_batches,
        "rho": records,
        "kept": is_kept(medians),
        "whole_run_kept": is_kept(sums),
        "profiled_full_step_ms": table.full_step_ms,
        "environment": environment(),
    }
    common.print_result(record, stem)


if __name__ == "__main__":
    utils.run_cli(main)
