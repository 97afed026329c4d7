"""Runs with a deadline stop in time, with their last validation."""

import math
import signal
from dataclasses import replace

import pytest
from conftest import make_small_data, make_small_model, make_table
from small_runs import elastic_run, rows_of

import train
from elastic_trainer.engine.evaluation import Evaluation
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.selection.deadline import DeadlineBudget, RunTime
from elastic_trainer.selection.elastic import ElasticScheme
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import Stopped


class FakeTime:
    """Replaces the module `time` of the training loop. Each step takes 1 s; other calls take what `let_pass` sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (
            "elastic_trainer.runs.trainer",
            "elastic_trainer.engine.state",
            "elastic_trainer.runs.history",
            "elastic_trainer.runs.checkpointer",
        ):
            monkeypatch.setattr(f"{module}.time", self)
        self.let_pass(monkeypatch, TrainStep, "results", [1.0])

    def perf_counter(self):
        return self.now

    time = monotonic = perf_counter

    def let_pass(self, monkeypatch, owner, name, seconds):
        """Each call of `owner.name` takes the next of `seconds`; after the last, each takes the last."""
        original, left = getattr(owner, name), list(seconds)

        def called(*args, **kwargs):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)


def run_with_deadline(folder, deadline, stop=None, epochs=10, interval=2, average_head=False, most_steps=None, **times):
    """Start or resume a run of 10 epochs of 6 steps in `folder`; it selects every second epoch."""
    model, data = make_small_model(), make_small_data()
    settings = Settings(
        learning_rate=0.05,
        num_epochs=epochs,
        interval=interval,
        deadline=deadline,
        feature_cache="off",
        average_head=average_head,
    )
    table, schedule = make_table(model), Schedule.of(settings, data.steps_per_epoch)
    run_time = replace(RunTime.of(table, data, settings), **times)
    due = schedule.selection_steps(interval)
    budget = DeadlineBudget(table, head_mask(model), deadline, schedule, due, run_time)
    if most_steps is not None:
        budget.lengthen_to(most_steps)
    folder.mkdir(exist_ok=True)
    with RunLog(folder, {}, tensor_names(model)) as log:
        return train.elastic_training(model, data, settings, log, budget, stop)


def test_run_stops_at_its_deadline_if_the_table_is_too_optimistic(tmp_path, monkeypatch):
    table = make_table(make_small_model())
    optimistic = replace(
        table, full_step_ms=1e-3, t_dy_ms=0 * table.t_dy_ms, t_dw_ms=0 * table.t_dw_ms, forward_ms=1e-6
    )
    optimistic = replace(optimistic, fit=replace(optimistic.fit, constant_ms=1e-4))
    clock = FakeTime(monkeypatch)
    settings = Settings(learning_rate=0.05, num_epochs=20, interval=5, deadline=40.0)
    summary, *_ = elastic_run(tmp_path, settings, optimistic)
    assert summary["planned_steps"] == 120 and summary["epochs"] == -(-summary["steps"] // 6)
    assert 30 < summary["steps"] <= clock.now <= 40, "steps take 1 s"


@pytest.mark.parametrize(
    ("deadline", "validations", "selections", "steps"),
    [
        # Steps take 1 s, an epoch has six. 1.5 times the longest of the latest three validations is reserved for the
        # last one, and the first step of a selection, every second epoch, counts as part of it.
        (22.0, [2], [0], 13),  # 16 s after the second validation; a second step would leave too little time
        (21.0, [2], [0], 12),  # even the first step would
        (28.0, [4, 2, 5], [0], 14),
        (50.0, [10, 1], [0], 23),  # 15 s are reserved; the last validation takes 1 s, and no step follows
        (28.5, [2], [5], 12),  # planned at 13 s, after the first validation
    ],
)
def test_no_step_or_selection_starts_without_time_for_the_validation_after_it(
    deadline, validations, selections, steps, tmp_path, monkeypatch
):
    clock = FakeTime(monkeypatch)
    clock.let_pass(monkeypatch, Evaluation, "__call__", validations)
    clock.let_pass(monkeypatch, ElasticScheme, "select", selections)
    summary = run_with_deadline(tmp_path, deadline)
    assert summary["steps"] == steps and summary["epochs"] == -(-steps // 6)
    assert clock.now <= deadline


@pytest.mark.parametrize("deadline", [21.0, 22.0, 24.0, 26.0, 28.0])
def test_a_run_with_a_deadline_ends_in_time_with_an_averaged_head(deadline, tmp_path, monkeypatch):
    """Wherever the deadline falls, also where a validation uses up the time for another step."""
    clock = FakeTime(monkeypatch)
    clock.let_pass(monkeypatch, Evaluation, "__call__", [2])
    clock.let_pass(monkeypatch, TrainState, "average_head", [3.0])
    summary = run_with_deadline(tmp_path, deadline, average_head=True, averaging=3.0)
    assert summary["average_head_seconds"] is not None
    assert 0.75 * deadline < clock.now <= deadline


def test_the_rate_ends_with_a_deadline_within_the_only_epoch(tmp_path, monkeypatch):
    FakeTime(monkeypatch)
    monkeypatch.setattr("elastic_trainer.runs.trainer.DEADLINE_CHECK_STEPS", 2)
    summary = run_with_deadline(tmp_path, 5.5, epochs=1)
    assert (summary["steps"], summary["planned_steps"]) == (5, 6)
    [row] = rows_of(tmp_path / "metrics.csv")
    assert float(row["learning_rate"]) == pytest.approx(0.05 * (1 + math.cos(math.pi * 4 / 5)) / 2)


@pytest.mark.parametrize(("deadline", "steps"), [(60.0, 50), (100.0, 60)])
def test_a_run_whose_epochs_are_chosen_uses_the_time_that_is_left_over(deadline, steps, tmp_path, monkeypatch):
    """By the table there is time for 12 steps. The schedule ends where the longer run does."""
    clock = FakeTime(monkeypatch)
    clock.let_pass(monkeypatch, Evaluation, "__call__", [0.5])
    summary = run_with_deadline(tmp_path, deadline, epochs=2, most_steps=60, interval=10)
    assert summary["planned_steps"] == 12 and steps <= summary["steps"] <= 60
    assert clock.now <= deadline
    rows = rows_of(tmp_path / "metrics.csv")
    assert float(rows[-1]["learning_rate"]) < 0.001 < 0.04 < float(rows[1]["learning_rate"])


def test_first_validation_is_planned_with_the_measured_slowdown(tmp_path, monkeypatch):
    FakeTime(monkeypatch)
    pass_ms = 3 * make_table(make_small_model()).gradient_pass_ms
    monkeypatch.setattr(ImportanceEvaluator, "pass_ms", lambda evaluator, batch: pass_ms)
    # A validation takes 1 s by the table and 3 s at the measured slowdown, so 4.5 s are reserved for it.
    summary = run_with_deadline(tmp_path, 8.9, validation=1.0, validation_share=0.01)
    assert (summary["steps"], summary["epochs"]) == (4, 1)


def test_run_stopped_at_its_deadline_resumes_with_the_validation(tmp_path, monkeypatch):
    FakeTime(monkeypatch).let_pass(monkeypatch, TrainStep, "results", [0.0] * 6 + [1.0])  # and 1 s as always
    stop, is_out_of_time = StopSignals(), ElasticScheme.is_out_of_time

    def stop_if_out_of_time(scheme, progress):  # the signal comes when the time is over
        if is_out_of_time(scheme, progress):
            stop.number = signal.SIGTERM
        return is_out_of_time(scheme, progress)

    with monkeypatch.context() as patched, pytest.raises(Stopped, match="stopped after step 7 of 8"):
        patched.setattr(ElasticScheme, "is_out_of_time", stop_if_out_of_time)
        run_with_deadline(tmp_path, 8.5, stop)
    summary = run_with_deadline(tmp_path, 8.5)
    assert (summary["steps"], summary["planned_steps"], summary["epochs"]) == (7, 60, 2)
