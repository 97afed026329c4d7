"""The time budget: corrected by what is measured, bounded, and a deadline that is met on a device that changes."""

import csv
import signal
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table

import train
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.history import History, SelectionInterval
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection import time_budget
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import ElasticScheme, make_budget
from elastic_trainer.selection.select import Selection, select_tensors
from elastic_trainer.selection.time_budget import (
    CARRIED,
    CORRECTION_BOUND,
    GRADIENT_PASSES,
    LATEST_STEPS,
    DeadlineBudget,
    Progress,
    RhoBudget,
    gradient_pass_steps,
)
from elastic_trainer.settings import Settings
from elastic_trainer.training.step import Evaluation, TrainStep
from utils import Stopped, UserError


@pytest.fixture(scope="module")
def case():
    model = make_small_model()
    return make_table(model, t_dy_ms=0.5, t_dw_ms=0.5, constant_ms=3.0), head_mask(model)


def simulate(budget, head, device, epochs=12, steps=100, seconds_beside=0.0):
    """Train on a device where what the table says takes `ms` takes `device(epoch, ms)`: allowances, masks, seconds."""
    table = budget.table
    rng = np.random.default_rng(0)
    elapsed, allowances, masks = 0.0, [], []
    step_ms: list[float] = []
    for epoch in range(epochs):
        slowdowns = [device(max(epoch - 1, 0), table.gradient_pass_ms) / table.gradient_pass_ms] * 5
        beside = {"validation_seconds": [seconds_beside], "selection_seconds": seconds_beside}
        progress = Progress(
            epoch, epochs, epoch * steps, epochs * steps, elapsed, step_ms, slowdowns, overhead_ms=0.0, **beside
        )
        allowances.append(budget.allow(progress))
        choice = select_tensors(table, rng.random(len(head)), head, allowances[-1].table_share)
        budget.adopt(choice.mask)
        masks.append(choice.mask)
        step_ms = [device(epoch, table.predict_ms(choice.mask))] * steps
        elapsed += sum(step_ms) / 1e3 + 2 * seconds_beside
    return allowances, masks, elapsed


def test_a_uniform_slowdown_changes_what_is_allowed_but_not_what_is_selected(case):
    table, head = case
    allowances, masks, _ = simulate(RhoBudget(table, head, 0.6), head, lambda epoch, ms: ms * (1 + (epoch >= 6)))
    assert [a.slowdown for a in allowances] == [1.0] * 7 + [2.0] * 5
    for a in allowances:
        assert a.full_step_ms == pytest.approx(table.full_step_ms * a.slowdown)
        assert a.correction == pytest.approx(1)
    for mask, a in zip(masks, allowances, strict=True):
        assert table.predict_ms(mask) <= a.table_share * table.full_step_ms + 1e-9


@pytest.mark.parametrize("wrong", [1.15, 0.9])
def test_a_prediction_that_is_wrong_is_corrected(case, wrong):
    """Sparse selections take `wrong` times what the table says; the full gradient pass takes what it says."""
    table, head = case

    def device(epoch, ms):
        return ms if ms == table.gradient_pass_ms else ms * wrong

    allowances, masks, _ = simulate(RhoBudget(table, head, 0.6), head, device)
    assert allowances[-1].correction == pytest.approx(wrong, rel=0.02)
    rho = [table.predict_ms(mask) * wrong / table.full_step_ms for mask in masks]
    assert rho[-1] <= allowances[-1].rho * 1.001 and np.mean(rho[6:]) <= 0.6 + 1e-3
    assert abs(np.mean(rho[6:]) - 0.6) < abs(np.mean(rho[:1]) - 0.6) + 0.02
    if wrong > 1:
        assert rho[0] > 0.62


@pytest.mark.parametrize("rho", [0.5, 0.6, 0.8, 0.99])
@pytest.mark.parametrize("correction", [0.9, 1.0, 1.1])
def test_what_is_left_over_of_budgets_is_used_but_never_more_than_rho_on_average(case, rho, correction):
    """On tensors of very different sizes, which seldom fill a budget."""
    table, head = case
    rng = np.random.default_rng(0)
    table = replace(table, t_dw_ms=rng.choice([0.1, 2.0], len(head)))
    table = replace(table, full_step_ms=table.predict_ms(np.ones(len(head), bool)))
    budget, expected = RhoBudget(table, head, rho), rho
    budget.correction = correction
    plain: list[float] = []
    used: list[float] = []
    for _ in range(60):
        importance = rng.random(len(head))
        allowance = budget.allow(Progress())
        assert rho <= allowance.rho == pytest.approx(expected)
        for share, taken in ((rho / correction, plain), (allowance.table_share, used)):
            mask = select_tensors(table, importance, head, share).mask
            taken.append(min(table.predict_ms(mask) * correction / table.full_step_ms, 1.0))
        budget.adopt(mask)
        assert np.mean(used) <= rho + 1e-9
        expected = min(rho + min(expected - used[-1], CARRIED), 1.0)
    if rho == 0.6:
        assert np.mean(used) > np.mean(plain) + 0.003 and max(used) > rho


