#!/usr/bin/env python
"""Is rho kept? Short elastic runs and full training in turn; step time of the one over the other's.

Every elastic run uses the table and corrects its budget while it trains, as main.py does. Between any two of its steps,
a second network takes a step of full training, so that whatever disturbs the machine disturbs both. Data: handwritten
digits at the input size asked for, a few steps an epoch. The batch norms of a network with random weights get the
statistics of such digits. Pairs of steps from which other virtual machines took time are left out, where enough are
left. Medians are compared, and sums: a selection may have what the ones before it left over, so its steps may take more
than rho, but the whole run should not. Draws asked against measured and prints one JSON object as its last line.

    python scripts/benchmark_rho.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import csv
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np

import utils
from elastic_trainer.machine import environment, is_undisturbed, stolen_seconds
from elastic_trainer.networks.names import is_own_model
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.time_budget import LATEST_STEPS
from elastic_trainer.settings import PAPER
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    import keras

    from elastic_trainer.settings import Settings
    from elastic_trainer.training.step import TrainStep

RHOS = (0.35, 0.4, 0.5, 0.6, 0.7)
MIN_QUIET = 12  # pairs of steps; with fewer, disturbed ones are taken too


class Alternating:
    """Digits, cut to a few steps an epoch; before each batch a step of full training of another network is timed.

    Attributes:
        full_ms: of each batch.
        quiet: whether that step and the one trained on the batch were left undisturbed.
    """

    def __init__(self, network: NetworkSettings, steps: int, full: Callable[[Any, Any], object]) -> None:
        import data
        from elastic_trainer.datasets.image_data import ImageData

        whole = data.load("digits", network.input_size, network.batch_size, network.seed)
        train, test = (
            split._replace(images=split.images[:count], labels=split.labels[:count])
            for split, count in ((whole._train, steps * network.batch_size), (whole._test, network.batch_size))
        )
        self._data = ImageData("digits", whole.class_names, train, test, network.batch_size, network.seed)
        self._full = full
        self.full_ms: list[float] = []
        self.quiet: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train(self, epoch: int, skip: int = 0) -> Alternating:
        self._epoch, self._skip = epoch, skip
        return self

    def take(self, count: int) -> Iterator[tuple[Any, Any]]:
        for images, labels in self._data.train(self._epoch, self._skip).take(count):
            begin, stolen = time.perf_counter(), stolen_seconds()
            self.full_ms.append(float(measure_ms([partial(self._full, images, labels)], 1)[0, 0]))
            yield images, labels
            self.quiet.append(is_undisturbed(time.perf_counter() - begin, stolen_seconds() - stolen))


class StepsLog(RunLog):
    """Keeps the time of each step in ms; None where it is no measure."""

    step_ms: tuple[float | None, ...] = ()

    def record_step(self) -> None:
        self.step_ms += (self._history.results[-1].step_ms,)
        super().record_step()


def second_network(network: NetworkSettings) -> TrainStep:
    """A step of full training of a network of its own."""
    import models
    from elastic_trainer.training.optimizers import make_optimizer
    from elastic_trainer.training.step import TrainStep

    other = models.build(network)
    optimizer = make_optimizer(network.optimizer, PAPER["learning_rate"], PAPER["weight_decay"], 100_000)
    optimizer.build(other.trainable_variables)
    return TrainStep(other, optimizer, network.batch_size)


def standardize(model: keras.Model, images: Any) -> None:
    """Give each batch norm the statistics of `images` [batch, height, width, 3].

    With those of a new network, 0 and 1, activations fade from layer to layer and gradients with them: half of the
    tensors are of no importance then, and the most important selection may leave a tenth of the step over.
    """
    import keras

    from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm_statistics

    layers = [layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.__class__, layer.momentum = keras.layers.BatchNormalization, 0.0
    model(images, training=True)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    freeze_batch_norm_statistics(model)


def run(model: keras.Model, dataset: Alternating, settings: Settings, table: TimingTable) -> dict[str, Any]:
    """One elastic run in a folder that is thrown away: medians in ms, over how many pairs of steps, and rho by each.

    "measured" is the one median over the other, "whole_run" the same of sums, "rho_measured" that of medians for each
    selection, disturbed steps included. Of each selection, too: "rho_allowed" and "rho_predicted", "slowdown" and
    "correction". "rho_by_slowdown" is what the run itself took itself to keep, "slowdown_by_full_steps" what full
    training's own steps say, disturbed ones included, of the latest ones before each selection but the first.
    """
    import train
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.selection.schemes import make_budget

    dataset.full_ms, dataset.quiet = [], []
    with tempfile.TemporaryDirectory() as folder, (log := StepsLog(Path(folder), {}, tensor_names(model))):
        budget = make_budget(model, dataset, settings, table)  # type: ignore[arg-type]
        summary = train.elastic_training(model, dataset, settings, log, budget)  # type: ignore[arg-type]
        with (Path(folder) / "selections.csv").open(newline="", encoding="utf-8") as file:
            choices = list(csv.DictReader(file))[:: len(tensor_names(model))]
    each_elastic, each_full = (
        np.array(ms, float).reshape(settings.num_epochs, -1)  # None, where it is no measure, becomes NaN
        for ms in (log.step_ms, dataset.full_ms)
    )
    steps = zip(log.step_ms, dataset.full_ms, dataset.quiet, strict=True)
    pairs = [(elastic, full, quiet) for elastic, full, quiet in steps if elastic is not None]
    quiet_pairs = [pair for pair in pairs if pair[-1]]
    if len(quiet_pairs) >= MIN_QUIET:
        pairs = quiet_pairs
    elastic_ms, full_ms, _ = np.array(pairs).T
    return {
        "measured": float(np.median(elastic_ms) / np.median(full_ms)),
        "whole_run": float(elastic_ms.sum() / full_ms.sum()),
        "elastic_ms": float(np.median(elastic_ms)),
        "full_ms": float(np.median(full_ms)),
        "pairs": len(pairs),
        "quiet_pairs": len(quiet_pairs),
        "rho_allowed": [float(row["rho"]) for row in choices],
        "rho_measured": (np.nanmedian(each_elastic, axis=1) / np.median(each_full, axis=1)).tolist(),
        "rho_predicted": [
            float(row["predicted_step_ms"]) / float(row["budget_step_ms"]) * float(row["rho"]) for row in choices
        ],
        "rho_by_slowdown": summary["rho_measured"],
        "slowdown": [float(row["slowdown"]) for row in choices],
        "correction": [float(row["correction"]) for row in choices],
        "slowdown_by_full_steps": (np.median(each_full[:-1, -LATEST_STEPS:], axis=1) / table.full_step_ms).tolist(),
    }


def draw(title: str, medians: dict[float, float], sums: dict[float, float], stem: Path) -> None:
    """Asked against measured, with the band of what counts as kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="ρ asked", ylabel="ρ measured (time over full training's)", title=title)
    asked = np.array([*medians])
    ends = np.array([asked.min() - 0.04, asked.max() + 0.04])
    axes.fill_between(ends, ends - 0.03, ends + 0.02, color="0.9", label="+0.02, -0.03")
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.plot(asked, [*medians.values()], "o", color="#0072b2", label="median step")
    axes.plot(asked, [*sums.values()], "x", color="#d55e00", label="whole run")
    axes.legend(fontsize="small", loc="upper left")
    utils.save_figure(figure, stem)


