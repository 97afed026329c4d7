#!/usr/bin/env python
"""Predicted against measured step time: how accurate is the timing table?

The script profiles a network as profiler.py does. Then it measures other selections than those of the fit: the solver's
selections over a grid of rho with random importances, and random selections of different depth and density. Each is a
real training step with its updates, from images and, where layers are frozen before its first trained ones, from their
cached features; all alternate in one process. A shared machine changes its speed between the two.
Therefore some of the fit's selections are measured again with the others. Their times, over those while profiling, are
the speed that predictions are scaled by (`speed_change_percent`; errors without it are `unscaled`). The script draws a
scatter plot and prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_time_model.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common
import numpy as np

import utils
from elastic_trainer.files import save_figure
from elastic_trainer.machine import environment, load_tensorflow
from elastic_trainer.timing.fit import selection_sums
from elastic_trainer.timing.forward_costs import CACHED, COMPUTED
from elastic_trainer.timing.table import TimingTable, table_settings

if TYPE_CHECKING:
    from elastic_trainer.settings import NetworkSettings
    from elastic_trainer.timing.measuring import Measurement

SOLVED_RHOS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
DENSITIES = (1.0, 0.5, 0.2, 0.05)
REFERENCE_STRIDE = 2  # every second selection of the fit is measured again


def test_selections(table: TimingTable, head: np.ndarray, count: int) -> list[tuple[str, np.ndarray]]:
    """Half by the solver, half random, all different: (kind, bool [N] over `model.trainable_variables`).

    Fewer than `count` if the network has not enough.
    """
    from elastic_trainer.selection.select import select_tensors

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


def _without_reading(table: TimingTable) -> TimingTable:
    """The same where features are there already: the measured steps do not read them."""
    return replace(table, fit=replace(table.fit, reading_factor=0.0, writing_factor=0.0))


def point(table: TimingTable, mask: np.ndarray, measured_ms: float) -> dict[str, float]:
    """A measured selection, with sums of operation times that the fit takes."""
    t_dy_ms, t_dw_ms = selection_sums(mask[table.positions], table.t_dy_ms, table.t_dw_ms)
    return {"tensors": int(mask.sum()), "chain_ms": t_dy_ms, "own_ms": t_dw_ms, "measured_ms": float(measured_ms)}


def draw(title: str, points: Sequence[dict[str, Any]], stem: Path) -> None:
    """Scatter of predicted over measured step time with the line of equality and a band of 8 %."""
    from matplotlib.figure import Figure

    times = np.array([(point["measured_ms"], point["predicted_ms"]) for point in points])
    is_cached = np.array([point["cached"] for point in points])
    figure = Figure(figsize=(4.5, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="measured step (ms)", ylabel="predicted step (ms)", title=title)
    low, high = 0.9 * times.min(), 1.05 * times.max()
    ends = np.array([low, high])
    axes.fill_between(ends, 0.92 * ends, 1.08 * ends, color="0.9", label="±8 %")
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    for kind, colour, marker in (("solver", "#0072b2", "o"), ("random", "#d55e00", "^")):
        of_kind = np.array([point["kind"] == kind for point in points])
        label = "chosen by the solver" if kind == "solver" else "random selections"
        for chosen, filled, form in ((~is_cached, colour, ""), (is_cached, "none", ", cached features")):
            shown = times[of_kind & chosen]
            style: dict[str, Any] = {"facecolor": filled, "edgecolor": colour, "marker": marker}
            axes.scatter(shown[:, 0], shown[:, 1], s=18, label=label + form, **style)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.legend(fontsize="small")
    save_figure(figure, stem)


class Measured(NamedTuple):
    """What was measured of one network.

    Attributes:
        measurement: what the table is fitted to.
        table, by_flops: fitted to measured operation times, and to counted FLOPs.
        profiling_seconds: time for measuring and for `table`.
        kinds, masks: the tested selections, see `test_selections`.
        cached: indices of the tested selections that were measured on cached features, too.
        step_ms: [rounds, steps] times of the tested selections, of those in `cached` on features, and of those of the
            fit measured again.
    """

    measurement: Measurement
    table: TimingTable
    by_flops: TimingTable
    profiling_seconds: float
    kinds: list[str]
    masks: list[np.ndarray]
    cached: list[int]
    step_ms: np.ndarray


MEASURED_AGAIN = slice(None, None, -REFERENCE_STRIDE)  # of the fit's selections; the full step is among them


def measure_network(network: NetworkSettings, count: int, seconds: float) -> Measured:
    """Profile the network, then measure `count` other selections for `seconds`."""
    import models
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.timing.measuring import (
        compile_from_features,
        compile_steps,
        idle_training,
        measure,
        measure_steps,
    )
    from elastic_trainer.timing.profiling import make_table

    model = models.build(network)
    task, optimizer, batch = idle_training(model, network)
    settings = table_settings(network)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        measurement = measure(task, optimizer, batch)
        table = make_table(measurement, settings, Path(folder))
        profiling_seconds = time.perf_counter() - start
        by_flops = make_table(measurement, settings, Path(folder), timing="flops")
    selections = test_selections(table, head_mask(model), count)
    kinds, masks = [kind for kind, _ in selections], [mask for _, mask in selections]
    # Compiled again: steps that ran while profiling seemed to be faster than new ones (docs/log/time_model.md).
    runs = [run for _, run in compile_steps(task, optimizer, batch, [*masks, *measurement.masks[MEASURED_AGAIN]])]
    tested, again = runs[: len(masks)], runs[len(masks) :]
    on_features = {index: run for index, each in enumerate(tested) if (run := compile_from_features(each)) is not None}
    step_ms = measure_steps([*tested, *on_features.values(), *again], seconds)
    return Measured(measurement, table, by_flops, profiling_seconds, kinds, masks, [*on_features], step_ms)


def compare(of: Measured) -> dict[str, Any]:
    """What the JSON holds of the predicted and measured times."""
    table, fitted_ms = of.table, np.median(of.measurement.step_ms, axis=0)
    median_ms = np.median(of.step_ms, axis=0)
    tested = [(index, COMPUTED) for index in range(len(of.masks))] + [(index, CACHED) for index in of.cached]
    measured, references = np.split(median_ms, [len(tested)])
    slowdown = float(np.median(references / fitted_ms[MEASURED_AGAIN]))
    unscaled, flops_predicted = (
        np.array([_without_reading(t).predict_ms(of.masks[index], features) for index, features in tested])
        for t in (table, of.by_flops)
    )
    predicted = slowdown * unscaled
    cached = slice(len(of.masks), None)
    return {
        "selections": len(of.masks),
        "rounds": len(of.step_ms),
        **errors(predicted, measured),
        "cached_features": errors(predicted[cached], measured[cached]) if of.cached else None,
        "speed_change_percent": 100 * (slowdown - 1),
        "unscaled": errors(unscaled, measured),
        "by_flops": errors(slowdown * flops_predicted, measured),
        "repeat_spread_percent": float(100 * np.median(np.abs(of.step_ms / median_ms - 1))),
        "full_step_ms": {"profiled": table.full_step_ms, "measured": float(references[0])},
        "fit": vars(table.fit),
        "unmatched_time_percent": table.details["unmatched_time_percent"],
        "profiling_seconds": of.profiling_seconds,
        "points": [
            {
                "kind": of.kinds[index],
                "cached": features is CACHED,
                "predicted_ms": float(p),
                **point(table, of.masks[index], m),
            }
            for (index, features), p, m in zip(tested, predicted, measured, strict=True)
        ],
        "fitted_points": [point(table, mask, m) for mask, m in zip(of.measurement.masks, fitted_ms, strict=True)],
        "forward_ms": table.forward_ms,
    }


def main() -> None:
    network, args = common.parse_benchmark(
        "benchmark_time_model.py",
        __doc__,
        selections={"type": int, "help": "how many (default: 32; 12 for vit)"},
        seconds={"type": float, "default": 150, "help": "time for measuring (default: %(default)s)"},
    )
    load_tensorflow()
    count = args.selections or (12 if network.model_name == "vit" else 32)
    if args.quick:
        count, args.seconds = 8, 5
    measured = measure_network(network, count, args.seconds)
    comparison = compare(measured)
    title, stem, network_record = common.measured_network(network, "time_model", args.output)
    draw(title, comparison["points"], stem)
    record = {**network_record, "optimizer": network.optimizer, **comparison, "environment": environment()}
    common.print_result(record, stem)


if __name__ == "__main__":
    utils.run_cli(main)