@pytest.mark.parametrize("wrong", [1.1, 0.9])
def test_what_steps_took_beyond_or_below_their_allowance_is_made_up_for(case, monkeypatch, wrong):
    """All in all they are nearer to rho than without, and nothing is carried any more once the table is corrected."""
    table, head = case
    errors = []
    for carried in (CARRIED, 0.0):
        monkeypatch.setattr(time_budget, "CARRIED", carried)
        budget = RhoBudget(table, head, 0.6)
        allowance, took = budget.allow(Progress()), []
        for _ in range(12):
            # A selection that fills its budget to the last bit, on a device where steps take `wrong` times as long.
            budget._predicted_ms = allowance.table_share * table.full_step_ms
            took.append(wrong * allowance.table_share)
            steps = [wrong * budget._predicted_ms] * 50
            allowance = budget.allow(Progress(step_ms=steps, slowdowns=[1.0] * 15))
            assert (allowance.rho - 0.6) * (1 - wrong) >= 0 and abs(allowance.rho - 0.6) <= carried + 1e-9
        assert took[0] == pytest.approx(0.6 * wrong) and allowance.rho == pytest.approx(0.6, abs=1e-3)
        errors.append(abs(np.mean(took) - 0.6))
    assert errors[0] < 0.6 * errors[1]


def test_what_is_made_up_for_still_leaves_the_head(case):
    table, head = case
    budget = RhoBudget(table, head, 0.01 + table.predict_ms(head) / table.full_step_ms)
    steps = [1.2 * budget.adopt(head)] * 50
    allowance = budget.allow(Progress(step_ms=steps, slowdowns=[1.0] * 15))
    assert allowance.correction > 1.05 and allowance.rho == budget.smallest_rho
    choice = select_tensors(table, np.ones(len(head)), head, allowance.table_share)
    np.testing.assert_array_equal(choice.mask, head)


def test_the_correction_is_bounded(case):
    table, head = case
    budget = RhoBudget(table, head, 0.6)
    for factor, bound in ((50.0, CORRECTION_BOUND), (0.02, 1 / CORRECTION_BOUND)):
        budget.adopt(head)
        steps = [factor * table.predict_ms(head)] * 9
        for _ in range(3):
            correction = budget.allow(Progress(step_ms=steps, slowdowns=[1.0] * 9)).correction
        assert correction == pytest.approx(bound)


def test_only_the_latest_steps_count(case):
    table, head = case
    budget = RhoBudget(table, head, 0.6)
    budget.adopt(head)
    expected = table.predict_ms(head)
    steps = [9 * expected] * 500 + [expected] * 50
    assert budget.allow(Progress(step_ms=steps, slowdowns=[1.0] * 9)).correction == 1.0


def test_measurements_that_scatter_are_believed_less(case):
    """The correction nears the truth with many that agree, hardly with few that do not, and a wild one is no matter."""
    table, head = case
    rng = np.random.default_rng(0)
    corrections = []
    for slowdowns in ([1.0] * 15, [1.0] * 5, [0.8, 1.0, 1.25, 0.7, 1.4], [1.0] * 14 + [9.0]):
        budget = RhoBudget(table, head, 0.6)
        budget.adopt(head)
        steps = [1.1 * table.predict_ms(head) * noise for noise in rng.normal(1, 0.02, 50)]
        corrections.append(budget.allow(Progress(step_ms=steps, slowdowns=slowdowns)).correction)
    many, few, scattered, wild = corrections
    assert 1.1 > many > few > scattered > 1.0
    assert wild == pytest.approx(many, abs=0.01)


