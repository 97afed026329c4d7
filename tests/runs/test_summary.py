"""The results of a run: its files, which model is the best, and the three lines at its end."""

import json

import keras
import numpy as np
import pytest
from conftest import make_small_data
from small_runs import rows_of, run

import train
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.runs.history import Clocks, History
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.runs.summary import result_lines, run_results
from elastic_trainer.selection.select import Selection
from elastic_trainer.settings import Settings


def history(*accuracies, start=None, saved=None):
    rows = [{"epoch": k, "test_accuracy": value, "test_loss": value} for k, value in enumerate(accuracies, 1)]
    rows = [{**row, "peak_memory_mb": None, "gpu_peak_memory_mb": None} for row in rows]
    first = None if start is None else {"loss": 1.0, "accuracy": start}
    selections = [Selection(np.ones(2, bool))]
    return History(
        6, selections, rows, clocks=Clocks(training=1.0), start=first, starts_with_head=True, saved_score=saved
    )


@pytest.mark.parametrize(
    ("made", "best", "epoch"),
    [
        (history(0.6, 0.719, 0.7, start=0.797, saved=0.797), 0.797, 0),  # the first model was kept
        (history(0.6, 0.85, 0.85, start=0.797, saved=0.85), 0.85, 2),
        (history(0.9, 0.5, 0.7, saved=0.7), 0.7, 3),  # was resumed with --save_model, after the first epoch
        (history(0.6, 0.719, 0.7), 0.719, 2),  # saved none
        (history(0.6, None, 0.5), 0.6, 1),  # the second epoch was not validated
    ],
)
def test_best_accuracy_is_that_of_the_saved_model(made, best, epoch):
    summary = run_results(made, ImageClassification.score)
    assert (summary["best_accuracy"], summary["best_epoch"]) == (best, epoch)


def test_a_run_ends_with_three_lines_on_accuracy_time_and_what_to_do_next(tmp_path):
    made = run_results(history(0.6, 0.85, 0.8, start=0.797, saved=0.85), ImageClassification.score)
    parts = {"train_seconds": 90.5, "validation_seconds": 9.0, "selection_seconds": 20.5, "first_model_seconds": 4.0}
    summary = {**made, **parts, "wall_seconds": 158.2}
    assert result_lines(summary, tmp_path)[0] == "accuracy 80.0% (best: 85.0% after epoch 2 of 3); no model was saved"
    assert result_lines(summary, tmp_path)[2] == "next: give --save_model to keep the model of such a run"
    best = tmp_path / "best.keras"
    best.touch()
    accuracy, spent, further = result_lines(summary, tmp_path, 180.0)
    assert accuracy == (
        f"accuracy 85.0% after epoch 2 of 3: {best}; after the last epoch: 80.0%; the closed-form head alone: 79.7%"
    )
    assert spent == (
        "time: 2m 38s of the 3m allowed (selecting and compiling 20s, training steps 70s, validation 9s, other 59s)"
    )
    assert further == (f"next: python main.py --evaluate {tmp_path} shows what it gets wrong")
    *_, further = result_lines({**summary, "steps": 0, "elapsed_seconds": 140.2}, tmp_path, 131.0)
    assert further.endswith("no time for a training step: what comes before the first one takes 2m 20s here")


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
