#!/usr/bin/env python
"""Kill a run again and again; does it end as a run that was left alone?

Trains the embedded default elastically with --deterministic, once unbroken, once killed with SIGKILL at random moments
and started anew with --resume each time. Every third kill falls into the writing of a checkpoint: it waits until the
temporary file is there. Then compares the two: weights of last.keras bit for bit, the tables but for their times, and
TensorBoard's events (no step twice, none missing). Prints one JSON object as its last line; exit status 2 if anything
differs.

    python scripts/torture_resume.py
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

import utils
from elastic_trainer.machine import environment

# Columns that the clock and other meters fill; all others must be equal.
METERED = {"train_seconds", "selection_seconds", "validation_seconds", "median_step_ms", "measured_step_ms"}
METERED |= {"energy_joules", "peak_memory_mb", "gpu_peak_memory_mb"}


def python(script: str, *arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """Start one of the project's scripts with its output appended to `log`."""
    words = [sys.executable, str(common.ROOT / script), *map(str, arguments)]
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, cwd=common.ROOT)


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end. Raises `UserError` with the last line of its log if it failed."""
    if process.wait():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise utils.UserError(f"a run failed: {lines[-1] if lines else 'without a word'}")


def kill_somewhere(process: subprocess.Popen[bytes], folder: Path, seconds: float, while_saving: bool) -> str | None:
    """Kill `process` after `seconds`, or from then on while it writes a checkpoint; None if it ended before."""
    begin, moment = time.monotonic(), "saving" if while_saving else "anywhere"
    while process.poll() is None:
        waited = time.monotonic() - begin
        saving = any((folder / "checkpoints").glob(".*.npz"))
        if waited >= seconds and (saving or not while_saving or waited > seconds + 30):
            process.kill()
            process.wait()
            return moment if saving or not while_saving else "anywhere"
        time.sleep(0.0005)
    return None


def equal_weights(one: Path, other: Path) -> bool:
    """Whether two .keras files hold the same weights, bit for bit."""
    import keras

    pair = [keras.models.load_model(path, compile=False).variables for path in (one, other)]
    values = [[variable.numpy().tobytes() for variable in variables] for variables in pair]
    return values[0] == values[1]


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file without what clock and meters say."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value for key, value in row.items() if key not in METERED} for row in csv.DictReader(file)]


def event_steps(folder: Path) -> dict[str, list[int]]:
    """Steps of every curve over steps, in the order they were written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=False)
    events.Reload()
    curves = [tag for tag in events.Tags()["tensors"] if not tag.startswith(("over_training", "custom_scalars"))]
    return {tag: [event.step for event in events.Tensors(tag)] for tag in curves}


def compare(unbroken: Path, tortured: Path, steps: int) -> dict[str, bool]:
    """What has to hold between the folders of the two runs, by name."""
    expected, found = event_steps(unbroken), event_steps(tortured)
    by_epoch = [tag for tag in expected if tag.startswith(("test/", "budget/", "selection/", "meters/"))]
    return {
        "weights_equal": equal_weights(unbroken / "last.keras", tortured / "last.keras"),
        "best_weights_equal": equal_weights(unbroken / "best.keras", tortured / "best.keras"),
        "metrics_equal": table(unbroken / "metrics.csv") == table(tortured / "metrics.csv"),
        "selections_equal": table(unbroken / "selections.csv") == table(tortured / "selections.csv"),
        "events_without_overlap": all(sorted(set(points)) == points for points in found.values()),
        "events_without_gap": all(set(expected[tag]) <= set(found[tag]) for tag in by_epoch)
        and found["train/loss"][-1] == steps,
        "nothing_left_over": not [*tortured.rglob(".*")] and not (tortured / "checkpoints").exists(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--num_epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="3 kills, 3 epochs")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the two runs there")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.num_epochs = 3, 3
    utils.load_tensorflow()
    work = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        record = torture(work, args)
    finally:
        if args.output is not None:
            shutil.copytree(work, args.output, dirs_exist_ok=True)
        shutil.rmtree(work)
    print(json.dumps(record))
    if not all(record["held"].values()):
        raise utils.UserError(f"differs: {', '.join(name for name, held in record['held'].items() if not held)}")


def torture(logdir: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs, and what came of them."""
    log = logdir / "output.txt"
    finish(python("profiler.py", "--logdir", logdir, log=log), log)
    flags = ["--logdir", logdir, "--num_epochs", args.num_epochs, "--interval", 1.5, "--deterministic", "--save_model"]
    flags += ["--checkpoint_steps", 10]
    begin = time.monotonic()
    finish(python("main.py", *flags, "--run_name", "unbroken", log=log), log)
    unbroken_seconds = time.monotonic() - begin

    rng, kills = random.Random(args.seed), {"anywhere": 0, "saving": 0}
    held: dict[str, bool] = {}
    folder, finished = logdir / "tortured", 0
    begin = time.monotonic()
    while sum(kills.values()) < args.kills or not finished or folder.exists():
        process = python("main.py", *flags, "--run_name", folder.name, "--resume", log=log)
        count = sum(kills.values())
        seconds = rng.uniform(0.0, 0.9 * unbroken_seconds)
        moment = kill_somewhere(process, folder, seconds, count % 3 == 0) if count < args.kills else None
        if moment is not None:
            kills[moment] += 1
            continue
        finish(process, log)  # the rest of the kills fall on another run
        finished += 1
        for name, equal in compare(logdir / "unbroken", folder, json_of(folder / "summary.json")["steps"]).items():
            held[name] = equal and held.get(name, True)
        folder.rename(logdir / f"tortured-{finished}")
    return {
        "kills": sum(kills.values()),
        "kills_while_a_checkpoint_was_written": kills["saving"],
        "runs_they_fell_on": finished,
        "steps": json_of(logdir / "unbroken" / "summary.json")["steps"],
        "unbroken_seconds": round(unbroken_seconds, 1),
        "tortured_seconds": round(time.monotonic() - begin, 1),
        "held": held,
        "environment": environment(),
    }


def json_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    utils.run_cli(main)