@pytest.mark.parametrize(("begin", "end", "passes"), [(0, 1, 1), (3, 6, 3), (0, 90, 5), (100, 1100, 10), (0, 9000, 15)])
def test_gradient_passes_take_turns_with_the_latest_steps(begin, end, passes):
    steps = sorted(gradient_pass_steps([begin, end]))
    assert len(steps) == passes
    latest = min(end - begin, LATEST_STEPS)
    assert end - latest < steps[0] and steps[-1] <= end
    if latest > passes:
        assert set(np.diff(steps)) <= {latest // passes, latest // passes + 1}
    assert gradient_pass_steps([begin, end, end + 7]) == {*steps} | {end + step for step in gradient_pass_steps([0, 7])}


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_a_deadline_is_met_and_used_on_a_device_that_slows_down_half_way(case, slow):
    table, head = case
    seconds = 0.75 * 12 * 100 * table.full_step_ms / 1e3
    budget = DeadlineBudget(table, head, seconds, 1200, 12, range(0, 1200, 100), 3)
    allowances, _, elapsed = simulate(budget, head, lambda epoch, ms: ms * (slow if epoch >= 6 else 1.0))
    assert elapsed <= seconds
    assert elapsed > 0.9 * seconds
    if slow > 1:
        assert allowances[-1].rho < allowances[0].rho - 0.1


def test_a_deadline_follows_the_latest_steps_and_before_them_the_gradient_passes(case):
    table, head = case
    budget = DeadlineBudget(table, head, 60.0, 1200, 12, range(0, 1200, 100), 3)
    first = budget.allow(Progress(0, 12, 0, 1200, slowdowns=[1.5] * 5))
    assert first.slowdown == 1.5 and first.full_step_ms == pytest.approx(1.5 * table.full_step_ms)
    step_ms = [1.2 * budget.adopt(head)] * 100
    later = budget.allow(Progress(1, 12, 100, 1200, 1.0, step_ms, slowdowns=[1.5] * 5))
    assert later.slowdown == pytest.approx(1.2)


def test_a_deadline_leaves_room_for_validation_and_selection(case):
    table, head = case
    seconds = 0.7 * 12 * 100 * table.full_step_ms / 1e3
    budget = DeadlineBudget(table, head, seconds, 1200, 12, range(0, 1200, 100), 3)
    elapsed = simulate(budget, head, lambda epoch, ms: ms, seconds_beside=0.02 * seconds / 24)[2]
    assert 0.9 * seconds < elapsed <= seconds


def test_a_deadline_plans_what_is_kept_for_the_last_test(case):
    table, head = case
    budget = DeadlineBudget(table, head, 100.0, 1200, 12, [0], 3)
    step_ms = [budget.adopt(head)] * 9
    allowance = budget.allow(
        Progress(11, 12, 1100, 1200, 96.0, step_ms, validation_seconds=[2.0], selection_seconds=1.0)
    )
    assert 100 * allowance.rho * table.full_step_ms / 1e3 == pytest.approx(4 * 0.98 - 1.5 * 2)


def test_a_generous_deadline_trains_everything_and_no_more(case):
    table, head = case
    budget = DeadlineBudget(table, head, 1e6, 1200, 12, range(0, 1200, 100), 3)
    allowance = budget.allow(Progress(epochs=12, total_steps=1200))
    assert allowance.rho == 1.0
    assert select_tensors(table, np.ones(len(head)), head, allowance.table_share).mask.all()


def test_a_hopeless_deadline_is_refused_and_one_lost_on_the_way_trains_the_head(case):
    table, head = case
    with pytest.raises(UserError, match=r"--deadline 1: training the head alone for 1200 steps takes about \d+ s here"):
        DeadlineBudget(table, head, 1.0, 1200, 12, range(0, 1200, 100), 3)
    budget = DeadlineBudget(table, head, 60.0, 1200, 12, range(0, 1200, 100), 3)
    allowance = budget.allow(Progress(6, 12, 600, 1200, elapsed_seconds=59.9))
    assert allowance.rho == budget.smallest_rho
    choice = select_tensors(table, np.ones(len(head)), head, allowance.table_share)
    np.testing.assert_array_equal(choice.mask, head)


def elastic(tmp_path, settings, table):
    model = make_small_model()
    budget = make_budget(model, make_small_data(), settings, table)
    log = RunLog(tmp_path, {}, tensor_names(model))
    with log:
        summary = log.finish(train.elastic_training(model, make_small_data(), settings, log, budget))
    with (tmp_path / "selections.csv").open(newline="") as file:
        return summary, list(csv.DictReader(file))[:: len(head_of(model))], log._history.intervals


def head_of(model):
    return head_mask(model)


def test_a_run_measures_and_records_slowdown_and_correction(tmp_path):
    table = make_table(make_small_model())
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6)
    summary, choices, intervals = elastic(tmp_path, settings, table)
    assert len(choices) == 3
    for row in choices:
        slowdown, correction = float(row["slowdown"]), float(row["correction"])
        assert slowdown > 0 and 1 / CORRECTION_BOUND <= correction <= CORRECTION_BOUND
        assert abs(float(row["rho"]) - 0.6) <= CARRIED + 1e-9
        assert float(row["budget_step_ms"]) == pytest.approx(float(row["rho"]) * table.full_step_ms * slowdown)
        assert float(row["predicted_step_ms"]) <= float(row["budget_step_ms"]) + 1e-9
    assert float(choices[0]["correction"]) == 1
    assert len({row["slowdown"] for row in choices}) == 3  # measured each time
    slowdowns = [one for interval in intervals for one in (interval.selection.slowdown, *interval.slowdowns)]
    full_ms = [table.full_step_ms * slowdown for slowdown in slowdowns]
    most = 1e3 * summary["train_seconds"] / (summary["steps"] - 3) / min(full_ms)  # three first steps have no time
    assert 0.5 * summary["median_step_ms"] / max(full_ms) < summary["rho_measured"] < most
    assert summary["time_over_full"] > summary["rho_measured"]  # it counts selecting too


