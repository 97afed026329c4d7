#!/usr/bin/env python
"""A device that slows down half-way: does training still end in time?

The script trains short elastic runs on the handwritten digits. Half-way, busy processes start to compete for the cores
until the run ends; they stand in for heat. There are four runs: rho, undisturbed; a deadline of 1.15 times that run's
time, undisturbed and disturbed; and rho, disturbed. In the last one, a second network takes a step of full training
between any two steps, so that both halves can be compared with full training as it runs then. The script
prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_throttle.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Setting

import utils
from elastic_trainer.settings import Settings


def run_record(
    summary: dict[str, Any], metrics: list[dict[str, str]], selections: list[dict[str, str]]
) -> dict[str, Any]:
    """What the JSON holds of one elastic run; "epoch_ms" are its epochs' median steps."""

    def column(rows: list[dict[str, str]], name: str) -> list[float | None]:
        return [round(float(row[name]), 3) if row[name] else None for row in rows]

    names = ("rho", "slowdown", "correction", "predicted_step_ms", "measured_step_ms")
    return {
        **{key: summary[key] for key in ("elapsed_seconds", "steps", "planned_steps")},
        **{name: column(selections, name) for name in names},
        "epoch_ms": column(metrics, "median_step_ms"),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Profile the network and train the four runs."""
    from short_runs import elastic_run, full_training

    import data
    import models
    import profiler

    network, epochs = args.network, args.num_epochs
    settings = Settings(optimizer=network.optimizer, num_epochs=epochs, interval=max(epochs // 8, 1), rho=args.rho)
    model = models.build(network)
    dataset = data.load("digits", network.input_size, network.batch_size, network.seed)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, network, Path(folder))
    runs: dict[str, Any] = {}

    def run(
        name: str, settings: Settings, busy_processes: int, full: Callable[[], object] | None = None
    ) -> list[float]:
        """Train; returns the times of the steps of full training beside it."""
        summary, log, *rows = elastic_run(model, dataset, settings, table, full, busy_processes)
        runs[name] = run_record(summary, *rows)
        return log.full_ms

    run("rho, undisturbed", settings, 0)
    deadline = round(1.15 * runs["rho, undisturbed"]["elapsed_seconds"], 1)
    run("deadline, undisturbed", replace(settings, deadline=deadline), 0)
    run("deadline, disturbed", replace(settings, deadline=deadline), args.busy)
    all_full_ms = run("rho, disturbed", settings, args.busy, full_training(network, dataset))
    elastic_ms = np.array(runs["rho, disturbed"]["epoch_ms"])
    full_ms = np.median(np.reshape(all_full_ms, (epochs, -1)), axis=1)
    undisturbed, disturbed = slice(epochs // 2), slice(epochs // 2, None)
    return {
        "rho": args.rho,
        "busy_processes": args.busy,
        "deadline_seconds": deadline,
        "rho_in_the_undisturbed_half": float(np.median(elastic_ms[undisturbed] / full_ms[undisturbed])),
        "rho_in_the_disturbed_half": float(np.median(elastic_ms[disturbed] / full_ms[disturbed])),
        "full_step_ms": {
            "profiled": table.full_step_ms,
            "undisturbed": float(np.median(full_ms[undisturbed])),
            "disturbed": float(np.median(full_ms[disturbed])),
        },
        "runs": runs,
    }


SETTINGS = {
    "rho": Setting(0.6, 0.6, "of the runs without a deadline"),
    "num_epochs": Setting(16, 4, "of each run"),
    "busy": Setting(2, 2, "competing processes"),
}


if __name__ == "__main__":
    utils.run_cli(lambda: common.run_benchmark("benchmark_throttle", __doc__, SETTINGS, measure))
