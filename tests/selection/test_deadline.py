"""Deadlines are met on a device that slows down, and choose a run's length."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from budgets import simulate
from conftest import make_table

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.history import History
from elastic_trainer.selection.budget import Progress
from elastic_trainer.selection.deadline import DEADLINE_RHO, DeadlineBudget, DeadlineTooShortError, RunTime
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import plan_of, select_tensors
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError

DATA = ShuffledData("photos", 400, 12, 4)  # 100 steps an epoch; a validation is 3 batches
EACH_EPOCH = range(0, 1200, 100)


def deadline_budget(case, seconds, due=(0,), steps=1200, misses=1.0, elapsed=0.0, **times):
    """Of a run of 100 steps an epoch; `times` replace those of `RunTime`."""
    table, head = case
    run_time = replace(RunTime.of(table, DATA, Settings()), **times)
    return DeadlineBudget(table, head, seconds, Schedule(100, steps), due, run_time, misses, elapsed)


def fitting_epochs(table, seconds, data=DATA, most=12, interval=3.0, may_lengthen=True, share=1.0):
    epoch = DEADLINE_RHO * data.steps_per_epoch * table.full_step_ms / 1e3
    run_time = RunTime.of(table, data, Settings(validation_share=share))
    return run_time.fitting_epochs(seconds, epoch, most, interval, may_lengthen)


@pytest.mark.parametrize(
    ("seconds", "compiling_ms", "epochs"),
    [
        (20, 0.0, 3),  # 3 epochs of 0.6 * 10 + 0.3 s
        (85, 0.0, 12),  # 13 would fit
        (200, 0.0, 12),  # more are not needed
        (1, 0.0, 1),
        (20.4, 500.0, 3),  # three compilations: the gradient pass, a selection, validation
        (20.3, 500.0, 2),
        (27.1, 500.0, 3),  # a fourth epoch would fit, but not the selection before it
        (27.2, 500.0, 4),
        (21.8, None, 2),  # not measured: 30 full steps
        (21.9, None, 3),
        (207, 500.0, 12),
        (1, 9000.0, 1),
    ],
)
def test_a_deadlines_epochs_are_those_that_fit_at_its_rho(seconds, compiling_ms, epochs, small_model):
    table = replace(make_table(small_model), full_step_ms=100.0, forward_ms=20.0, compiling_ms=compiling_ms)
    data = ShuffledData("photos", 400, 40, 4)
    assert fitting_epochs(table, seconds, data)[0] == epochs


def test_selections_take_a_tenth_of_a_deadline_at_most(small_model):
    """24 photos: an epoch is one step, and a selection takes as long as dozens of them."""
    table = replace(make_table(small_model), full_step_ms=50.0, forward_ms=20.0, compiling_ms=1500.0)
    few = ShuffledData("photos", 4, 4, 4)
    epochs, interval = fitting_epochs(table, 60.0, few, 500, 4)
    assert epochs > 100 and math.ceil(epochs / interval) * 1.5 <= 0.1 * 60
    assert fitting_epochs(table, 6000.0, ShuffledData("photos", 4000, 4, 4), 12, 4)[1] == 4
    once = [fitting_epochs(table, 8.0, few, 500, interval)[0] for interval in (math.inf, 500)]
    assert once[0] == once[1]
    fewer, given = fitting_epochs(table, 60.0, few, 500, 4, may_lengthen=False)
    assert given == 4 and fewer < epochs, "the selections that were asked for take time from the epochs"


def test_epochs_that_are_not_validated_leave_time_for_more(small_model):
    table = replace(make_table(small_model), full_step_ms=100.0, forward_ms=400.0, compiling_ms=0.0)
    data = ShuffledData("photos", 400, 40, 4)
    # An epoch takes 6 s of steps and 6 s of validation, which may take a tenth of that and 6 s at the end.
    assert fitting_epochs(table, 60.0, data, interval=12)[0] == 5
    assert fitting_epochs(table, 60.0, data, interval=12, share=0.1)[0] == 8
    longer = replace(table, forward_ms=800.0)  # a validation takes longer than the steps of an epoch
    assert fitting_epochs(longer, 60.0, data, interval=12)[0] == 3


def test_a_run_before_a_deadline_has_the_steps_that_fit_at_the_latest_speed(case):
    table, head = case
    budget = deadline_budget(case, 100.0)
    assert budget.fitting_steps(Progress(1, 12, 100, 1200, 20.0)) is None, "no step was measured"
    progress = Progress(1, 12, 100, 1200, 20.0, step_ms=[90.0] * 60, overhead_ms=10.0, validation_seconds=[2.0, 2.0])
    progress = progress._replace(steps_per_epoch=100)
    assert budget.fitting_steps(progress) == 100 + int((80 * 0.98 - 1.5 * 2) / (0.1 + 0.02))
    budget = deadline_budget(case, 100.0, validation_share=0.1)
    assert budget.fitting_steps(progress) == 100 + int((80 * 0.98 - 1.5 * 2) / (0.1 + 0.01))
    budget = deadline_budget(case, 100.0, [0, 400])
    slow = progress._replace(validation_seconds=[20.0, 20.0], slowdown=1.5, caching_ms=1e3)
    budget.adopt(plan_of(table, head, None, 0.0, 1.0)._replace(caching_ms=10.0))
    left = 80 * 0.98 - 1.5 * 20 - (1.5 * 400 * 10.0 - 1e3) / 1e3
    assert budget.fitting_steps(slow) == 100 + int(left / (0.1 + 0.2)), "the validation takes longer than the steps"


def test_a_deadline_may_limit_rho_and_starts_before_training(case):
    table, head = case
    budget = deadline_budget(case, 1e6)
    budget.limit_rho(0.6)
    assert budget.allow(Progress(epochs=12, total_steps=1200)).rho == 0.6
    resumed = deadline_budget(case, 1e6)
    resumed.resume(budget.to_record(), head)
    assert resumed.allow(Progress(1, 12, 100, 1200)).rho == 0.6
    fast = Progress(1, 12, 100, 1200, step_ms=[1.0] * 60, steps_per_epoch=100)
    start = Progress(epochs=12, total_steps=1200, steps_per_epoch=100)
    tight = deadline_budget(case, 0.55 * 1200 * table.full_step_ms / 1e3)
    tight.limit_rho(0.6)
    assert tight.allow(start).rho < 0.55
    record = tight.to_record()
    tight.lengthen_to(1200)
    assert tight.allow(start).rho == 0.6, "there are fewer steps instead"
    opened = tight.to_record()
    for kept, is_open in ((record, False), (opened, True)):
        tight.resume(kept, head)
        assert (tight.allow(start).rho == 0.6) is is_open
    short = deadline_budget(case, 0.75 * 100 * table.full_step_ms / 1e3, steps=100)
    short.limit_rho(0.6)
    short.lengthen_to(1200)
    assert short.allow(start._replace(epochs=1, total_steps=100)).rho < 0.55, "there is no time for one epoch at 0.6"
    for most, expected in ((0, 1200), (2400, 2400)):
        budget.lengthen_to(most)
        resumed.resume(budget.to_record(), head)
        assert budget.fitting_steps(fast) == resumed.fitting_steps(fast) == expected
    seconds = 0.8 * 1200 * table.full_step_ms / 1e3
    rhos = [
        deadline_budget(case, seconds + elapsed, elapsed=elapsed, first_model=start)
        .allow(Progress(epochs=12, total_steps=1200, elapsed_seconds=elapsed))
        .rho
        for elapsed, start in ((0.0, 0.0), (5.0, 0.0), (0.0, 0.1 * seconds))
    ]
    assert rhos[0] == pytest.approx(rhos[1]) and rhos[2] < rhos[0] - 0.05
    with pytest.raises(DeadlineTooShortError):
        deadline_budget(case, 20.0, elapsed=19.0)
    with pytest.raises(DeadlineTooShortError, match=r"--deadline 20s: training .* takes about 27s"):
        deadline_budget(case, 20.0, end=20.0)


def test_a_deadline_keeps_the_time_of_the_first_selections(case):
    """Each compiles a step, and so do the gradient pass and validation; the device takes 1.5 of the table's time."""
    table, head = case
    table, seconds = replace(table, compiling_ms=200.0), 0.9 * 1200 * table.full_step_ms / 1e3
    validations_ms = (11 + 1.5) * 1.5 * 3 * table.forward_ms
    for selection_steps in ([0], [0, 300, 600]):
        budget = deadline_budget((table, head), seconds, selection_steps)
        allowance = budget.allow(Progress(epochs=12, total_steps=1200, slowdowns=[1.5] * 5))
        compiling_ms = 200 * (len(selection_steps) + 2)
        allowed_ms = 0.9 * 1e3 * seconds - 1.5 * (validations_ms + compiling_ms)
        assert 1200 * allowance.rho * 1.5 * table.full_step_ms == pytest.approx(allowed_ms)
        assert budget.smallest_rho < allowance.rho < 1


