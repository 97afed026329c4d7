#!/usr/bin/env python
"""Is rho kept? Short elastic runs and full training in turn; median step time of the one over the other's.

Every elastic run profits from the table and corrects its budget while it trains, as main.py does. Each is followed by a
short full training; the ratio is that of the medians over all rounds. Data: handwritten digits at the input size asked
for, a few steps an epoch. Draws asked against measured and prints one JSON object as its last line.

    python scripts/benchmark_rho.py --model_name resnet50 --input_size 224 --batch_size 4
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import options
import utils
from timing_table import TimingTable, table_settings

if TYPE_CHECKING:
    import keras

    from data import ImageData
    from train import Settings

RHOS = (0.35, 0.4, 0.5, 0.6, 0.7)


def short_data(args: Any, steps: int) -> ImageData:
    """Digits, cut to `steps` training steps an epoch and one test batch."""
    import data

    whole = data.load("digits", args.input_size, args.batch_size, args.seed)
    images = steps * args.batch_size
    train, test = (
        data.Split(split.examples.take(count), count, split.decode, one_size=split.one_size)
        for split, count in ((whole._train, images), (whole._test, args.batch_size))
    )
    return data.ImageData("digits", whole.num_classes, train, test, args.input_size, args.batch_size, args.seed)


def run(model: keras.Model, dataset: ImageData, settings: Settings, table: TimingTable | None) -> dict[str, Any]:
    """One run in a folder that is thrown away; returns its summary. Without a table: full training."""
    import models
    import train

    with tempfile.TemporaryDirectory() as folder, utils.RunLog(Path(folder), {}, models.tensor_names(model)) as log:
        if table is None:
            return train.full_training(model, dataset, settings, log)
        budget = train.make_budget(model, dataset, settings, table)
        return train.elastic_training(model, dataset, settings, log, budget)


def draw(title: str, ratios: dict[float, float], stem: Path) -> None:
    """Asked against measured, with the band of what counts as kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="ρ asked", ylabel="ρ measured (median step over full training's)", title=title)
    asked = np.array([*ratios])
    ends = np.array([asked.min() - 0.04, asked.max() + 0.04])
    axes.fill_between(ends, ends - 0.03, ends + 0.02, color="0.9", label="+0.02, -0.03")
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.plot(asked, [*ratios.values()], "o", color="#0072b2", label="measured")
    axes.legend(fontsize="small", loc="upper left")
    utils.save_figure(figure, stem)


def feasible_rhos(model: keras.Model, table: TimingTable) -> Sequence[float]:
    import models

    smallest = table.predict_ms(models.head_mask(model)) / table.full_step_ms
    return [rho for rho in RHOS if rho >= smallest]


def main() -> None:
    args = options.parse_benchmark(
        "benchmark_rho.py",
        __doc__,
        rounds={"type": int, "default": 2, "help": "elastic and full runs for each rho (default: %(default)s)"},
        steps={"type": int, "default": 30, "help": "steps between two selections (default: %(default)s)"},
        intervals={"type": int, "default": 4, "help": "selections a run (default: %(default)s)"},
    )
    utils.load_tensorflow()

    import models
    import profiler
    from train import Settings

    if args.quick:
        args.rounds, args.steps, args.intervals = 1, 10, 2
    args.num_classes = 10
    model = models.build_from_options(args)
    dataset = short_data(args, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        table = profiler.profile(model, table_settings(args), Path(folder))

    rhos = feasible_rhos(model, table)
    common: dict[str, Any] = {"optimizer": args.optimizer, "interval": 1}
    results: dict[float, list[tuple[dict[str, Any], dict[str, Any]]]] = {rho: [] for rho in rhos}
    for _ in range(args.rounds):
        for rho in rhos:
            elastic = run(model, dataset, Settings(num_epochs=args.intervals, rho=rho, **common), table)
            results[rho].append((elastic, run(model, dataset, Settings(num_epochs=1, **common), None)))
    ratios = {
        rho: float(
            np.median([e["median_step_ms"] for e, _ in pairs]) / np.median([f["median_step_ms"] for _, f in pairs])
        )
        for rho, pairs in results.items()
    }
    label = options.model_label(args)
    stem = args.output or Path("figures") / f"rho_{label}_{args.input_size}_{args.batch_size}"
    draw(f"{label}, {args.input_size}×{args.input_size}, batch {args.batch_size}", ratios, stem)
    record = {
        "model_name": args.model_name,
        "alpha": args.alpha,
        "input_size": args.input_size,
        "batch_size": args.batch_size,
        "rounds": args.rounds,
        "selections_a_run": args.intervals,
        "steps_between_selections": args.steps,
        "rho": [
            {
                "asked": rho,
                "measured": ratios[rho],
                "by_slowdown": float(np.median([elastic["rho_measured"] for elastic, _ in results[rho]])),
                "elastic_step_ms": [elastic["median_step_ms"] for elastic, _ in results[rho]],
                "full_step_ms": [full["median_step_ms"] for _, full in results[rho]],
            }
            for rho in rhos
        ],
        "kept": all(-0.03 <= ratio - rho <= 0.02 for rho, ratio in ratios.items()),
        "profiled_full_step_ms": table.full_step_ms,
        "environment": utils.environment(),
    }
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(record))


if __name__ == "__main__":
    utils.run_cli(main)
