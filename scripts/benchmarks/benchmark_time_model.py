#!/usr/bin/env python
"""Predicted against measured step time: does the timing table keep what it says?

Profiles a network as profiler.py does, then measures other selections than those of the fit: the solver's choices over
a grid of rho with random importances, and random selections of different depth and density. Each is a real training
step with its updates; all take turns, round by round, in one process. A shared machine changes its speed between the
two: some of the fit's selections take turns with the others, and their times, over those they had while profiling, are
the speed that predictions are scaled by (`speed_change_percent`; errors without it are `unscaled`). Draws the scatter
plot and prints one JSON object as its last line.

    python scripts/benchmark_time_model.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import common
import numpy as np

import utils
from elastic_trainer.machine import environment
from elastic_trainer.timing.fit import selection_sums
from elastic_trainer.timing.table import TimingTable, table_settings

RHOS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
DENSITIES = (1.0, 0.5, 0.2, 0.05)
REFERENCE_STRIDE = 2  # every second selection of the fit is measured again


def test_selections(table: TimingTable, head: np.ndarray, count: int) -> list[tuple[str, np.ndarray]]:
    """Half the solver's choices, half random ones: (kind, bool [N] over `model.trainable_variables`), all different.

    Fewer than `count` where the network has not so many.
    """
    from elastic_trainer.selection.select import select_tensors

    rng = np.random.default_rng(1)
    smallest = table.predict_ms(head) / table.full_step_ms
    rhos = [rho for rho in RHOS if rho > smallest + 0.02]
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
        if mask.tobytes() not in seen:
            seen.add(mask.tobytes())
            masks.append((kind, mask))
        if len(masks) == count:
            break
    return masks


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """Median, 95th percentile and mean signed relative error in per cent; arrays in ms."""
    relative = 100 * (predicted / measured - 1)
    return {
        "median_error_percent": float(np.median(np.abs(relative))),
        "p95_error_percent": float(np.percentile(np.abs(relative), 95)),
        "bias_percent": float(np.mean(relative)),
    }


def _point(table: TimingTable, mask: np.ndarray, measured_ms: float) -> dict[str, float]:
    """A measured selection, with the sums that the fit sees of it."""
    chain_ms, own_ms = selection_sums(mask[table.positions], table.t_dy_ms, table.t_dw_ms)
    return {"tensors": int(mask.sum()), "chain_ms": chain_ms, "own_ms": own_ms, "measured_ms": float(measured_ms)}


def draw(title: str, kinds: list[str], predicted: np.ndarray, measured: np.ndarray, stem: Path) -> None:
    """Scatter of predicted over measured step time with the line of equality and a band of 8 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="measured step (ms)", ylabel="predicted step (ms)", title=title)
    low, high = 0.9 * min(measured.min(), predicted.min()), 1.05 * max(measured.max(), predicted.max())
    ends = np.array([low, high])
    axes.fill_between(ends, 0.92 * ends, 1.08 * ends, color="0.9", label="±8 %")
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    for kind, colour, marker in (("solver", "#0072b2", "o"), ("random", "#d55e00", "^")):
        of_kind = np.array([k == kind for k in kinds])
        label = "chosen by the solver" if kind == "solver" else "random selections"
        axes.scatter(measured[of_kind], predicted[of_kind], s=18, color=colour, marker=marker, label=label)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.legend(fontsize="small")
    utils.save_figure(figure, stem)


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_time_model.py",
        __doc__,
        selections={"type": int, "help": "how many (default: 32; 12 for vit)"},
        seconds={"type": float, "default": 150, "help": "time for measuring (default: %(default)s)"},
    )
    utils.load_tensorflow()

    import models
    import profiler
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.timing.measuring import compile_steps, measure, measure_steps

    count = args.selections or (12 if network.model_name == "vit" else 32)
    if args.quick:
        count, args.seconds = 8, 5
    model = models.build(network)
    head = head_mask(model)
        with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        measurement = measure(model, settings)
        table = profiler.make_table(measurement, Path(folder))
        profiling_seconds = time.perf_counter() - begin
        by_flops = profiler.make_table(measurement, Path(folder), timing="flops")

    kinds, masks = zip(*test_selections(table, head, count), strict=True)
    again = slice(None, None, -REFERENCE_STRIDE)  # the full step among them
    # Compiled anew: those that ran while profiling seemed to be faster than new ones (docs/time_budget.md).
    steps = compile_steps(model, network, [*masks, *measurement.masks[again]])
    times = measure_steps([run for _, run in steps], args.seconds)
    median_ms = np.median(times, axis=0)
    measured, references = np.split(median_ms, [len(masks)])
    slowdown = float(np.median(references / np.median(measurement.step_ms, axis=0)[again]))
    unscaled, flops_predicted = (np.array([t.predict_ms(mask) for mask in masks]) for t in (table, by_flops))
    predicted = slowdown * unscaled
    title, stem, measured = common.measured_network(network, "time_model", args.output)
    draw(title, list(kinds), predicted, measured, stem)
    result = {
        **measured,
        "optimizer": network.optimizer,
        "selections": len(masks),
        "rounds": len(times),
        **errors(predicted, measured),
        "speed_change_percent": 100 * (slowdown - 1),
        "unscaled": errors(unscaled, measured),
        "by_flops": errors(slowdown * flops_predicted, measured),
        "repeat_spread_percent": float(100 * np.median(np.abs(times / median_ms - 1))),
        "full_step_ms": {"profiled": table.full_step_ms, "measured": float(references[0])},
        "fit": vars(table.fit),
        "unmatched_time_percent": table.details["unmatched_time_percent"],
        "profiling_seconds": profiling_seconds,
        "points": [
            {"kind": kind, "predicted_ms": float(p), **_point(table, mask, m)}
            for kind, mask, p, m in zip(kinds, masks, predicted, measured, strict=True)
        ],
        "fitted_points": [
            _point(table, mask, m)
            for mask, m in zip(measurement.masks, np.median(measurement.step_ms, axis=0), strict=True)
        ],
        "forward_ms": table.forward_ms,
        "environment": environment(),
    }
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(result))


if __name__ == "__main__":
    utils.run_cli(main)
