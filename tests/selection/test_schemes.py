"""The elastic scheme: it measures the device's slowdown during training."""

import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table
from small_runs import elastic_run

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import ElasticScheme, make_budget
from elastic_trainer.selection.time_budget import (
    CARRIED,
    CORRECTION_BOUND,
    GRADIENT_PASSES,
    gradient_pass_steps,
)
from elastic_trainer.settings import Settings


def test_elastic_run_records_slowdown_and_correction(tmp_path):
    table = make_table(make_small_model())
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6)
    summary, selections, intervals = elastic_run(tmp_path, settings, table)
    assert len(selections) == 3
    for row in selections:
        slowdown, correction = float(row["slowdown"]), float(row["correction"])
        assert slowdown > 0 and 1 / CORRECTION_BOUND <= correction <= CORRECTION_BOUND
        assert abs(float(row["rho"]) - 0.6) <= CARRIED + 1e-9
        assert float(row["budget_step_ms"]) == pytest.approx(float(row["rho"]) * table.full_step_ms * slowdown)
        assert float(row["predicted_step_ms"]) <= float(row["budget_step_ms"]) + 1e-9
    assert float(selections[0]["correction"]) == 1
    assert len({row["slowdown"] for row in selections}) == 3  # measured before each selection
    slowdowns = [one for interval in intervals for one in (interval.selection.slowdown, *interval.slowdowns)]
    full_ms = [table.full_step_ms * slowdown for slowdown in slowdowns]
    most = (
        1e3 * summary["train_seconds"] / (summary["steps"] - 3) / min(full_ms)
    )  # the first step of each selection is not timed
    assert 0.5 * summary["median_step_ms"] / max(full_ms) < summary["rho_measured"] < most
    ratio = summary["time_over_full"]  # of so short a run it may be left out
    assert ratio > summary["rho_measured"] if ratio else "too short" in summary["time_over_full_missing"]


def test_gradient_passes_do_not_change_the_weights(tmp_path, monkeypatch):
    """At rho 1 selections depend only on importance, so runs with and without gradient passes are equal."""
    weights, timed = [], []
    original = ElasticScheme.slowdown

    def recording(self, step, batch):
        slowdown = original(self, step, batch)
        timed.append((step, slowdown is not None))
        return slowdown

    monkeypatch.setattr(ElasticScheme, "slowdown", recording)
    for correct in (True, False):
        model = make_small_model()
        settings = Settings(learning_rate=0.05, num_epochs=4, interval=2, rho=1.0, correct_budget=correct)
        budget = make_budget(model, make_small_data(), settings, make_table(model))
        with RunLog(tmp_path / str(correct), {}, tensor_names(model)) as log:
            train.elastic_training(model, make_small_data(), settings, log, budget)
        weights.append([variable.numpy() for variable in model.variables])
    passes = {step for step, was_timed in timed[:24] if was_timed}
    assert passes == gradient_pass_steps([0, 12, 24]) and len(passes) == 2 * GRADIENT_PASSES[0]
    assert not any(was_timed for _, was_timed in timed[24:])
    for with_passes, without in zip(*weights, strict=True):
        np.testing.assert_array_equal(with_passes, without)
