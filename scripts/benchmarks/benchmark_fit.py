#!/usr/bin/env python
"""Is rho kept in model.fit? A step of `fit` with ElasticTraining over one of plain `fit`, which alternates with it.

Before each step of the elastic fit, a twin of the model takes a step of plain Keras with as many examples. Both go
through the function that `fit` calls, so Keras' own loop is the same on both sides and left out. The first steps after
each selection compile, and are left out. Data are noise. The first run of a network measures its timing table, as a
user's does. A rho below what the head alone takes is left out. Prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_fit.py --rounds 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import keras
import numpy as np
import tensorflow as tf
from benchmark_rho import is_kept, run_rounds, standardize, step_ratios
from common import Setting

from elastic_trainer import ElasticTraining, freeze_batch_norm
from elastic_trainer.machine import is_undisturbed, stolen_seconds

RHOS = (0.3, 0.5, 0.7)
LEFT_OUT = 3  # steps after each selection


def mobilenetv2() -> tuple[keras.Model, Any, Any]:
    """MobileNetV2 0.35 at 160 pixels with 10 classes, and a batch of 16 images."""
    backbone = keras.applications.MobileNetV2((160, 160, 3), 0.35, include_top=False, weights=None, pooling="avg")
    x = keras.layers.Rescaling(1 / 127.5, -1)(inputs := keras.Input((160, 160, 3)))
    model = freeze_batch_norm(keras.Model(inputs, keras.layers.Dense(10)(backbone(x)), name="mobilenetv2"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (16, 160, 160, 3)).astype(np.float32)
    standardize(model, images)
    return model, images, rng.integers(0, 10, 16)


def transformer() -> tuple[keras.Model, Any, Any]:
    """Four blocks of attention over 64 tokens of 128 values, 8 classes, and a batch of 16 sequences."""
    x = inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1000, 128)(x)
    for _ in range(4):
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, 32)(y, y)])
        y = keras.layers.Dense(256, "gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(128)(y)])
    x = keras.layers.Dense(8)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, x, name="transformer")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    return model, rng.integers(0, 1000, (16, 64)), rng.integers(0, 8, 16)


NETWORKS: dict[str, Callable[[], tuple[keras.Model, Any, Any]]] = {
    "mobilenetv2": mobilenetv2,
    "transformer": transformer,
}


def run(name: str, steps: int, epochs: int, table: Path, rho: float) -> dict[str, Any]:
    """One elastic fit: `step_ratios` to plain steps of `fit`."""
    model, x, y = NETWORKS[name]()
    twin, *_ = NETWORKS[name]()
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    twin.make_train_function()
    twin_batches = iter(data)
    times: list[tuple[float, float, bool]] = []

    class Alternating(keras.callbacks.Callback):
        """Puts a timed step of the twin before each timed step of the model."""

        def on_train_begin(self, logs: Any = None) -> None:
            train = self.model.train_function

            def both(iterator: Any) -> Any:
                stolen = stolen_seconds()
                start = time.perf_counter()
                float(twin.train_function(twin_batches)["loss"])
                middle = time.perf_counter()
                logs = train(iterator)
                float(logs["loss"])
                end = time.perf_counter()
                is_quiet = is_undisturbed(end - start, stolen_seconds() - stolen)
                times.append((1e3 * (end - middle), 1e3 * (middle - start), is_quiet))
                return logs

            self.model.train_function = both

    elastic = ElasticTraining(rho=rho, interval=1, table=table, verbose=0)
    model.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[elastic, Alternating()])
    counted = np.array(times).reshape(epochs, steps, 3)[:, LEFT_OUT:].reshape(-1, 3)
    return {
        **step_ratios(counted),
        "by_slowdown": elastic.rho_measured,
        "predicted_by_selection": [selection.predicted_share for selection in elastic.history.selections],
        "correction": [selection.correction for selection in elastic.history.selections],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The runs of each network and feasible rho, one a round."""
    networks: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.networks:
            run_one = partial(run, name, args.steps, args.epochs, Path(folder) / name)
            networks[name] = run_rounds(args.rounds, RHOS, run_one, f"{name}, ")
    kept = {name: is_kept(records) for name, records in networks.items()}
    return {"networks": networks, "kept": kept, "rounds": args.rounds}


SETTINGS = {
    "rounds": Setting(2, 1, "runs for each rho"),
    "steps": Setting(40, 12, "steps between two selections"),
    "epochs": Setting(4, 2, "selections a run"),
    "networks": Setting([*NETWORKS], [*NETWORKS], "to train", {"nargs": "+", "choices": [*NETWORKS], "type": str}),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
