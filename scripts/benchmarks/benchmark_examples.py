#!/usr/bin/env python
"""Does ElasticTraining pay in the examples of docs/in_your_script.md? Seconds of an epoch with it and in plain fit.

Each program with `ElasticTraining` runs as it is, and with a callback in its place that does nothing. The two ways
alternate, each run is a process of its own. An elastic run measures its timing table, as the first start of a user's
program does. An epoch includes its validation. The first epoch compiles and is left out: `epoch_seconds` is the median
of the others, `mean_epoch_seconds` their mean, selections included. `epochs_that_pay_the_profile` is how many epochs
save, by those means, what the table took; null if none do. `step_seconds` is the time of an epoch's steps, without its
validation and without waiting for data. Prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_examples.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Setting

from elastic_trainer.errors import UserError

PAGE = common.ROOT / "docs" / "in_your_script.md"
WAYS = ("plain", "elastic")
# Runs before the program: puts the callback that does nothing in its place, and times epochs.
PREAMBLE = """
import json, runpy, sys, time
import keras
import elastic_trainer
from elastic_trainer import keras_callback

program, record, way = sys.argv[1:]
epochs, profiles = [], []


class Nothing(keras.callbacks.Callback):
    def __init__(self, *args, **settings):
        super().__init__()


class Epochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.start, self.steps = time.perf_counter(), 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self.batch = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += time.perf_counter() - self.batch

    def on_epoch_end(self, epoch, logs=None):
        epochs.append({"seconds": time.perf_counter() - self.start, "step_seconds": self.steps, **logs})


def timed(self, *args, callbacks=(), fit=keras.Model.fit, **settings):
    return fit(self, *args, callbacks=[Epochs(), *callbacks], **settings)


def profiled(*args, profile=keras_callback.profile_compiled, **settings):
    start = time.perf_counter()
    table = profile(*args, **settings)
    profiles.append(time.perf_counter() - start)
    return table


keras.Model.fit = timed
keras_callback.profile_compiled = profiled
if way == "plain":
    elastic_trainer.ElasticTraining = Nothing
runpy.run_path(program, run_name="__main__")
with open(record, "w") as file:
    json.dump([epochs, sum(profiles)], file)
"""


def programs(page: Path = PAGE) -> dict[str, str]:
    """The complete programs of a page: those that import `elastic_trainer`, by the heading above each."""
    found, heading = dict[str, str](), ""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^#+ (?P<heading>[^\n]+)$|^```\w*\n(?P<code>.*?)^```$", text, re.DOTALL | re.MULTILINE):
        heading = match["heading"] or heading
        if "from elastic_trainer import" in (match["code"] or ""):
            found[heading] = match["code"]
    return found


def run(code: str, way: str) -> tuple[list[dict[str, float]], float]:
    """Run a program in a new folder.

    Args:
        code: of the program.
        way: of `WAYS`.

    Returns:
        Seconds and results of each epoch, and the seconds that measuring the timing table took.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, record = Path(folder) / "program.py", Path(folder) / "record.json"
        program.write_text(code, encoding="utf-8")
        paths = [str(common.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": folder}
        words = [sys.executable, "-c", PREAMBLE, str(program), str(record), way]
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"a program of {PAGE.name} failed: {done.stderr.strip().splitlines()[-1]}")
        epochs, profile_seconds = json.loads(record.read_text())
        return epochs, profile_seconds


def summary(runs: list[tuple[list[dict[str, float]], float]]) -> dict[str, float]:
    """Of the runs of a program in one way; see the module's header."""
    seconds = [epoch["seconds"] for epochs, _ in runs for epoch in epochs[1:]]
    return {
        "epoch_seconds": float(np.median(seconds)),
        "mean_epoch_seconds": float(np.mean(seconds)),
        "step_seconds": float(np.median([epoch["step_seconds"] for epochs, _ in runs for epoch in epochs[1:]])),
        "fit_seconds": float(np.median([sum(epoch["seconds"] for epoch in epochs) for epochs, _ in runs])),
        "profile_seconds": float(np.median([profile for _, profile in runs])),
        "loss": float(np.median([epochs[-1]["loss"] for epochs, _ in runs])),
    }


def measure(code: str, rounds: int) -> dict[str, Any]:
    """The summary of a program in each way, and the ratios of elastic over plain."""
    runs: dict[str, list[tuple[list[dict[str, float]], float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            runs[way].append(run(code, way))
    of = {way: summary(each) for way, each in runs.items()}
    plain, elastic = (of[way] for way in WAYS)
    saved = plain["mean_epoch_seconds"] - elastic["mean_epoch_seconds"]
    return {
        **of,
        "ratio": elastic["epoch_seconds"] / plain["epoch_seconds"],
        "step_ratio": elastic["step_seconds"] / plain["step_seconds"],
        "mean_ratio": elastic["mean_epoch_seconds"] / plain["mean_epoch_seconds"],
        "epochs_that_pay_the_profile": elastic["profile_seconds"] / saved if saved > 0 else None,
    }


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Each program with `ElasticTraining`, by its heading; prints one line for each."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: must be at least 1")
    results = {}
    for name, code in programs().items():
        if "ElasticTraining" not in code:
            continue
        results[name] = one = measure(code, args.rounds)
        print(
            f"{name}: epoch {one['plain']['epoch_seconds']:.2f} s plain, {one['elastic']['epoch_seconds']:.2f} s "
            f"elastic, ratio {one['ratio']:.2f}, {one['mean_ratio']:.2f} with selections, {one['step_ratio']:.2f} of "
            f"steps alone; profile {one['elastic']['profile_seconds']:.0f} s",
            flush=True,
        )
    return {"examples": results, "rounds": args.rounds}


SETTINGS = {"rounds": Setting(3, 1, "runs of each program and way")}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure_all, takes_network=False)
