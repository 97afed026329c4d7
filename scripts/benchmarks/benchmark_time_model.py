#!/usr/bin/env python
"""How well step times are predicted without a timing table, and beside that by profiler.py's.

A run without a table goes by FLOPs and bytes, and by its own steps: after ten of them it selects again. For each of
five networks, an elastic run at rho 0.5 alternates with steps of full training, as in benchmark_rho.py. Of each of its
selections, the step is measured over a full one, and predicted: by the run when it selected, and by a table of
profiler.py. The script prints one JSON object as its last line.

    python scripts/benchmarks/benchmark_time_model.py
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import keras
import numpy as np
from benchmark_rho import EPOCHS, Alternating, prepared, profiled_table
from common import Setting
from keras import layers

from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.settings import Settings

NETWORKS: dict[str, tuple[int, int]] = {  # input size and batch size
    "mobilenetv2": (160, 16),
    "resnet50": (160, 4),
    "efficientnetlite0": (160, 8),
    "vit_block": (64, 32),
    "recurrent": (64, 32),
}


def vit_block(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Patches of 8 pixels, and three blocks of a transformer."""
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(192, 8, strides=8)(layers.Rescaling(1 / 255)(inputs))
    x = layers.Reshape((-1, 192))(x)
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 48)(y, y)])
        y = layers.Dense(768, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(192)(y)])
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))


def recurrent(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Each row of the image is a step of a sequence."""
    inputs = keras.Input(input_shape)
    x = layers.Reshape((input_shape[0], -1))(layers.Rescaling(1 / 255)(inputs))
    for _ in range(3):
        x = layers.GRU(128, return_sequences=True)(x)
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GRU(128)(x)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    names = args.only.split(",") if args.only else NETWORKS
    found = {name: _measure(name, args.steps, args.seconds) for name in names}
    medians: dict[int, dict[str, float]] = {}
    for rows in zip(*(one["selections"] for one in found.values()), strict=True):
        errors = {way: [abs(row[way] / row["measured"] - 1) for row in rows] for way in ("predicted", "by_table")}
        medians[rows[0]["step"]] = {way: 100 * statistics.median(each) for way, each in errors.items()}
    return {"networks": found, "steps": args.steps, "median_error_percent_by_step": medians}


def _measure(name: str, steps: int, seconds: float) -> dict[str, Any]:
    """The selections of a run without a table: what a step takes over a full one, measured and predicted."""
    size, batch_size = NETWORKS[name]
    own = f"{Path(__file__).resolve()}:{name}"
    network = Settings(
        model_name=own if name in globals() else name,
        input_size=size,
        batch_size=batch_size,
        num_classes=10,
        weights="none",
        dataset_name="digits",
        preset="demo",
    )
    model, data, full = prepared(network, steps)
    table = profiled_table(model, network, seconds)
    settings = replace(network, num_epochs=EPOCHS, interval=EPOCHS, rho=0.5, learning_rate=1e-4, feature_cache="off")
    listener = Alternating(full)
    trainer = Trainer(model, data, "elastic_training", settings, [listener])
    trainer.run()
    rows = []
    for one, times in zip(trainer.history.selections, listener.by_selection(), strict=True):
        own_ms, _, full_ms = np.median(times[~np.isnan(times[:, 0])], axis=0)
        by_table = table.predict_ms(one.mask) / table.full_step_ms
        rows.append({
            "step": one.step,
            "measured": float(own_ms / full_ms),
            "predicted": one.predicted_share,
            "by_table": by_table,
            "tensors": int(one.mask.sum()),
        })  # fmt: skip
        print(f"{name}, step {one.step}: {rows[-1]}", flush=True)
    return {"selections": rows, "full_step_ms": float(full_ms), "input_size": size, "batch_size": batch_size}


SETTINGS = {
    "steps": Setting(60, 36, "of each run"),
    "seconds": Setting(40.0, 10.0, "of measuring steps for profiler.py's table"),
    "only": Setting("", "", "networks, separated by commas"),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