def test_gradient_passes_between_steps_change_nothing_but_the_clocks(tmp_path, monkeypatch):
    """At rho 1 selections follow from importance alone, so runs with passes and without agree."""
    weights, timed = [], []
    original = ElasticScheme.slowdown

    def remembering(self, step, images, labels):
        slowdown = original(self, step, images, labels)
        timed.append((step, slowdown is not None))
        return slowdown

    monkeypatch.setattr(ElasticScheme, "slowdown", remembering)
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
    for ours, plain in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_full_training_is_judged_by_the_passes_before_and_among_the_steps():
    history = History()
    for slowdown, among in ((3.0, [1.5, 9.0, 1.4]), (1.5, [2.0]), (2.0, [])):
        choice = Selection(np.ones(1, bool), budget_step_ms=50.0 * slowdown, rho=0.5, slowdown=slowdown)
        history.intervals.append(SelectionInterval(choice, 0, step_ms=[1.0, 1.0], slowdowns=among))
    assert history.full_training_ms() == pytest.approx(2 * 100 * (1.5 + 1.75 + 2))


def test_a_run_stops_at_its_deadline_when_the_table_promised_too_much(tmp_path):
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
def test_no_step_or_selection_is_begun_that_leaves_no_time_for_the_test(
    deadline, tests, selections, steps, tmp_path, monkeypatch
):
    clock = FakeTime(monkeypatch)
    clock.let_pass(monkeypatch, Evaluation, "__call__", tests)
    clock.let_pass(monkeypatch, ElasticScheme, "select", selections)
    summary = hurried(tmp_path, deadline)
    assert summary["steps"] == steps and summary["epochs"] == -(-steps // 6)
    assert clock.now <= deadline


def test_one_slow_test_does_not_count_for_all_that_are_to_come(case):
    progress = History(validation_seconds=[9.0, 1.0, 1.1, 9.0]).progress(Schedule(1, 9))
    assert progress.validation_seconds == [1.0, 1.1, 9.0]
    table, head = case
    budget = DeadlineBudget(table, head, 100.0, 1200, 12, [0], 3)
    plans = [
        budget.allow(Progress(11, 12, 1100, 1200, 97.0, validation_seconds=seconds, selection_seconds=1.0)).rho
        for seconds in (progress.validation_seconds, [1.1])
    ]
    assert plans[0] == plans[1] < 1


def test_before_the_first_test_the_slowdown_tells_how_long_it_may_take(tmp_path, monkeypatch):
    FakeTime(monkeypatch)
    monkeypatch.setattr(time_budget, "_slowdown", lambda progress: 3.0)
    # 1 s on the device as profiled; nothing while the run is planned, which must not be refused.
    seconds = {1.0: 0.0, 3.0: 3.0}
    monkeypatch.setattr(DeadlineBudget, "_first_validation_seconds", lambda budget, slowdown: seconds[slowdown])
    summary = hurried(tmp_path, 8.9)  # 4.5 s are kept for the test
    assert (summary["steps"], summary["epochs"]) == (4, 1)


def test_a_run_that_is_cut_off_when_time_is_up_is_resumed_with_the_test(tmp_path, monkeypatch):
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
