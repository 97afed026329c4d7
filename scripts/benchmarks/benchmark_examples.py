#!/usr/bin/env python
"""Does ElasticTraining pay in `fit`? Wall time and results of whole fits with it and without it.

Measured are the examples of docs/in_your_script.md, with more epochs and without early stopping, and the fine-tuning of
MobileNetV2 on a folder of photos. For each of `--minutes`, an example has as many epochs as plain `fit` trains in that
time. It runs as it is, and with a callback in place of `ElasticTraining` that does nothing; the two ways alternate,
each run is a process of its own, and nothing is kept from one run to the next. Seconds are those of `fit`, with all
that it measures, compiles and validates. Each finished pair is written to `--record`; the next start goes on from
there. Prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_examples.py --record pays.json --photos DIR --weights_file FILE
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
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
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_json
from elastic_trainer.system.machine import in_own_process

PAGE = common.ROOT / "docs" / "in_your_script.md"
WAYS = ("plain", "elastic")
PAGE_EPOCHS = 6  # of each example on the page
FINE_TUNING = """
import keras
import numpy as np

from elastic_trainer import ElasticTraining, freeze_batch_norm


def photos(part):
    how = {"image_size": (160, 160), "crop_to_aspect_ratio": True, "shuffle": False, "verbose": False}
    data = keras.utils.image_dataset_from_directory(f"{folder}/{part}", **how)
    images, labels = zip(*((images.numpy().astype("uint8"), labels) for images, labels in data))
    return np.concatenate(images), np.concatenate(labels), len(data.class_names)


