#!/usr/bin/env python
"""What does a person wait for? Short runs of main.py, and when each of them had done what.

One run of full training and one of elastic training for each batch size, after `profiler.py`. Times are seconds after
the start of the program; those of a part of the run are seconds that it took in all.

    python scripts/benchmarks/benchmark_waiting.py --data_dir photos
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from common import ROOT, Setting

import utils
from elastic_trainer.errors import UserError
from elastic_trainer.machine import cores

SCHEMES = ("full_training", "elastic_training_upper_part")


def call(script: str, flags: list[str]) -> float:
    """Run a program of the project; returns how long it took. Raises `UserError` with its last line if it fails."""
    start = time.perf_counter()
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = [sys.executable, str(ROOT / script), *flags]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(done.stderr.strip().rpartition("\n")[2])
    return time.perf_counter() - start


def waited(summary: dict[str, Any]) -> dict[str, float | None]:
    """Seconds after the start, then seconds of each part, from a summary.json."""
    reached, parts = summary["seconds_after_start"], summary["selection_part_seconds"]
    return {
        **{f"{name}_after": reached.get(name) for name in ("tensorflow", "images", "first_step", "end")},
        **{f"{name}_in_all": value for name, value in parts.items()},
        "first_model_in_all": summary["first_model_seconds"],
        "features_in_all": summary["feature_seconds"],
        "validation_in_all": summary["validation_seconds"],
        "training_in_all": summary["train_seconds"],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the profile and of each run."""
    found: dict[str, Any] = {"cores": cores(), "end_after": {}}
    data = ["--dataset_name", "image_folder", "--data_dir", str(args.data_dir)] if args.data_dir else []
    for batch_size in args.batch_sizes:
        with tempfile.TemporaryDirectory() as folder:
            shared = [*data, "--logdir", folder, "--batch_size", str(batch_size)]
            shared += ["--input_size", str(args.size)] if args.size else []
            shared += ["--weights", args.weights] if args.weights else []
            row: dict[str, Any] = {"profile_in_all": call("profiler.py", [*shared, "--seconds", "5"])}
            found[f"batch_{batch_size}"] = row
            for scheme in SCHEMES:
                flags = ["--train_type", scheme, "--num_epochs", str(args.epochs), "--run_name", scheme]
                call("main.py", [*shared, *flags])
                row[scheme] = waited(json.loads((Path(folder) / scheme / "summary.json").read_text()))
                found["end_after"][f"batch {batch_size}, {scheme}"] = row[scheme]["end_after"]
                print(f"batch {batch_size}, {scheme}:", json.dumps(row[scheme]), flush=True)
    return found


SETTINGS = {
    "data_dir": Setting(None, None, "of an image_folder (default: the handwritten digits)", {"type": Path}),
    "weights": Setting("", "", "to start from (default: that of main.py)"),
    "size": Setting(0, 0, "of the images (default: that of the data set)"),
    "batch_sizes": Setting([4, 32], [32], "of the runs", {"type": int, "nargs": "+", "metavar": "N"}),
    "epochs": Setting(4, 1, "of each run"),
}

if __name__ == "__main__":
    utils.run_cli(lambda: common.run_benchmark("benchmark_waiting", __doc__, SETTINGS, measure, takes_network=False))
