#!/usr/bin/env python
"""A device that slows down half-way: does training still end in time?

Short elastic runs on the handwritten digits. Half-way, busy processes begin to compete for the cores (a stand-in for
heat), until the run ends. Four runs: rho, undisturbed; a deadline of that run's time and a bit, undisturbed and
disturbed; and rho, disturbed, where between any two steps a second network takes a step of full training, so that both
halves can be held against full training as it runs then. Draws step time over epochs and prints one JSON object as its
last line.

    python scripts/benchmark_throttle.py
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from benchmark_rho import Alternating, second_network

import utils
from elastic_trainer.machine import environment
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.selection.select import Selection
    from elastic_trainer.selection.time_budget import Progress
    from elastic_trainer.settings import Settings

BUSY = [sys.executable, "-c", "while True: pass"]


def run(
    model: keras.Model, dataset: ImageData, settings: Settings, table: TimingTable, busy_processes: int
) -> dict[str, Any]:
    """One elastic run, disturbed from its middle on; its summary, with the rows of metrics.csv and selections.csv."""
    import train
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.selection.schemes import ElasticScheme, make_budget

    class Disturbed(ElasticScheme):
        children: list[subprocess.Popen] = []  # noqa: RUF012

        def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Selection:
            if busy_processes and not self.children and progress.epoch >= progress.epochs / 2:
                self.children += [subprocess.Popen(BUSY) for _ in range(busy_processes)]
            return super().choose(progress, optimizer)

    budget = make_budget(model, dataset, settings, table)
    scheme = Disturbed(model, dataset, settings, budget)
    names = tensor_names(model)
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), {}, names) as log:
        try:
            summary = train.run_training(model, dataset, scheme, settings, log)
        finally:
            for child in scheme.children:
                child.kill()
                child.wait()
            Disturbed.children.clear()
        for table_name in ("metrics", "selections"):
            with (Path(folder) / f"{table_name}.csv").open(newline="", encoding="utf-8") as file:
                summary[table_name] = list(csv.DictReader(file))
    summary["selections"] = summary["selections"][:: len(names)]
    return summary


def draw(runs: dict[str, dict[str, Any]], stem: Path) -> None:
    """Median step of each epoch over the time since the run began."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="median step (ms)", title="competing processes from half-way on")
    styles = (("#000000", "o"), ("#0072b2", "s"), ("#d55e00", "^"), ("#e69f00", "D"))
    for (name, summary), (colour, marker) in zip(runs.items(), styles, strict=True):
        # A run that its deadline cuts off at an epoch's first step has measured none in that epoch.
        measured = [row for row in summary["metrics"] if row["median_step_ms"]]
        epochs = [int(row["epoch"]) for row in measured]
        step_ms = [float(row["median_step_ms"]) for row in measured]
        label = f"{name}: {summary['elapsed_seconds']:.0f} s"
        axes.plot(epochs, step_ms, color=colour, marker=marker, markersize=4, linewidth=1, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    utils.save_figure(figure, stem)


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_throttle.py",
        __doc__,
        rho={"type": float, "default": 0.6, "help": "default: %(default)s"},
        num_epochs={"type": int, "default": 16, "help": "default: %(default)s"},
        busy={"type": int, "default": 2, "help": "competing processes (default: %(default)s)"},
    )
    utils.load_tensorflow()

    import data
    import models
    import profiler
    from elastic_trainer.settings import Settings

    if args.quick:
        args.num_epochs = 4
    model = models.build(network)
    dataset = data.load("digits", network.input_size, network.batch_size, network.seed)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))

    settings = Settings(
        optimizer=network.optimizer, num_epochs=args.num_epochs, interval=max(args.num_epochs // 8, 1), rho=args.rho
    )
    runs = {"rho, undisturbed": run(model, dataset, settings, table, 0)}
    deadline = round(1.15 * runs["rho, undisturbed"]["elapsed_seconds"], 1)
    hurried = Settings(**{**vars(settings), "deadline": deadline})
    runs["deadline, undisturbed"] = run(model, dataset, hurried, table, 0)
    runs["deadline, disturbed"] = run(model, dataset, hurried, table, args.busy)

    alternating = Alternating(network, dataset.steps_per_epoch, second_network(network))
    runs["rho, disturbed"] = run(model, alternating, settings, table, args.busy)  # type: ignore[arg-type]
    elastic_ms = [float(row["median_step_ms"]) for row in runs["rho, disturbed"]["metrics"]]
    full_ms = np.median(np.reshape(alternating.full_ms, (args.num_epochs, -1)), axis=1)
    half = args.num_epochs // 2
    ratios = [float(np.median(np.array(elastic_ms[part]) / full_ms[part])) for part in (slice(half), slice(half, None))]

    stem = args.output or Path("figures") / "throttle"
    draw(runs, stem)
    record = {
        "model_name": network.model_name,
        "alpha": network.alpha,
        "input_size": network.input_size,
        "batch_size": network.batch_size,
        "rho": args.rho,
        "busy_processes": args.busy,
        "deadline_seconds": deadline,
        "rho_in_the_undisturbed_half": ratios[0],
        "rho_in_the_disturbed_half": ratios[1],
        "full_step_ms": {
            "profiled": table.full_step_ms,
            "undisturbed": float(np.median(full_ms[:half])),
            "disturbed": float(np.median(full_ms[half:])),
        },
        "runs": {
            name: {
                "elapsed_seconds": summary["elapsed_seconds"],
                "steps": summary["steps"],
                "planned_steps": summary["planned_steps"],
                **{
                    key: [round(float(row[key]), 3) if row[key] else None for row in summary["selections"]]
                    for key in ("rho", "slowdown", "correction", "predicted_step_ms", "measured_step_ms")
                },
            }
            for name, summary in runs.items()
        },
        "environment": environment(),
    }
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(record))


if __name__ == "__main__":
    utils.run_cli(main)