def test_a_deadline_keeps_the_time_to_average_the_head_at_the_speed_of_the_device(case):
    table, _ = case
    with_it, without = (deadline_budget(case, 100.0, averaging=s) for s in (6.0, 0.0))
    progress = Progress(1, 12, 100, 1200, 20.0, step_ms=[90.0] * 60, overhead_ms=10.0, validation_seconds=[2.0, 2.0])
    progress = progress._replace(steps_per_epoch=100, slowdown=1.5)
    steps = [budget.fitting_steps(progress) or 0 for budget in (without, with_it)]
    assert steps[0] - steps[1] == pytest.approx(1.5 * 6.0 / (0.1 + 0.02), abs=1)
    late = progress._replace(elapsed_seconds=100 - 1.5 * 2 - 9.0)
    assert not without.is_out_of_time(late, False) and with_it.is_out_of_time(late, False)
    seconds = 0.9 * 1200 * table.full_step_ms / 1e3
    start = Progress(epochs=12, total_steps=1200, slowdowns=[1.5] * 5)
    rhos = [deadline_budget(case, seconds, averaging=averaging).allow(start).rho for averaging in (0.0, 1.0)]
    assert 1200 * (rhos[0] - rhos[1]) * 1.5 * table.full_step_ms == pytest.approx(1.5 * 1e3)


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_deadline_is_met_and_used_if_the_device_slows_down_half_way(case, slow):
    table, head = case
    seconds = 0.75 * 12 * 100 * table.full_step_ms / 1e3
    budget = deadline_budget(case, seconds, EACH_EPOCH)
    allowances, _, elapsed = simulate(budget, head, lambda epoch, ms: ms * (slow if epoch >= 6 else 1.0))
    assert elapsed <= seconds
    assert elapsed > 0.9 * seconds
    if slow > 1:
        assert allowances[-1].rho < allowances[0].rho - 0.1


