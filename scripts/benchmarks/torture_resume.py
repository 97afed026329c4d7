#!/usr/bin/env python
"""Does a run that is killed again and again end like a run that was not interrupted?

The script trains the digits default elastically with --deterministic, once without interruption. A second run is killed
with SIGKILL at random moments, and started again with --resume each time. Every third kill happens while a checkpoint
is written: it waits until the temporary file exists. Then the two are compared: weights of last.keras bit for bit, the
tables except their times, and TensorBoard's events (no step missing). If anything differs, both are kept, and the exit
status is 2; else the script prints one JSON object as its last line.

    python scripts/benchmarks/torture_resume.py
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import keras
from common import Setting
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_rows, read_summary
from elastic_trainer.system.errors import UserError

# Columns that come from clocks and other meters; all others must be equal.
METERED = {"train_seconds", "selection_seconds", "validation_seconds", "median_step_ms", "measured_step_ms"}
METERED |= {"energy_joules", "peak_memory_mb", "gpu_peak_memory_mb"}


def start(script: str, *arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """One of the project's scripts, with its output appended to `log`."""
    words = [sys.executable, str(common.ROOT / script), *map(str, arguments)]
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, cwd=common.ROOT)


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end. Raises `UserError` with the last line of its log if the process failed."""
    if process.wait():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise UserError(f"a run failed: {lines[-1] if lines else 'without a message'}")


def kill_at(process: subprocess.Popen[bytes], folder: Path, seconds: float, while_saving: bool) -> str | None:
    """Kill `process` after `seconds`, or from then on while it writes a checkpoint, which it may not do for 30 s.

    Returns:
        "saving" or "anywhere", by what the process was doing; None if it ended before.
    """
    end = time.monotonic() + seconds
    while process.poll() is None:
        late = time.monotonic() - end
        is_saving = while_saving and any((folder / "checkpoints").glob(".*step-*"))
        if late >= 0 and (is_saving or not while_saving or late > 30):
            process.kill()
            process.wait()
            return "saving" if is_saving else "anywhere"
        time.sleep(0.0005)
    return None


def weights_of(path: Path) -> list[bytes]:
    """The weights in a .keras file."""
    return [variable.numpy().tobytes() for variable in keras.models.load_model(path, compile=False).variables]


def unmetered_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file without the columns that clocks and meters fill."""
    return [{key: value for key, value in row.items() if key not in METERED} for row in read_rows(path)]


def event_steps(folder: Path) -> dict[str, list[int]]:
    """Steps of every curve over steps, in the order they were written."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=False)
    events.Reload()
    curves = events.Tags()["tensors"]
    return {tag: [event.step for event in events.Tensors(tag)] for tag in curves}


def compare(unbroken: Path, tortured: Path, steps: int) -> dict[str, bool]:
    """What must be true of the folders of the two runs, by name."""
    expected, found = event_steps(unbroken), event_steps(tortured)
    by_epoch = [tag for tag in expected if tag.startswith(("test/", "budget/", "selection/", "meters/"))]

    def equal(read: Callable[[Path], object], name: str) -> bool:
        return read(unbroken / name) == read(tortured / name)

    return {
        "weights_equal": equal(weights_of, "last.keras"),
        "best_weights_equal": equal(weights_of, "best.keras"),
        "metrics_equal": equal(unmetered_rows, METRICS),
        "selections_equal": equal(unmetered_rows, SELECTIONS),
        "events_without_gap": all(set(expected[tag]) <= set(found[tag]) for tag in by_epoch)
        and found["train/loss"][-1] == steps,
        "nothing_left_over": not [*tortured.rglob(".*")] and len([*(tortured / "checkpoints").iterdir()]) == 1,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make both runs and compare them. Raises `UserError` if they differ."""
    logdir = Path(tempfile.mkdtemp())
    log = logdir / "output.txt"
    flags = ["--dataset_name", "digits", "--logdir", logdir]
    finish(start("profiler.py", *flags, log=log), log)
    flags += ["--num_epochs", args.num_epochs, "--interval", 1.5, "--deterministic", "--save_model"]
    often = "scripts/benchmarks/often.py", "0.02"
    started = time.monotonic()
    finish(start(*often, *flags, "--run_name", "unbroken", log=log), log)
    unbroken_seconds = time.monotonic() - started

    rng, kills, results = random.Random(args.seed), list[str](), list[dict[str, bool]]()
    folder = logdir / "tortured"
    while len(kills) < args.kills or not results or folder.exists():
        process = start(*often, *flags, "--run_name", folder.name, "--resume", log=log)
        seconds = rng.uniform(0.0, 0.9 * unbroken_seconds)
        moment = kill_at(process, folder, seconds, len(kills) % 3 == 0) if len(kills) < args.kills else None
        if moment is not None:
            kills.append(moment)
            continue
        finish(process, log)  # the remaining kills happen to another run
        results.append(compare(logdir / "unbroken", folder, read_summary(folder)["steps"]))
        folder.rename(logdir / f"tortured-{len(results)}")
    kept = {name: all(one[name] for one in results) for name in results[0]}
    if not all(kept.values()):
        raise UserError(f"{logdir}: differs: {', '.join(name for name, equal in kept.items() if not equal)}")
    shutil.rmtree(logdir)
    return {
        "kills": len(kills),
        "kills_while_a_checkpoint_was_written": kills.count("saving"),
        "runs_they_fell_on": len(results),
        "unbroken_seconds": round(unbroken_seconds, 1),
        "kept": kept,
    }


SETTINGS = {
    "kills": Setting(30, 3, "how often to kill"),
    "seed": Setting(0, 0, "of the moments"),
    "num_epochs": Setting(6, 3, "of each run"),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