keras.utils.set_random_seed(0)
(x, y, classes), (test_x, test_y, _) = photos("train"), photos("test")
scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs := keras.Input((160, 160, 3)))
backbone = keras.applications.MobileNetV2((160, 160, 3), 0.35, include_top=False, weights=weights, pooling="avg")
model = keras.Model(inputs, keras.layers.Dense(classes)(backbone(scaled)))
freeze_batch_norm(model)
rate = keras.optimizers.schedules.CosineDecay(2e-4, decay_steps=6 * len(x) // 32)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
model.fit(x, y, 32, epochs=6, validation_data=(test_x, test_y), callbacks=[ElasticTraining(rho=0.5)], verbose=0)
"""


class Epochs(keras.callbacks.Callback):
    """Appends the seconds of each epoch and what Keras reports of it to `rows`."""

    def __init__(self, rows: list[dict[str, float]]) -> None:
        super().__init__()
        self.rows = rows

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self.rows.append({"seconds": time.perf_counter() - self.start, **numbers})


def programs(page: Path = PAGE) -> dict[str, str]:
    """The complete programs of a page: those that import `elastic_trainer`, by the heading above each."""
    found, heading = dict[str, str](), ""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^#+ (?P<heading>[^\n]+)$|^```\w*\n(?P<code>.*?)^```$", text, re.DOTALL | re.MULTILINE):
        heading = match["heading"] or heading
        if "from elastic_trainer import" in (match["code"] or ""):
            found[heading] = match["code"]
    return found


def with_epochs(code: str, epochs: int) -> str:
    """A program with this many epochs, and as long a schedule, without early stopping."""
    for text in ("epochs=", "decay_steps="):
        code = re.sub(rf"\b{text}{PAGE_EPOCHS}\b", f"{text}{epochs}", code)
    return re.sub(r"\bpatience=\d+", f"patience={epochs}", code)


def run(code: str, way: str) -> dict[str, Any]:
    """A program in one of `WAYS`: seconds of `fit`, its epochs, and the lines of `ElasticTraining`.

    Raises:
        UserError: it failed; what it raised is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = in_own_process(_run, code, way, folder)
        except EOFError as error:
            raise UserError("a program failed") from error
        return found


def _run(sender: Connection, code: str, way: str, folder: str) -> None:
    os.chdir(folder)
    found: dict[str, Any] = {"seconds": 0.0, "epochs": []}
    fit, said = keras.Model.fit, io.StringIO()

    def timed(self: Any, *args: Any, callbacks: Any = (), **settings: Any) -> Any:
        start = time.perf_counter()
        with contextlib.redirect_stdout(said):
            history = fit(self, *args, callbacks=[Epochs(found["epochs"]), *callbacks], **settings)
        found["seconds"] += time.perf_counter() - start
        return history

    keras.Model.fit = timed
    if way == "plain":
        elastic_trainer.ElasticTraining = lambda *_, **__: keras.callbacks.Callback()  # type: ignore[assignment,misc]
    exec(compile(code, PAGE.name, "exec"), {"__name__": "__main__"})
    name = "ElasticTraining: "
    found["lines"] = [line.removeprefix(name) for line in said.getvalue().splitlines() if line.startswith(name)]
    sender.send(found)


def epochs_of(code: str, minutes: float) -> int:
    """How many epochs plain `fit` trains in this time, by a short run."""
    found = run(code, "plain")
    later = [row["seconds"] for row in found["epochs"][1:]]
    seconds = float(np.median(later))
    return max(round((60 * minutes - (found["seconds"] - sum(later))) / seconds) + 1, 2)


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the pairs of one example and length: medians of seconds, their ratio, and what the last epochs reported."""
    plain, elastic = ([pair[way] for pair in pairs] for way in WAYS)
    ratio = float(np.median([pair["elastic"]["seconds"] / pair["plain"]["seconds"] for pair in pairs]))
    found: dict[str, Any] = {"ratio": ratio}
    for way, runs in zip(WAYS, (plain, elastic), strict=True):
        last = [one["epochs"][-1] for one in runs]
        found[way] = {name: float(np.median([row[name] for row in last])) for name in last[0] if name != "seconds"}
        found[way]["fit_seconds"] = float(np.median([one["seconds"] for one in runs]))
    return found


def examples(args: argparse.Namespace) -> dict[str, str]:
    """The programs by name; that on photos only with their folder."""
    found = {name: code for name, code in programs().items() if "ElasticTraining" in code}
    if args.photos is not None:
        weights = "imagenet" if args.weights_file is None else str(args.weights_file.resolve())
        start = f"folder, weights = {str(args.photos.resolve())!r}, {weights!r}\n"
        found["Fine-tuning"] = start + FINE_TUNING
    return {name: code for name, code in found.items() if args.only is None or name.startswith(args.only)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All pairs, by example and minutes."""
    if args.rounds < 1 or not min(args.minutes) > 0:
        raise UserError(f"--rounds {args.rounds}, --minutes {args.minutes}: must be above 0")
    record: dict[str, Any] = json.loads(args.record.read_bytes()) if args.record.exists() else {}
    for name, code in examples(args).items():
        for minutes in args.minutes:
            entry = record.setdefault(f"{name}, {minutes:g} min", {"pairs": []})
            if "epochs" not in entry:
                entry["epochs"] = epochs_of(code, minutes)
            while len(entry["pairs"]) < args.rounds:
                ways = WAYS if len(entry["pairs"]) % 2 == 0 else reversed(WAYS)
                entry["pairs"].append({way: run(with_epochs(code, entry["epochs"]), way) for way in ways})
                entry["summary"] = summary(entry["pairs"])
                write_json(args.record, record)
            print(f"{name}, {minutes:g} min, {entry['epochs']} epochs: {entry['summary']}", flush=True)
    return {"examples": {key: {"epochs": one["epochs"], **one["summary"]} for key, one in record.items()}}


SETTINGS = {
    "rounds": Setting(1, 1, "pairs of runs of each example and length"),
    "minutes": Setting([0.8, 6.0], [0.2], "of plain fit", {"type": float, "nargs": "+"}),
    "record": Setting(Path("pays.json"), Path("pays.json"), "file of finished pairs, gone on from if there is one"),
    "photos": Setting(None, None, "folder with train and test, each with a folder a class", {"type": Path}),
    "weights_file": Setting(None, None, "of MobileNetV2 0.35 without top; default: ImageNet's", {"type": Path}),
    "only": Setting(None, None, "start of the name of one example", {"type": str}),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
