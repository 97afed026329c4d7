"""The files that a finished run leaves in its folder."""

import json

import keras
import numpy as np
import pytest
from conftest import make_small_data
from small_runs import rows_of, run

import train
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.settings import Settings


def test_finished_run_leaves_complete_records(tmp_path):
    settings = Settings(learning_rate=0.05, num_epochs=3, save_model=True)
    model, summary = run(tmp_path, train.full_training, settings)
    assert read_summary(tmp_path) == summary
    times = {"train_seconds", "validation_seconds", "selection_seconds", "median_step_ms"}
    results = {"epochs", "best_accuracy", "final_accuracy", "peak_memory_mb", "energy_joules"}
    assert times | results | {"model_name", "dataset_name", "train_type", "rho", "seed"} <= set(summary)
    epochs = rows_of(tmp_path / "metrics.csv")
    assert [int(row["epoch"]) for row in epochs] == [0, 1, 2, 3]  # 0: the model before training
    assert [int(row["step"]) for row in epochs] == [0, 6, 12, 18]
    seconds = [float(row["train_seconds"]) for row in epochs]
    assert sorted(seconds) == seconds and seconds[-1] == pytest.approx(summary["train_seconds"])
    assert float(epochs[-1]["test_accuracy"]) == summary["final_accuracy"]
    assert max(float(row["test_accuracy"]) for row in epochs) == summary["best_accuracy"]
    assert "environment" in json.loads((tmp_path / "config.json").read_text())
    last = keras.models.load_model(tmp_path / "last.keras")
    [batch] = make_small_data().importance_batches(0)
    np.testing.assert_allclose(last(batch.inputs, training=False), model(batch.inputs, training=False), rtol=1e-5)
    assert (tmp_path / "best.keras").is_file()
    assert not list(tmp_path.glob(".*"))