def is_kept(ratios: dict[float, float]) -> bool:
    return all(-0.03 <= ratio - rho <= 0.02 for rho, ratio in ratios.items())


def feasible_rhos(model: keras.Model, table: TimingTable) -> Sequence[float]:
    from elastic_trainer.networks.tensors import head_mask

    smallest = table.predict_ms(head_mask(model)) / table.full_step_ms
    return [rho for rho in RHOS if rho >= smallest]


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_rho.py",
        __doc__,
        rounds={"type": int, "default": 2, "help": "runs for each rho (default: %(default)s)"},
        steps={"type": int, "default": 30, "help": "steps between two selections (default: %(default)s)"},
        intervals={"type": int, "default": 4, "help": "selections a run (default: %(default)s)"},
        importance_batches={
            "type": int,
            "default": 1,
            "help": "averaged for a selection (default: %(default)s)",
        },
    )
    utils.load_tensorflow()

    import models
    import profiler
    from elastic_trainer.settings import Settings

    if args.quick:
        args.rounds, args.steps, args.intervals = 1, 10, 2
    model = models.build(network)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))
    dataset = Alternating(network, args.steps, second_network(network))
    if network.weights == "none" and not is_own_model(network.model_name):
        standardize(
            model,
            np.concatenate([images for images, _ in dataset.importance_batches(0, 32 // network.batch_size or 1)]),
        )

    rhos = feasible_rhos(model, table)
    results: dict[float, list[dict[str, Any]]] = {rho: [] for rho in rhos}
    for _ in range(args.rounds):
        for rho in rhos:
            settings = Settings(
                num_epochs=args.intervals,
                interval=1,
                optimizer=network.optimizer,
                importance_batches=args.importance_batches,
                rho=rho,
            )
            results[rho].append(one := run(model, dataset, settings, table))
            measured = f"median step {one['measured']:.3f} of full training's, whole run {one['whole_run']:.3f}"
            print(f"rho {rho:g}: {measured}", flush=True)
    medians, sums = (
        {rho: float(np.median([one[key] for one in runs])) for rho, runs in results.items()}
        for key in ("measured", "whole_run")
    )
    title, stem, measured = common.measured_network(network, "rho", args.output)
    draw(title, medians, sums, stem)
    record = {
        **measured,
        "rounds": args.rounds,
        "selections_a_run": args.intervals,
        "steps_between_selections": args.steps,
        "importance_batches": args.importance_batches,
        "rho": [
            {
                "asked": rho,
                "measured": medians[rho],
                "whole_run": sums[rho],
                # Below what was asked where no further tensor has a positive importance.
                "predicted": float(np.median([one["rho_predicted"] for one in results[rho]])),
                "predicted_whole_run": float(np.mean([one["rho_predicted"] for one in results[rho]])),
                "allowed_by_selection": [one["rho_allowed"] for one in results[rho]],
                "predicted_by_selection": [one["rho_predicted"] for one in results[rho]],
                "measured_by_selection": [one["rho_measured"] for one in results[rho]],
                "by_slowdown": float(np.median([one["rho_by_slowdown"] for one in results[rho]])),
                "elastic_step_ms": [one["elastic_ms"] for one in results[rho]],
                "full_step_ms": [one["full_ms"] for one in results[rho]],
                "pairs": [one["pairs"] for one in results[rho]],
                "quiet_pairs": [one["quiet_pairs"] for one in results[rho]],
                "slowdown": [one["slowdown"] for one in results[rho]],
                "correction": [one["correction"] for one in results[rho]],
                "slowdown_by_full_steps": [one["slowdown_by_full_steps"] for one in results[rho]],
            }
            for rho in rhos
        ],
        "kept": is_kept(medians),
        "whole_run_kept": is_kept(sums),
        "profiled_full_step_ms": table.full_step_ms,
        "environment": environment(),
    }
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(record))


if __name__ == "__main__":
    utils.run_cli(main)
