"""Runs with a deadline stop in time."""

import signal
from dataclasses import replace

import pytest
from conftest import make_small_data, make_small_model, make_table
from small_runs import elastic

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection import time_budget
from elastic_trainer.selection.schemes import ElasticScheme, make_budget
from elastic_trainer.selection.time_budget import (
    DeadlineBudget,
)
from elastic_trainer.settings import Settings
from elastic_trainer.training.step import Evaluation, TrainStep
from utils import Stopped


def test_run_stops_at_its_deadline_if_the_table_is_too_optimistic(tmp_path):
    table = make_table(make_small_model())
    lying = replace(table, full_step_ms=1e-3, t_dy_ms=0 * table.t_dy_ms, t_dw_ms=0 * table.t_dw_ms, forward_ms=1e-6)
    lying = replace(lying, fit=replace(lying.fit, constant_ms=1e-4))
    settings = Settings(learning_rate=0.05, num_epochs=2000, interval=500, deadline=3.0)
    summary, *_ = elastic(tmp_path, settings, lying)
    assert 0 < summary["steps"] < summary["planned_steps"] == 12_000
    assert summary["elapsed_seconds"] > 2.5
    assert summary["elapsed_seconds"] - summary["validation_seconds"] < 4.0  # the last test may meet a busy machine
    assert summary["epochs"] == -(-summary["steps"] // 6)


class FakeTime:
    """Stands for the module `time` of the training loop: passes only where it is told to, 1 s in each step."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (
            "train",
            "elastic_trainer.training.state",
            "elastic_trainer.runs.clocks",
            "elastic_trainer.runs.checkpoint",
        ):
            monkeypatch.setattr(f"{module}.time", self)
        self.let_pass(monkeypatch, TrainStep, "__call__", [1.0])

    def perf_counter(self):
        return self.now

    time = monotonic = perf_counter

    def let_pass(self, monkeypatch, owner, name, seconds):
        """From now on each call takes the next of `seconds`, and the last of them from there on."""
        calls, left = getattr(owner, name), list(seconds)

        def called(*args, **kwargs):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return calls(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)


def hurried(folder, deadline):
    """10 epochs of 6 steps, or what is left of them in `folder`; a selection every second epoch."""
    model, data = make_small_model(), make_small_data()
    settings = Settings(learning_rate=0.05, num_epochs=10, interval=2, deadline=deadline)
    budget = make_budget(model, data, settings, make_table(model))
    folder.mkdir(exist_ok=True)
    with RunLog(folder, {}, tensor_names(model)) as log:
        return train.elastic_training(model, data, settings, log, budget)


@pytest.mark.parametrize(
    ("deadline", "tests", "selections", "steps"),
    [
        # Steps of 1 s, six an epoch; 1.5 times the longest of the latest three tests is kept for the last one.
        (21.0, [2], [0], 14),  # 16 s after the second test; a third step would leave too little
        (19.9, [2], [0], 12),  # already the first would
        (28.0, [4, 2, 5], [0], 16),
        (50.0, [10, 1], [0], 23),  # 15 s are kept; that the last test then takes 1 s begins nothing anew
        (28.5, [2], [5], 12),  # 21 s after the second test: another selection and a step would end at 27 s
    ],
)
def test_no_step_or_selection_starts_without_time_for_the_validation_after_it(
    deadline, tests, selections, steps, tmp_path, monkeypatch
):
    clock = FakeTime(monkeypatch)
    clock.let_pass(monkeypatch, Evaluation, "__call__", tests)
    clock.let_pass(monkeypatch, ElasticScheme, "select", selections)
    summary = hurried(tmp_path, deadline)
    assert summary["steps"] == steps and summary["epochs"] == -(-steps // 6)
    assert clock.now <= deadline


def test_first_validation_is_planned_with_the_measured_slowdown(tmp_path, monkeypatch):
    FakeTime(monkeypatch)
    monkeypatch.setattr(time_budget, "_slowdown", lambda progress: 3.0)
    # 1 s on the device as profiled; nothing while the run is planned, which must not be refused.
    seconds = {1.0: 0.0, 3.0: 3.0}
    monkeypatch.setattr(DeadlineBudget, "_first_validation_seconds", lambda budget, slowdown: seconds[slowdown])
    summary = hurried(tmp_path, 8.9)  # 4.5 s are kept for the test
    assert (summary["steps"], summary["epochs"]) == (4, 1)


def test_run_stopped_at_its_deadline_resumes_with_the_validation(tmp_path, monkeypatch):
    FakeTime(monkeypatch)
    is_up = train._Training._is_out_of_time

    def is_up_and_stop(training):  # the signal comes as soon as time is up
        if is_up(training):
            training._stop.number = signal.SIGTERM
        return is_up(training)

    with monkeypatch.context() as patched, pytest.raises(Stopped, match="stopped after step 8 of 60"):
        patched.setattr(train._Training, "_is_out_of_time", is_up_and_stop)
        hurried(tmp_path, 8.5)
    summary = hurried(tmp_path, 8.5)
    assert (summary["steps"], summary["epochs"]) == (8, 2)