def test_deadline_slowdown_comes_from_gradient_passes_then_from_the_latest_steps(case):
    table, head = case
    budget = deadline_budget(case, 60.0, EACH_EPOCH)
    first = budget.allow(Progress(0, 12, 0, 1200, slowdowns=[1.5] * 5))
    assert first.slowdown == 1.5
    budget.adopt(plan_of(table, head, None, 0.0, 1.0))
    step_ms = [1.2 * table.predict_ms(head)] * 100
    later = budget.allow(Progress(1, 12, 100, 1200, 1.0, step_ms, slowdowns=[1.5] * 5))
    assert later.slowdown == pytest.approx(1.2)


def test_deadline_leaves_time_for_validation_and_selection(case):
    table, head = case
    seconds = 0.7 * 12 * 100 * table.full_step_ms / 1e3
    budget = deadline_budget(case, seconds, EACH_EPOCH)
    elapsed = simulate(budget, head, lambda epoch, ms: ms, seconds_beside=0.02 * seconds / 24)[2]
    assert 0.9 * seconds < elapsed <= seconds


def test_deadline_reserves_time_for_the_last_validation(case):
    table, head = case
    budget = deadline_budget(case, 100.0)
    budget.adopt(plan_of(table, head, None, 0.0, 1.0))
    step_ms = [table.predict_ms(head)] * 9
    allowance = budget.allow(
        Progress(11, 12, 1100, 1200, 96.0, step_ms, validation_seconds=[2.0], selection_seconds=1.0)
    )
    assert 100 * allowance.rho * table.full_step_ms / 1e3 == pytest.approx(4 * 0.98 - 1.5 * 2)


def test_long_deadline_trains_every_tensor_at_rho_1(case):
    table, head = case
    budget = deadline_budget(case, 1e6, EACH_EPOCH)
    allowance = budget.allow(Progress(epochs=12, total_steps=1200))
    assert allowance.rho == 1.0
    assert select_tensors(table, np.ones(len(head)), head, allowance.table_rho).mask.all()


