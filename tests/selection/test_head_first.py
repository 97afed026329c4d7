"""Runs that train the head first: what moves when, at which rate, and that they resume."""

from typing import Any

import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table
from interrupted_runs import STEPS, InterruptingData, PowerCut
from interrupted_runs import run as interrupted_run
from small_networks import values
from small_runs import rows_of, run

import train
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.settings import Settings
from elastic_trainer.trainer import Trainer
from elastic_trainer.training.optimizers import HeadPhase, make_optimizer

HEAD_FIRST: dict[str, Any] = {"head_epochs": 2, "head_learning_rate": 0.2, "learning_rate": 0.05}


def test_selections_are_due_from_the_first_step_after_the_heads():
    schedule = Schedule.of(Settings(num_epochs=3, head_epochs=2), steps_per_epoch=6)
    assert (schedule.epochs, schedule.total_steps, schedule.head_steps) == (5, 30, 12)
    assert schedule.selection_steps(1.5) == [12, 21]


def test_max_steps_counts_the_heads_steps():
    schedule = Schedule.of(Settings(num_epochs=3, head_epochs=2, max_steps=7), steps_per_epoch=6)
    assert (schedule.total_steps, schedule.head_steps, schedule.selection_steps(1)) == (7, 7, [])


@pytest.mark.parametrize("scheme", ["full_training", "elastic_training"])
def test_only_the_head_moves_in_its_epochs_and_the_scheme_selects_after_them(scheme, tmp_path, monkeypatch):
    model, seen = make_small_model(), []
    original = Trainer._validate

    def validate(self):
        original(self)
        seen.append(values(model.trainable_variables))

    monkeypatch.setattr(Trainer, "_validate", validate)
    settings = Settings(num_epochs=2, interval=1, rho=0.6, correct_budget=False, **HEAD_FIRST)
    before = values(model.trainable_variables)
    table = make_table(model) if scheme == "elastic_training" else None
    _, summary = run(tmp_path, getattr(train, scheme), settings, model, table)
    assert summary["epochs"] == 4
    moved = [[(new != old).any() for new, old in zip(after, before, strict=True)] for after in seen]
    assert moved[0] == moved[1] == [*head_mask(model)]
    assert sum(moved[2]) > sum(moved[1])
    rows = rows_of(tmp_path / "selections.csv")[:: len(tensor_names(model))]
    assert [int(row["step"]) for row in rows] == ([0, 12, 18] if scheme == "elastic_training" else [0, 12])


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_rate_starts_again_after_the_heads_steps(name):
    optimizer = make_optimizer(name, 0.05, 0.0, 30, HeadPhase(12, 0.2))
    rates = []
    for step in (0, 11, 12, 29):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    cosine = [0.2, 0.1 * (1 + np.cos(np.pi * 11 / 12)), 0.05, 0.025 * (1 + np.cos(np.pi * 17 / 18))]
    assert rates == pytest.approx(cosine if name == "sgd" else [0.2, 0.2, 0.05, 0.05], rel=1e-4)


def test_features_of_the_head_serve_its_epochs_and_change_no_weight(tmp_path):
    weights, megabytes = [], []
    for kind in ("float32", "off"):
        settings = Settings(num_epochs=1, correct_budget=False, feature_cache=kind, **HEAD_FIRST)
        model, summary = run(tmp_path / kind, train.full_training, settings)
        weights.append(values(model.variables))
        megabytes.append(summary["feature_mb"])
    assert megabytes[0] > 0 == megabytes[1]
    for with_features, without in zip(*weights, strict=True):
        np.testing.assert_array_equal(with_features, without)


@pytest.mark.parametrize("cut", [3, 2 * STEPS, 2 * STEPS + 4])
def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(cut, tmp_path):
    changes = {"elastic": True, "num_epochs": 2, "rho": 0.55, **HEAD_FIRST}
    expected, _ = interrupted_run(tmp_path / "unbroken", make_small_data(), **changes)
    with pytest.raises(PowerCut):
        interrupted_run(tmp_path / "cut", InterruptingData(cut), **changes)
    resumed, _ = interrupted_run(tmp_path / "cut", make_small_data(), **changes)
    for one, other in zip(expected, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    columns = ("step", "name", "chosen", "rho", "budget_step_ms")
    tables = [rows_of(tmp_path / name / "selections.csv") for name in ("unbroken", "cut")]
    picked = [[[row[column] for column in columns] for row in table] for table in tables]
    assert picked[0] == picked[1]


def test_time_over_full_counts_full_training_without_the_heads_epochs(tmp_path):
    model = make_small_model()
    settings = Settings(num_epochs=4, interval=2, rho=0.6, correct_budget=False, **HEAD_FIRST)
    _, summary = run(tmp_path, train.elastic_training, settings, model, make_table(model))
    full_ms = make_table(model).full_step_ms
    if summary["time_over_full"]:
        assert summary["time_over_full"] == pytest.approx(1e3 * summary["train_seconds"] / (24 * full_ms))
    else:
        assert "too short" in summary["time_over_full_missing"]
