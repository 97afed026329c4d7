#!/usr/bin/env python
"""Predicted against measured step time: how accurate is the timing table?

The script profiles a network as profiler.py does. Then it measures other selections than those of the fit: the solver's
selections over a grid of rho with random importances, and random selections of different depth and density. Each is a
real training step with its updates, from images and, where layers are frozen before its first trained ones, from their
cached features; all alternate in one process. A shared machine changes its speed between the two.
Therefore some of the fit's selections are measured again with the others. Their times, over those while profiling, are
the speed that predictions are scaled by (`speed_change_percent`; errors without it are `unscaled`). The script prints
one JSON object as its last line.

With --table short, the table is the short one that a run without a table measures, and the tested selections are upper
parts, which the default scheme trains.

    python scripts/benchmarks/benchmark_time_model.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Setting, errors

import models
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.select import select_tensors
from elastic_trainer.timing import measuring
from elastic_trainer.timing.profiling import QUICK_SECONDS, make_table
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import table_settings

SOLVED_RHOS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
DENSITIES = (1.0, 0.5, 0.2, 0.05)
UPPER_SHARES = np.linspace(0.1, 0.95, 18)  # of all tensors
MEASURED_AGAIN = slice(None, None, -2)  # of the fit's selections: every second one, and the full step


def test_selections(table: TimingTable, head: np.ndarray, count: int) -> list[tuple[str, np.ndarray]]:
    """Half by the solver, half random, all different: (kind, bool [N] over `model.trainable_variables`).

    Fewer than `count` if the network has not enough.
    """
    rng = np.random.default_rng(1)
    smallest = table.predict_ms(head) / table.full_step_ms
    rhos = [rho for rho in SOLVED_RHOS if rho > smallest + 0.02]
    masks: list[tuple[str, np.ndarray]] = []
    seen = {head.tobytes(), np.ones(len(head), bool).tobytes()}
    for attempt in range(100 * count):
        if attempt % 2 and rhos:
            rho = rhos[attempt // 2 % len(rhos)]
            kind, mask = "solver", select_tensors(table, rng.lognormal(size=len(head)), head, rho).mask
        else:
            deepest = rng.integers(1, len(head) + 1)
            chosen = rng.random(deepest) < DENSITIES[attempt // 2 % len(DENSITIES)]
            chosen[-1] = True
            kind, mask = "random", head.copy()
            mask[table.positions[:deepest][chosen]] = True
            mask = table.with_kernels(mask) | head
        if mask.tobytes() not in seen:
            seen.add(mask.tobytes())
            masks.append((kind, mask))
        if len(masks) == count:
            break
    return masks


def upper_parts(table: TimingTable, head: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Upper parts of different depth, as of `test_selections`."""
    parts = [*table.upper_parts(head)]
    return [("upper", parts[int(share * len(parts))]) for share in UPPER_SHARES]


def _without_reading(table: TimingTable) -> TimingTable:
    """The same where features are there already: the measured steps do not read them."""
    return replace(table, fit=replace(table.fit, reading_factor=0.0, writing_factor=0.0))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Profile the network, measure other selections for `seconds`, and compare them with what the table predicts."""
    network, is_short = args.network, args.table == "short"
    model = models.build(network)
    training = measuring.idle_training(model, network)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        measurement = (
            measuring.measure(training, QUICK_SECONDS, quick_until=np.inf) if is_short else measuring.measure(training)
        )
        table = make_table(measurement, table_settings(network), Path(folder))
        profiling_seconds = time.perf_counter() - start
        by_flops = make_table(measurement, table_settings(network), Path(folder), timing="flops")
    count, head = args.selections or (12 if network.model_name == "vit" else 32), head_mask(model)
    selections = upper_parts(table, head) if is_short else test_selections(table, head, count)
    kinds, masks = [kind for kind, _ in selections], [mask for _, mask in selections]
    # Compiled again: steps that ran while profiling seemed to be faster than new ones (docs/log/time_model.md).
    runs = measuring.compile_steps(training, [*masks, *measurement.masks[MEASURED_AGAIN]])
    tested, again = runs[: len(masks)], runs[len(masks) :]
    on_features = {index: run for index, each in enumerate(tested) if (run := measuring.compile_from_features(each))}
    step_ms = measuring.measure_steps([*tested, *on_features.values(), *again], args.seconds)

    median_ms, fitted_ms = np.median(step_ms, axis=0), np.median(measurement.step_ms, axis=0)
    cases = [(index, 1.0) for index in range(len(masks))] + [(index, 0.0) for index in on_features]
    measured, references = np.split(median_ms, [len(cases)])
    slowdown = float(np.median(references / fitted_ms[MEASURED_AGAIN]))
    unscaled, flops_predicted = (
        np.array([_without_reading(each).predict_ms(masks[index], misses) for index, misses in cases])
        for each in (table, by_flops)
    )
    predicted = slowdown * unscaled
    cached = slice(len(masks), None)
    points = [
        {
            "kind": kinds[index],
            "cached": misses == 0,
            "tensors": int(masks[index].sum()),
            "predicted_ms": p,
            "measured_ms": m,
        }
        for (index, misses), p, m in zip(cases, predicted.tolist(), measured.tolist(), strict=True)
    ]
    return {
        "optimizer": network.optimizer,
        "selections": len(masks),
        "rounds": len(step_ms),
        **errors(predicted, measured),
        "cached_features": errors(predicted[cached], measured[cached]) if on_features else None,
        "speed_change_percent": 100 * (slowdown - 1),
        "unscaled": errors(unscaled, measured),
        "by_flops": errors(slowdown * flops_predicted, measured),
        "repeat_spread_percent": float(100 * np.median(np.abs(step_ms / median_ms - 1))),
        "full_step_ms": {"profiled": table.full_step_ms, "measured": float(references[0])},
        "fit": vars(table.fit),
        "unmatched_time_percent": table.details["unmatched_time_percent"],
        "profiling_seconds": profiling_seconds,
        "points": points,
    }


SETTINGS = {
    "selections": Setting(None, 8, "how many (default: 32; 12 for vit)", {"type": int}),
    "seconds": Setting(150.0, 5.0, "time for measuring"),
    "table": Setting("long", "long", "short: as of a run without a table", {"choices": ("long", "short")}),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
