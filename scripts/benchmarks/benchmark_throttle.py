#!/usr/bin/env python
"""A device that slows down half-way: does training still end in time?

The script trains short elastic runs on the handwritten digits. Half-way, busy processes start to compete for the cores
until the run ends; they stand in for heat. There are four runs: rho, undisturbed; a deadline of 1.15 times that run's
time, undisturbed and disturbed; and rho, disturbed. In the last one, a second network takes a step of full training
between any two steps, so that both halves can be compared with full training as it runs then. The script draws step
time over epochs and prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_throttle.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common
import numpy as np
from alternating import AlternatingDigits, full_training_step

import utils
from elastic_trainer.files import save_figure
from elastic_trainer.machine import environment, load_tensorflow
from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_rows
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import ElasticScheme, make_budget
from elastic_trainer.settings import NetworkSettings, Settings
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.selection.select import Selection
    from elastic_trainer.selection.time_budget import Progress, TimeBudget
    from elastic_trainer.task import Task
    from elastic_trainer.training.state import TrainState

BUSY = [sys.executable, "-c", "while True: pass"]


class DisturbedScheme(ElasticScheme):
    """Elastic training that starts busy processes at the first selection in the second half of the run.

    Use as a context manager, which ends these processes.

    Args:
        task, data, settings, budget: as for `ElasticScheme`.
        busy_processes: how many.
    """

    def __init__(
        self, task: Task, data: ImageData, settings: Settings, budget: TimeBudget, busy_processes: int
    ) -> None:
        super().__init__(task, data, settings, budget)
        self._busy_processes = busy_processes
        self._children: list[subprocess.Popen[bytes]] = []

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """See `Scheme.select`."""
        if not self._children and progress.epoch >= progress.epochs / 2:
            self._children += [subprocess.Popen(BUSY) for _ in range(self._busy_processes)]
        return super().select(progress, state)

    def __enter__(self) -> DisturbedScheme:
        return self

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def run(
    model: keras.Model, dataset: ImageData, settings: Settings, table: TimingTable, busy_processes: int
) -> dict[str, Any]:
    """One elastic run, disturbed from its middle on: its summary, with the rows of metrics.csv and selections.csv."""
    import train
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.task import ImageClassification

    task, budget = ImageClassification(model), make_budget(model, dataset, settings, table)
    scheme = DisturbedScheme(task, dataset, settings, budget, busy_processes)
    names = tensor_names(model)
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), {}, names) as log:
        with scheme:
            summary = train.run_training(task, dataset, scheme, settings, log)
        summary["metrics"] = read_rows(Path(folder) / METRICS)
        summary["selections"] = read_rows(Path(folder) / SELECTIONS)[:: len(names)]
    return summary


def draw(runs: dict[str, dict[str, Any]], stem: Path) -> None:
    """Median step of each epoch, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="median step (ms)", title="competing processes from half-way on")
    styles = (("#000000", "o"), ("#0072b2", "s"), ("#d55e00", "^"), ("#e69f00", "D"))
    for (name, summary), (colour, marker) in zip(runs.items(), styles, strict=True):
        # A run that its deadline ends at the first step of an epoch has measured no step in that epoch.
        measured = [row for row in summary["metrics"] if row["median_step_ms"]]
        epochs = [int(row["epoch"]) for row in measured]
        step_ms = [float(row["median_step_ms"]) for row in measured]
        label = f"{name}: {summary['elapsed_seconds']:.0f} s"
        axes.plot(epochs, step_ms, color=colour, marker=marker, markersize=4, linewidth=1, label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    save_figure(figure, stem)


class Measured(NamedTuple):
    """The four runs of one network.

    Attributes:
        table: its timing table.
        runs: their summaries, by name.
        deadline: in seconds.
        elastic_ms, full_ms: [epochs] median steps of the run with rho, disturbed, and of full training beside it.
    """

    table: TimingTable
    runs: dict[str, dict[str, Any]]
    deadline: float
    elastic_ms: np.ndarray
    full_ms: np.ndarray


def measure(network: NetworkSettings, settings: Settings, busy_processes: int) -> Measured:
    """Profile the network and train the four runs."""
    import data
    import models
    import profiler

    model = models.build(network)
    dataset = data.load("digits", network.input_size, network.batch_size, network.seed)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))
    runs = {"rho, undisturbed": run(model, dataset, settings, table, 0)}
    deadline = round(1.15 * runs["rho, undisturbed"]["elapsed_seconds"], 1)
    with_deadline = replace(settings, deadline=deadline)
    runs["deadline, undisturbed"] = run(model, dataset, with_deadline, table, 0)
    runs["deadline, disturbed"] = run(model, dataset, with_deadline, table, busy_processes)
    alternating = AlternatingDigits(network, dataset.steps_per_epoch, full_training_step(network))
    runs["rho, disturbed"] = run(model, alternating, settings, table, busy_processes)  # type: ignore[arg-type]
    elastic_ms = np.array([float(row["median_step_ms"]) for row in runs["rho, disturbed"]["metrics"]])
    full_ms = np.median(np.reshape(alternating.full_ms, (settings.num_epochs, -1)), axis=1)
    return Measured(table, runs, deadline, elastic_ms, full_ms)


def run_record(summary: dict[str, Any]) -> dict[str, Any]:
    """What the JSON holds of one run."""
    columns = ("rho", "slowdown", "correction", "predicted_step_ms", "measured_step_ms")
    return {
        **{key: summary[key] for key in ("elapsed_seconds", "steps", "planned_steps")},
        **{
            column: [round(float(row[column]), 3) if row[column] else None for row in summary["selections"]]
            for column in columns
        },
    }


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_throttle.py",
        __doc__,
        rho={"type": float, "default": 0.6, "help": "default: %(default)s"},
        num_epochs={"type": int, "default": 16, "help": "default: %(default)s"},
        busy={"type": int, "default": 2, "help": "competing processes (default: %(default)s)"},
    )
    load_tensorflow()
    epochs = 4 if args.quick else args.num_epochs
    settings = Settings(optimizer=network.optimizer, num_epochs=epochs, interval=max(epochs // 8, 1), rho=args.rho)
    measured = measure(network, settings, args.busy)
    halves = slice(epochs // 2), slice(epochs // 2, None)
    ratios = [float(np.median(measured.elastic_ms[half] / measured.full_ms[half])) for half in halves]
    full_ms = [float(np.median(measured.full_ms[half])) for half in halves]
    stem = args.output or Path("figures") / "throttle"
    draw(measured.runs, stem)
    record = {
        **{key: getattr(network, key) for key in ("model_name", "alpha", "input_size", "batch_size")},
        "rho": args.rho,
        "busy_processes": args.busy,
        "deadline_seconds": measured.deadline,
        "rho_in_the_undisturbed_half": ratios[0],
        "rho_in_the_disturbed_half": ratios[1],
        "full_step_ms": {
            "profiled": measured.table.full_step_ms,
            "undisturbed": full_ms[0],
            "disturbed": full_ms[1],
        },
        "runs": {name: run_record(summary) for name, summary in measured.runs.items()},
        "environment": environment(),
    }
    common.print_result(record, stem)


if __name__ == "__main__":
    utils.run_cli(main)
