#!/usr/bin/env python
"""Does ElasticTraining pay in `fit`? Seconds of an epoch with it and without it.

Measured are the examples of docs/in_your_script.md, and MobileNetV2 at 160 pixels. Each program runs as it is, and with
a callback in place of `ElasticTraining` that does nothing; the two ways alternate, and each run is a process of its
own. An elastic run measures its timing table, as the first start of a user's program does. An epoch includes its
validation; its steps alone are without waiting for data. The first epoch compiles and is left out. Ratios are elastic
over plain. Prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_examples.py --rounds 3
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import keras
import numpy as np
from common import Setting

import elastic_trainer
from elastic_trainer import keras_callback
from elastic_trainer.errors import UserError
from elastic_trainer.machine import in_own_process

PAGE = common.ROOT / "docs" / "in_your_script.md"
WAYS = ("plain", "elastic")
Epoch = tuple[float, float, float]  # of `Timing`
Runs = list[tuple[list[Epoch], float]]  # epochs of each run, and the seconds that measuring its timing table took
MOBILENETV2 = """
import keras
import numpy as np

from elastic_trainer import ElasticTraining, freeze_batch_norm

rng = np.random.default_rng(0)
images, labels = rng.uniform(0, 255, (640, 160, 160, 3)).astype("float32"), rng.integers(10, size=640)
x = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs := keras.Input((160, 160, 3)))
backbone = keras.applications.MobileNetV2((160, 160, 3), 0.35, include_top=False, weights=None, pooling="avg")
model = keras.Model(inputs, keras.layers.Dense(10)(backbone(x)))
for layer in backbone.layers:
    layer.momentum = 0.0
model(images[:32], training=True)
freeze_batch_norm(model)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
model.fit(images, labels, 16, epochs=7, callbacks=[ElasticTraining(rho=0.5)], verbose=0)
"""


class Timing(keras.callbacks.Callback):
    """Appends seconds of each epoch and of its steps, and its loss, to `epochs`."""

    def __init__(self, epochs: list[Epoch]) -> None:
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.start, self.steps = time.perf_counter(), 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batch = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += time.perf_counter() - self.batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append((time.perf_counter() - self.start, self.steps, logs["loss"]))


def programs(page: Path = PAGE) -> dict[str, str]:
    """The complete programs of a page: those that import `elastic_trainer`, by the heading above each."""
    found, heading = dict[str, str](), ""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^#+ (?P<heading>[^\n]+)$|^```\w*\n(?P<code>.*?)^```$", text, re.DOTALL | re.MULTILINE):
        heading = match["heading"] or heading
        if "from elastic_trainer import" in (match["code"] or ""):
            found[heading] = match["code"]
    return found


def run(code: str, way: str) -> tuple[list[Epoch], float]:
    """The epochs of a program, run in one of `WAYS`, and the seconds that measuring its timing table took.

    Raises:
        UserError: it failed; what it raised is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            epochs, profile_seconds = in_own_process(_run, code, way, folder)
        except EOFError as error:
            raise UserError(f"a program of {PAGE.name} failed") from error
        return epochs, profile_seconds


def _run(sender: Connection, code: str, way: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = folder
    epochs, profiles = list[Epoch](), list[float]()
    fit, profile = keras.Model.fit, keras_callback.profile_compiled

    def timed(self: Any, *args: Any, callbacks: Any = (), **settings: Any) -> Any:
        return fit(self, *args, callbacks=[Timing(epochs), *callbacks], **settings)

    def profiled(*args: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        table = profile(*args, **settings)
        profiles.append(time.perf_counter() - start)
        return table

    keras.Model.fit, keras_callback.profile_compiled = timed, profiled
    if way == "plain":
        elastic_trainer.ElasticTraining = lambda *_, **__: keras.callbacks.Callback()  # type: ignore[assignment,misc]
    exec(compile(code, PAGE.name, "exec"), {"__name__": "__main__"})
    sender.send((epochs, sum(profiles)))


def summary(runs: Runs) -> dict[str, float]:
    """Of the runs of a program in one way."""
    counted = np.array([epoch for epochs, _ in runs for epoch in epochs[1:]])
    epoch_seconds, step_seconds, _ = np.median(counted, axis=0).tolist()
    return {
        "epoch_seconds": epoch_seconds,
        "mean_epoch_seconds": float(counted[:, 0].mean()),
        "step_seconds": step_seconds,
        "profile_seconds": float(np.median([seconds for _, seconds in runs])),
        "loss": float(np.median([epochs[-1][2] for epochs, _ in runs])),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each program with `ElasticTraining`, by its heading: its summary in each way, and their ratios."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: must be at least 1")
    results: dict[str, dict[str, Any]] = {}
    for name, code in {**programs(), "MobileNetV2": MOBILENETV2}.items():
        if "ElasticTraining" not in code:
            continue
        runs = {way: Runs() for way in WAYS}
        for number in range(args.rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                runs[way].append(run(code, way))
        plain, elastic = (summary(runs[way]) for way in WAYS)
        ratios = {name: elastic[name] / plain[name] for name in ("epoch_seconds", "mean_epoch_seconds", "step_seconds")}
        results[name] = {"plain": plain, "elastic": elastic, "ratios": ratios}
        print(f"{name}: {', '.join(f'{key} {ratio:.2f}' for key, ratio in ratios.items())}", flush=True)
    return {"examples": results, "rounds": args.rounds}


SETTINGS = {"rounds": Setting(3, 1, "runs of each program and way")}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
