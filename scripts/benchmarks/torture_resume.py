#!/usr/bin/env python
"""Does a run that is killed again and again end like a run that was not interrupted?

The script trains the digits default elastically with --deterministic, once without interruption. A second run is killed
with SIGKILL at random moments, and started again with --resume each time. Every third kill happens while a checkpoint
is written: it waits until the temporary file exists. Then the two are compared: weights of last.keras bit for bit, the
tables except their times, and TensorBoard's events (no step twice, none missing). The script prints one JSON object as
its last line. The exit status is 2 if anything differs.

    python scripts/benchmarks/torture_resume.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import keras
from common import Setting
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_trainer.errors import UserError
from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_rows, read_summary

# Columns that come from clocks and other meters; all others must be equal.
METERED = {"train_seconds", "selection_seconds", "validation_seconds", "median_step_ms", "measured_step_ms"}
METERED |= {"energy_joules", "peak_memory_mb", "gpu_peak_memory_mb"}


def python(script: str, *arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """Start one of the project's scripts with its output appended to `log`."""
    words = [sys.executable, str(common.ROOT / script), *map(str, arguments)]
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, cwd=common.ROOT)


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end. Raises `UserError` with the last line of its log if the process failed."""
    if process.wait():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise UserError(f"a run failed: {lines[-1] if lines else 'without a message'}")


def kill_at(process: subprocess.Popen[bytes], folder: Path, seconds: float, while_saving: bool) -> str | None:
    """Kill `process` after `seconds`, or from then on while it writes a checkpoint.

    Returns:
        "saving" or "anywhere", by what the process was doing; None if it ended before.
    """
    start, moment = time.monotonic(), "saving" if while_saving else "anywhere"
    while process.poll() is None:
        waited = time.monotonic() - start
        is_saving = any((folder / "checkpoints").glob(".*step-*"))
        if waited >= seconds and (is_saving or not while_saving or waited > seconds + 30):
            process.kill()
            process.wait()
            return moment if is_saving or not while_saving else "anywhere"
        time.sleep(0.0005)
    return None


def equal_weights(one: Path, other: Path) -> bool:
    """Whether two .keras files hold the same weights, bit for bit."""
    pair = [keras.models.load_model(path, compile=False).variables for path in (one, other)]
    values = [[variable.numpy().tobytes() for variable in variables] for variables in pair]
    return values[0] == values[1]


def unmetered_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file without the columns that clocks and meters fill."""
    return [{key: value for key, value in row.items() if key not in METERED} for row in read_rows(path)]


def event_steps(folder: Path) -> dict[str, list[int]]:
    """Steps of every curve over steps, in the order they were written."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=False)
    events.Reload()
    curves = [tag for tag in events.Tags()["tensors"] if not tag.startswith(("over_training", "custom_scalars"))]
    return {tag: [event.step for event in events.Tensors(tag)] for tag in curves}


def compare(unbroken: Path, tortured: Path, steps: int) -> dict[str, bool]:
    """What must be true of the folders of the two runs, by name."""
    expected, found = event_steps(unbroken), event_steps(tortured)
    by_epoch = [tag for tag in expected if tag.startswith(("test/", "budget/", "selection/", "meters/"))]
    metrics, selections = (
        unmetered_rows(unbroken / name) == unmetered_rows(tortured / name) for name in (METRICS, SELECTIONS)
    )
    return {
        "weights_equal": equal_weights(unbroken / "last.keras", tortured / "last.keras"),
        "best_weights_equal": equal_weights(unbroken / "best.keras", tortured / "best.keras"),
        "metrics_equal": metrics,
        "selections_equal": selections,
        "events_without_overlap": all(sorted(set(points)) == points for points in found.values()),
        "events_without_gap": all(set(expected[tag]) <= set(found[tag]) for tag in by_epoch)
        and found["train/loss"][-1] == steps,
        "nothing_left_over": not [*tortured.rglob(".*")] and not (tortured / "checkpoints").exists(),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make both runs and compare them. Raises `UserError` if they differ."""
    with contextlib.ExitStack() as stack:
        record = torture(args.output or Path(stack.enter_context(tempfile.TemporaryDirectory())), args)
    if not all(record["held"].values()):
        print(json.dumps(record))
        raise UserError(f"differs: {', '.join(name for name, equal in record['held'].items() if not equal)}")
    return record


def torture(logdir: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make both runs under `logdir` and compare them."""
    logdir.mkdir(parents=True, exist_ok=True)
    log = logdir / "output.txt"
    finish(python("profiler.py", "--logdir", logdir, log=log), log)
    flags = ["--logdir", logdir, "--num_epochs", args.num_epochs, "--interval", 1.5, "--deterministic", "--save_model"]
    flags += ["--checkpoint_minutes", 0.02]
    start = time.monotonic()
    finish(python("main.py", *flags, "--run_name", "unbroken", log=log), log)
    unbroken_seconds = time.monotonic() - start

    rng, kills = random.Random(args.seed), {"anywhere": 0, "saving": 0}
    results: dict[str, bool] = {}
    folder, finished = logdir / "tortured", 0
    start = time.monotonic()
    while sum(kills.values()) < args.kills or not finished or folder.exists():
        process = python("main.py", *flags, "--run_name", folder.name, "--resume", log=log)
        count = sum(kills.values())
        seconds = rng.uniform(0.0, 0.9 * unbroken_seconds)
        moment = kill_at(process, folder, seconds, count % 3 == 0) if count < args.kills else None
        if moment is not None:
            kills[moment] += 1
            continue
        finish(process, log)  # the remaining kills happen to another run
        finished += 1
        for name, equal in compare(logdir / "unbroken", folder, read_summary(folder)["steps"]).items():
            results[name] = equal and results.get(name, True)
        folder.rename(logdir / f"tortured-{finished}")
    return {
        "kills": sum(kills.values()),
        "kills_while_a_checkpoint_was_written": kills["saving"],
        "runs_they_fell_on": finished,
        "steps": read_summary(logdir / "unbroken")["steps"],
        "unbroken_seconds": round(unbroken_seconds, 1),
        "tortured_seconds": round(time.monotonic() - start, 1),
        "held": results,
    }


SETTINGS = {
    "kills": Setting(30, 3, "how often to kill"),
    "seed": Setting(0, 0, "of the moments"),
    "num_epochs": Setting(6, 3, "of each run"),
    "output": Setting(None, None, "keep the two runs there", {"type": Path, "metavar": "DIR"}),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
