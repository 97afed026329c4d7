#!/usr/bin/env python
"""What does a training step cost? The same selections with and without folded batch norm, and Keras' own step.

The script measures a timing table, selects tensors for several rho by the importance on one batch of digits, and
compiles the step of full training and of each selection twice: as main.py runs it, with frozen batch norm folded into
the layers before it, and without folding. Keras' step is that of `model.fit`, with the same frozen batch norm and SGD
with momentum. All steps alternate in one process. The script draws the medians and prints one JSON object as its last
line.

    python scripts/benchmarks/benchmark_step.py --model_name mobilenetv2 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np

import utils
from elastic_trainer.machine import environment
from elastic_trainer.settings import PAPER

if TYPE_CHECKING:
    import keras

    from elastic_trainer.settings import NetworkSettings

RHOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
COLOURS = ("#009e73", "#e69f00")


def selections(model: keras.Model, network: NetworkSettings, seconds: float) -> tuple[dict[str, np.ndarray], float]:
    """Bool [N] over `model.trainable_variables` by name, for full training and each feasible rho; the smallest rho."""
    import data
    import profiler
    from elastic_trainer.networks.tensors import all_mask, head_mask
    from elastic_trainer.selection.importance import ImportanceEvaluator
    from elastic_trainer.selection.select import select_tensors
    from elastic_trainer.selection.time_budget import smallest_rho
    from elastic_trainer.training.optimizers import make_optimizer

    head = head_mask(model)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder), seconds=seconds)
    optimizer = make_optimizer("sgd", PAPER["learning_rate"], PAPER["weight_decay"], 100)
    optimizer.build(model.trainable_variables)
    digits = data.load("digits", network.input_size, network.batch_size, network.seed)
    importance = ImportanceEvaluator(model, network.batch_size)(optimizer, digits.importance_batches(0))
    smallest = smallest_rho(table, head)
    feasible = [rho for rho in RHOS if rho >= smallest]
    chosen = {f"rho {rho:g}": select_tensors(table, importance, head, rho).mask for rho in feasible}
    return {"full": all_mask(model), **chosen}, smallest


def step_runs(
    model: keras.Model, network: NetworkSettings, masks: dict[str, np.ndarray]
) -> dict[tuple[str, str], Callable[[], object]]:
    """Calls that run one compiled step, by selection and variant: "folded", "unfolded", and "keras" for full training.

    At learning rate 0, so no weight changes.
    """
    import keras
    import tensorflow as tf

    from elastic_trainer.timing.measuring import idle_optimizer
    from elastic_trainer.training.step import TrainStep, batch_spec

    images, labels = (spec.shape for spec in batch_spec(model, network.batch_size))
    batch = (tf.random.uniform(images, 0, 255, seed=0), tf.zeros(labels, tf.int32))
    optimizer = idle_optimizer(model, network.optimizer)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, mask in masks.items():
        for variant in ("folded", "unfolded"):
            step = TrainStep(model, optimizer, network.batch_size, mask, fold=variant == "folded")
            runs[name, variant] = partial(step, *batch)
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    runs["full", "keras"] = partial(model.train_on_batch, *batch)
    return runs


def draw(title: str, step_ms: dict[str, dict[str, float]], stem: Path) -> None:
    """Bars of the median steps by selection, and a line for Keras' step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(ylabel="ms a step", title=title)
    places = np.arange(len(step_ms))
    for offset, variant, colour in zip((-0.2, 0.2), ("folded", "unfolded"), COLOURS, strict=True):
        axes.bar(places + offset, [times[variant] for times in step_ms.values()], 0.4, label=variant, color=colour)
    axes.axhline(step_ms["full"]["keras"], color="0.4", linewidth=0.8, label="Keras' full step")
    axes.set_xticks(places, [name.replace("rho", "ρ") for name in step_ms])
    axes.legend(fontsize="small")
    utils.save_figure(figure, stem)


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_step.py",
        __doc__,
        seconds={"type": float, "default": 120, "help": "time for measuring steps (default: %(default)s)"},
    )
    utils.load_tensorflow()

    import models
    from elastic_trainer.timing.measuring import MEASURING_SECONDS, measure_steps

    model = models.build(network)
    masks, smallest = selections(model, network, 3 if args.quick else MEASURING_SECONDS)
    runs = step_runs(model, network, masks)
    times = measure_steps([*runs.values()], 3 if args.quick else args.seconds)
    step_ms: dict[str, dict[str, float]] = {name: {} for name in masks}
    for (name, variant), median_ms in zip(runs, np.median(times, axis=0).tolist(), strict=True):
        step_ms[name][variant] = median_ms
    title, stem, network_record = common.measured_network(network, "step", args.output)
    draw(title, step_ms, stem)
    record: dict[str, Any] = {
        **network_record,
        "rounds": len(times),
        "smallest_rho": smallest,
        "step_ms": step_ms,
        "folded_over_unfolded": {name: each["folded"] / each["unfolded"] for name, each in step_ms.items()},
        "full_over_keras": step_ms["full"]["folded"] / step_ms["full"]["keras"],
        "trained_tensors": {name: int(mask.sum()) for name, mask in masks.items()},
        "environment": environment(),
    }
    common.print_result(record, stem)


if __name__ == "__main__":
    utils.run_cli(main)
