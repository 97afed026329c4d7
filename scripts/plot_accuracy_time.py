#!/usr/bin/env python
"""Compare finished runs: a table on standard output, and a figure of test accuracy over training time.

The run with full_training is what times are held against.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import utils
from utils import UserError

ORDER = ("elastic_training", "full_training", "bn_plus_bias_training", "traditional_tl_training")
ALIKE = ("model_name", "dataset_name", "input_size", "batch_size", "num_classes", "alpha", "optimizer")
LABELS = {
    "elastic_training": "ElasticTrainer",
    "full_training": "Full training",
    "bn_plus_bias_training": "BN+Bias",
    "traditional_tl_training": "Traditional TL",
}


def read_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Summaries of the runs in `folders`, each with its metrics' rows under "epochs_seen", in the order of `ORDER`.

    Raises:
        UserError: a folder holds no finished run, or the runs differ in what must be alike to compare them.
    """
    runs: list[dict[str, Any]] = []
    for folder in folders:
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
                summary["epochs_seen"] = list(csv.DictReader(file))
            summary["setting"] = {key: config[key] for key in ALIKE}
            summary["rank"] = ORDER.index(summary["train_type"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: does not hold a finished run ({error})") from error
        if runs and summary["setting"] != runs[0]["setting"]:
            key = next(key for key in ALIKE if summary["setting"][key] != runs[0]["setting"][key])
            raise UserError(f"{folder}: --{key} differs from that of {folders[0]}; name runs of one setting")
        runs.append(summary)
    return sorted(runs, key=lambda run: (run["rank"], run["rho"] or 0))


def table(runs: list[dict[str, Any]]) -> str:
    """Scheme, accuracy, time, and time and step over full training's, as text."""
    full = next((run for run in runs if run["train_type"] == "full_training"), None)
    header = ("scheme", "test accuracy", "training s", "time over full", "rho asked", "rho measured")
    rows = [header]
    for run in runs:
        rows.append(
            (
                LABELS[run["train_type"]],
                f"{run['final_accuracy']:.1%}",
                f"{run['train_seconds']:.1f}",
                _ratio(run, full, "train_seconds"),
                f"{run['rho']:.2f}" if run["rho"] else "-",
                _ratio(run, full, "median_step_ms"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _ratio(run: dict[str, Any], full: dict[str, Any] | None, key: str) -> str:
    return f"{run[key] / full[key]:.2f}" if full and run[key] and full[key] else "-"


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
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--output", type=Path, default=Path("figures/accuracy_time"), help="figure without its ending")
    args = parser.parse_args()
    runs = read_runs(args.runs)
    print(table(runs))
    draw(runs, args.output)
    print(f"figure: {args.output}.pdf and .png")


if __name__ == "__main__":
    utils.run_cli(main)
