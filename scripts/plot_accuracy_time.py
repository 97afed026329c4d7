#!/usr/bin/env python
"""Compare finished runs: a table on standard output, and a figure of test accuracy over training time.

Every folder under --logdir that holds a summary.json is a run; the run with full_training is what times are held
against.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import utils
from utils import UserError

ORDER = ("elastic_training", "full_training", "bn_plus_bias_training", "traditional_tl_training")
LABELS = {
    "elastic_training": "ElasticTrainer",
    "full_training": "Full training",
    "bn_plus_bias_training": "BN+Bias",
    "traditional_tl_training": "Traditional TL",
}


def read_runs(logdir: Path) -> list[dict[str, Any]]:
    """Summaries of the runs in `logdir`, each with its metrics' rows under "epochs_seen", in the order of `ORDER`."""
    runs = []
    for path in sorted(logdir.glob("*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        with (path.parent / "metrics.csv").open(newline="", encoding="utf-8") as file:
            summary["epochs_seen"] = list(csv.DictReader(file))
        runs.append(summary)
    if not runs:
        raise UserError(f"--logdir {logdir}: holds no finished run (no folder in it has a summary.json)")
    return sorted(runs, key=lambda run: (ORDER.index(run["train_type"]), run["rho"] or 0))


def table(runs: list[dict[str, Any]]) -> str:
    """Scheme, accuracy, time, and time and step over full training's, as text."""
    full = next((run for run in runs if run["train_type"] == "full_training"), None)
    header = ("scheme", "test accuracy", "training s", "time over full", "rho asked", "rho measured")
    rows = [header]
    for run in runs:
        measured = full and run["median_step_ms"] and full["median_step_ms"]
        rows.append(
            (
                LABELS[run["train_type"]],
                f"{run['final_accuracy']:.1%}",
                f"{run['train_seconds']:.1f}",
                f"{run['train_seconds'] / full['train_seconds']:.2f}" if full else "-",
                f"{run['rho']:.2f}" if run["rho"] else "-",
                f"{run['median_step_ms'] / full['median_step_ms']:.2f}" if full and measured else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], stem: Path) -> None:
    """Test accuracy over training time, a curve a run, as `stem`.pdf and .png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        label = LABELS[run["train_type"]] + (f" (ρ = {run['rho']:g})" if run["rho"] else "")
        seconds = [float(row["train_seconds"]) for row in run["epochs_seen"]]
        accuracy = [100 * float(row["test_accuracy"]) for row in run["epochs_seen"]]
        axes.plot(seconds, accuracy, marker="o", markersize=3, label=label)
    axes.set_xlabel("training time without validation (s)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"{runs[0]['model_name']} on {runs[0]['dataset_name']}")
    axes.grid(alpha=0.3)
    axes.legend()
    utils.save_figure(figure, stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", type=Path, default=Path("logs"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("figures/accuracy_time"), help="figure without its ending")
    args = parser.parse_args()
    runs = read_runs(args.logdir)
    print(table(runs))
    draw(runs, args.output)
    print(f"figure: {args.output}.pdf and .png")


if __name__ == "__main__":
    utils.run_cli(main)