def test_impossible_deadline_is_refused_and_a_missed_one_trains_the_head_only(case):
    table, head = case
    with pytest.raises(UserError, match=r"--deadline 1s: training the head alone for 1200 steps takes about \d+s here"):
        deadline_budget(case, 1.0, EACH_EPOCH)
    budget = deadline_budget(case, 60.0, EACH_EPOCH)
    allowance = budget.allow(Progress(6, 12, 600, 1200, elapsed_seconds=59.9))
    assert allowance.rho == budget.smallest_rho
    selection = select_tensors(table, np.ones(len(head)), head, allowance.table_rho)
    np.testing.assert_array_equal(selection.mask, head)


def test_the_first_validation_before_a_deadline_is_compiled_too(case):
    table, head = case
    budgets = [
        deadline_budget((replace(table, compiling_ms=compiling_ms), head), 60.0) for compiling_ms in (None, 4000.0)
    ]
    for elapsed, slowdown, expected in ((55.0, 1.0, False), (55.0, 1.5, True), (56.5, 1.0, True)):
        late = Progress(0, 12, 100, 1200, elapsed_seconds=elapsed, slowdown=slowdown)
        assert [budget.is_out_of_time(late, selection_is_due=False) for budget in budgets] == [False, expected]
    measured = late._replace(validation_seconds=[1.0])
    assert not any(budget.is_out_of_time(measured, selection_is_due=False) for budget in budgets)


def test_one_slow_validation_does_not_change_the_plan(case):
    progress = History(validation_seconds=[9.0, 1.0, 1.1, 9.0]).progress(Schedule(1, 9))
    assert progress.validation_seconds == [1.0, 1.1, 9.0]
    budget = deadline_budget(case, 100.0)
    start = Progress(11, 12, 1100, 1200, 97.0, selection_seconds=1.0)
    each = (progress.validation_seconds, [1.1])
    plans = [budget.allow(start._replace(validation_seconds=seconds)).rho for seconds in each]
    assert plans[0] == plans[1] < 1


def test_deadline_counts_what_making_features_takes(with_forward):
    table, head = with_forward
    shortest = []
    for misses in (0.0, 0.5, 1.0):
        with pytest.raises(UserError, match=r"takes about (\d+)m (\d+)s") as caught:
            deadline_budget((table, head), 0.1, steps=100_000, misses=misses)
        minutes, seconds = re.findall(r"\b(\d+)[ms]\b", str(caught.value))[-2:]
        shortest.append(60 * int(minutes) + int(seconds))
    assert shortest[0] < shortest[1] < shortest[2]


def slow_progress(step_ms, elapsed=0.0, first_model=0.0):
    return Progress(
        step=10, total_steps=1000, elapsed_seconds=elapsed, step_ms=step_ms, steps_per_epoch=100,
        first_model_seconds=first_model,
    )  # fmt: skip


def test_what_follows_training_is_kept_longer_on_a_device_that_slows_down(small_model):
    table = make_table(small_model)
    head = head_mask(small_model)
    budget = deadline_budget((table, head), 100.0, steps=1000, end=20.0)
    budget.adopt(plan_of(table, head, None, 1e6, 1.0))
    assert budget.is_out_of_time(slow_progress([5.0] * 10, 81.0), False)
    assert not budget.is_out_of_time(slow_progress([5.0] * 10, 78.0), False)
    assert budget.is_out_of_time(slow_progress([15.0] * 50, 41.0), False), "40 s before, the export takes 60"
    assert not budget.is_out_of_time(slow_progress([15.0] * 50, 38.0), False)
    assert not budget.is_out_of_time(slow_progress([2.0] * 50, 78.0), False)


def test_averaging_is_expected_to_take_as_long_as_the_first_model_did(small_model):
    table = make_table(small_model)
    budget = deadline_budget((table, head_mask(small_model)), 100.0, steps=1000, averaging=2.0)
    assert not budget.is_out_of_time(slow_progress([5.0] * 10, 90.0), False)
    assert budget.is_out_of_time(slow_progress([5.0] * 10, 90.0, first_model=8.0), False)


def test_time_is_kept_to_test_the_best_model_after_training(small_model):
    table = replace(make_table(small_model), forward_ms=20.0)
    data = ShuffledData("photos", 8, 4, 2)
    assert RunTime.of(table, data, Settings()).end == 0
    data.held_out = ShuffledData("photos", 8, 200, 2)
    assert RunTime.of(table, data, Settings(), 7.0).end == pytest.approx(7.0 + 1.5 * 100 * 0.020)
