"""The time budget is corrected by measurements, within bounds, and deadlines are met on a device that slows down."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_small_model, make_table

from elastic_trainer.errors import UserError
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.history import History
from elastic_trainer.selection import time_budget
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Plan, plan_of, select_tensors
from elastic_trainer.selection.time_budget import (
    CARRIED,
    CORRECTION_BOUND,
    DeadlineBudget,
    DeadlineTooShortError,
    Progress,
    RhoBudget,
    deadline_epochs,
    gradient_pass_steps,
    smallest_rho,
)


@pytest.fixture(scope="module")
def case():
    model = make_small_model()
    return make_table(model, t_dy_ms=0.5, t_dw_ms=0.5, constant_ms=3.0), head_mask(model)


def simulate(budget, head, device, epochs=12, steps=100, seconds_beside=0.0):
    """Train on a device that takes `device(epoch, ms)` for `ms` of the table; returns allowances, masks and seconds."""
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
        selection = select_tensors(table, rng.random(len(head)), head, allowances[-1].table_rho)
        budget.adopt(selection)
        masks.append(selection.mask)
        step_ms = [device(epoch, table.predict_ms(selection.mask))] * steps
        elapsed += sum(step_ms) / 1e3 + 2 * seconds_beside
    return allowances, masks, elapsed


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
    details = {} if compiling_ms is None else {"compiling_ms": compiling_ms}
    table = replace(make_table(small_model), full_step_ms=100.0, forward_ms=20.0, details=details)
    assert deadline_epochs(table, seconds, 100, 10, most=12, interval=3)[0] == epochs


def test_selections_take_a_tenth_of_a_deadline_at_most(small_model):
    """24 photos: an epoch is one step, and a selection takes as long as dozens of them."""
    table = replace(make_table(small_model), full_step_ms=50.0, forward_ms=20.0, details={"compiling_ms": 1500.0})
    epochs, interval = deadline_epochs(table, 60.0, 1, 1, most=500, interval=4)
    assert epochs > 100 and math.ceil(epochs / interval) * 1.5 <= 0.1 * 60
    assert deadline_epochs(table, 6000.0, 1000, 1, most=12, interval=4)[1] == 4
    fewer, given = deadline_epochs(table, 60.0, 1, 1, most=500, interval=4, may_lengthen=False)
    assert given == 4 and fewer < epochs, "the selections that were asked for take time from the epochs"


def test_epochs_that_are_not_validated_leave_time_for_more(small_model):
    table = replace(make_table(small_model), full_step_ms=100.0, forward_ms=400.0, details={"compiling_ms": 0.0})
    # An epoch takes 6 s of steps and 6 s of validation, which may take a tenth of that and 6 s at the end.
    assert deadline_epochs(table, 60.0, 100, 10, most=12, interval=12)[0] == 5
    assert deadline_epochs(table, 60.0, 100, 10, most=12, interval=12, validation_share=0.1)[0] == 8


def test_a_run_before_a_deadline_has_the_steps_that_fit_at_the_latest_speed(case):
    table, head = case
    budget = DeadlineBudget(table, head, 100.0, 1200, 12, [0], 3)
    assert budget.fitting_steps(Progress(1, 12, 100, 1200, 20.0)) is None, "no step was measured"
    progress = Progress(1, 12, 100, 1200, 20.0, step_ms=[90.0] * 60, overhead_ms=10.0, validation_seconds=[2.0])
    progress = progress._replace(steps_per_epoch=100)
    assert budget.fitting_steps(progress) == 100 + int((80 * 0.98 - 1.5 * 2) / (0.1 + 0.02))
    budget = DeadlineBudget(table, head, 100.0, 1200, 12, [0], 3, validation_share=0.1)
    assert budget.fitting_steps(progress) == 100 + int((80 * 0.98 - 1.5 * 2) / (0.1 + 0.01))


def test_a_deadline_may_limit_rho_and_starts_before_training(case):
    table, head = case
    budget = DeadlineBudget(table, head, 1e6, 1200, 12, [0], 3)
    budget.limit_rho(0.6)
    assert budget.allow(Progress(epochs=12, total_steps=1200)).rho == 0.6
    seconds = 0.8 * 1200 * table.full_step_ms / 1e3
    rhos = [
        DeadlineBudget(table, head, seconds + elapsed, 1200, 12, [0], 3, elapsed=elapsed, start_seconds=start)
        .allow(Progress(epochs=12, total_steps=1200, elapsed_seconds=elapsed))
        .rho
        for elapsed, start in ((0.0, 0.0), (5.0, 0.0), (0.0, 0.1 * seconds))
    ]
    assert rhos[0] == pytest.approx(rhos[1]) and rhos[2] < rhos[0] - 0.05
    with pytest.raises(DeadlineTooShortError):
        DeadlineBudget(table, head, 20.0, 1200, 12, [0], 3, elapsed=19.0)


def test_a_deadline_keeps_the_time_of_the_first_selections(case):
    """Each compiles a step, and so do the gradient pass and validation; the device takes 1.5 of the table's time."""
    table, head = case
    table, seconds = replace(table, details={"compiling_ms": 200.0}), 0.9 * 1200 * table.full_step_ms / 1e3
    validations_ms = (11 + 1.5) * 1.5 * 3 * table.forward_ms
    for selection_steps in ([0], [0, 300, 600]):
        budget = DeadlineBudget(table, head, seconds, 1200, 12, selection_steps, 3)
        allowance = budget.allow(Progress(epochs=12, total_steps=1200, slowdowns=[1.5] * 5))
        compiling_ms = 200 * (len(selection_steps) + 2)
        allowed_ms = 0.9 * 1e3 * seconds - 1.5 * (validations_ms + compiling_ms)
        assert 1200 * allowance.rho * 1.5 * table.full_step_ms == pytest.approx(allowed_ms)
        assert budget.smallest_rho < allowance.rho < 1


def test_rho_too_small_for_the_head_names_the_smallest_feasible_rho(small_model):
    table, head = make_table(small_model, constant_ms=20.0), head_mask(small_model)
    smallest = table.predict_ms(head) / table.full_step_ms
    with pytest.raises(UserError, match=r"--rho 0.1: .* give at least (0\.\d+)") as caught:
        RhoBudget(table, head, 0.1)
    suggested = float(str(caught.value).rsplit(" ", 1)[1])
    assert smallest <= suggested < smallest + 0.0011
    RhoBudget(table, head, suggested)


def test_uniform_slowdown_changes_the_allowance_but_not_the_selection(case):
    table, head = case
    allowances, masks, _ = simulate(RhoBudget(table, head, 0.6), head, lambda epoch, ms: ms * (1 + (epoch >= 6)))
    assert [a.slowdown for a in allowances] == [1.0] * 7 + [2.0] * 5
    for a in allowances:
        assert a.full_step_ms == pytest.approx(table.full_step_ms * a.slowdown)
        assert a.correction == pytest.approx(1)
    for mask, a in zip(masks, allowances, strict=True):
        assert table.predict_ms(mask) <= a.table_rho * table.full_step_ms + 1e-9


@pytest.mark.parametrize("wrong", [1.15, 0.9])
def test_wrong_prediction_is_corrected(case, wrong):
    """Selections take `wrong` times their prediction; the gradient pass over all tensors takes what the table says."""
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
def test_carry_over_keeps_the_mean_at_or_below_rho(case, rho, correction):
    """With tensors of very different times, selections seldom fill their budget."""
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
        for allowed, taken in ((rho / correction, plain), (allowance.table_rho, used)):
            mask = select_tensors(table, importance, head, allowed).mask
            taken.append(min(table.predict_ms(mask) * correction / table.full_step_ms, 1.0))
        budget.adopt(plan_of(table, mask, None, 0.0, 1.0))
        assert np.mean(used) <= rho + 1e-9
        expected = min(rho + min(expected - used[-1], CARRIED), 1.0)
    if rho == 0.6:
        assert np.mean(used) > np.mean(plain) + 0.003 and max(used) > rho


@pytest.mark.parametrize("wrong", [1.1, 0.9])
def test_steps_above_or_below_their_allowance_are_balanced_by_the_next_allowance(case, monkeypatch, wrong):
    """The mean is nearer to rho than without carrying over. Once the table is corrected, nothing is carried over."""
    table, head = case
    errors = []
    for carried in (CARRIED, 0.0):
        monkeypatch.setattr(time_budget, "CARRIED", carried)
        budget = RhoBudget(table, head, 0.6)
        allowance, took = budget.allow(Progress()), []
        for _ in range(12):
            # The selection fills its budget exactly; the device takes `wrong` times as long.
            step_ms = allowance.table_rho * table.full_step_ms
            budget.adopt(Plan(head, None, step_ms, 0.0, False, step_ms))
            took.append(wrong * allowance.table_rho)
            allowance = budget.allow(Progress(step_ms=[wrong * step_ms] * 50, slowdowns=[1.0] * 15))
            assert (allowance.rho - 0.6) * (1 - wrong) >= 0 and abs(allowance.rho - 0.6) <= carried + 1e-9
        assert took[0] == pytest.approx(0.6 * wrong) and allowance.rho == pytest.approx(0.6, abs=1e-3)
        errors.append(abs(np.mean(took) - 0.6))
    assert errors[0] < 0.6 * errors[1]


def test_carry_over_still_allows_the_head(case):
    table, head = case
    budget = RhoBudget(table, head, 0.01 + table.predict_ms(head) / table.full_step_ms)
    budget.adopt(plan_of(table, head, None, 0.0, 1.0))
    steps = [1.2 * table.predict_ms(head)] * 50
    allowance = budget.allow(Progress(step_ms=steps, slowdowns=[1.0] * 15))
    assert allowance.correction > 1.05 and allowance.rho == budget.smallest_rho
    selection = select_tensors(table, np.ones(len(head)), head, allowance.table_rho)
    np.testing.assert_array_equal(selection.mask, head)


def test_correction_is_bounded(case):
    table, head = case
    budget = RhoBudget(table, head, 0.6)
    for factor, bound in ((50.0, CORRECTION_BOUND), (0.02, 1 / CORRECTION_BOUND)):
        budget.adopt(plan_of(table, head, None, 0.0, 1.0))
        steps = [factor * table.predict_ms(head)] * 9
        for _ in range(3):
            correction = budget.allow(Progress(step_ms=steps, slowdowns=[1.0] * 9)).correction
        assert correction == pytest.approx(bound)


def test_load_that_goes_away_within_an_interval_is_no_wrong_prediction(case):
    """Each stretch of steps is compared with the gradient pass in it."""
    table, head = case
    budget = RhoBudget(table, head, 0.6)
    budget.adopt(plan_of(table, head, None, 0.0, 1.0))
    expected = table.predict_ms(head)
    steps = [2 * expected] * 300 + [expected] * 200
    allowance = budget.allow(Progress(step_ms=steps, slowdowns=[2.0] * 3 + [1.0] * 2))
    assert allowance.correction == pytest.approx(1.0) and allowance.slowdown == 2.0
    later = budget.allow(Progress(step_ms=steps, slowdowns=[2.0] * 6 + [1.0] * 4))
    assert later.slowdown == 1.0, "it is the slowdown at the end"


def test_noisy_measurements_change_the_correction_less(case):
    """Many equal measurements correct most, a few that differ correct least, and one outlier changes nothing."""
    table, head = case
    rng = np.random.default_rng(0)
    corrections = []
    for slowdowns in ([1.0] * 15, [1.0] * 5, [0.8, 1.0, 1.25, 0.7, 1.4], [1.0] * 14 + [9.0]):
        budget = RhoBudget(table, head, 0.6)
        budget.adopt(plan_of(table, head, None, 0.0, 1.0))
        steps = [1.1 * table.predict_ms(head) * noise for noise in rng.normal(1, 0.02, 50)]
        corrections.append(budget.allow(Progress(step_ms=steps, slowdowns=slowdowns)).correction)
    many, few, scattered, with_outlier = corrections
    assert 1.1 > many > few > scattered > 1.0
    assert with_outlier == pytest.approx(many, abs=0.01)


@pytest.mark.parametrize(
    ("start", "end", "passes"), [(0, 1, 1), (3, 6, 1), (0, 19, 3), (0, 90, 5), (100, 1100, 10), (0, 9000, 15)]
)
def test_gradient_passes_are_spread_evenly_over_each_interval(start, end, passes):
    steps = sorted(gradient_pass_steps([start, end]))
    assert len(steps) == passes
    count = end - start
    assert start < steps[0] and steps[-1] <= end
    if passes > 1:
        assert set(np.diff(steps)) <= {count // passes, count // passes + 1}
    assert gradient_pass_steps([start, end, end + 7]) == {*steps} | {end + step for step in gradient_pass_steps([0, 7])}


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_deadline_is_met_and_used_if_the_device_slows_down_half_way(case, slow):
    table, head = case
    seconds = 0.75 * 12 * 100 * table.full_step_ms / 1e3
    budget = DeadlineBudget(table, head, seconds, 1200, 12, range(0, 1200, 100), 3)
    allowances, _, elapsed = simulate(budget, head, lambda epoch, ms: ms * (slow if epoch >= 6 else 1.0))
    assert elapsed <= seconds
    assert elapsed > 0.9 * seconds
    if slow > 1:
        assert allowances[-1].rho < allowances[0].rho - 0.1


def test_deadline_slowdown_comes_from_gradient_passes_then_from_the_latest_steps(case):
    table, head = case
    budget = DeadlineBudget(table, head, 60.0, 1200, 12, range(0, 1200, 100), 3)
    first = budget.allow(Progress(0, 12, 0, 1200, slowdowns=[1.5] * 5))
    assert first.slowdown == 1.5 and first.full_step_ms == pytest.approx(1.5 * table.full_step_ms)
    budget.adopt(plan_of(table, head, None, 0.0, 1.0))
    step_ms = [1.2 * table.predict_ms(head)] * 100
    later = budget.allow(Progress(1, 12, 100, 1200, 1.0, step_ms, slowdowns=[1.5] * 5))
    assert later.slowdown == pytest.approx(1.2)


def test_deadline_leaves_time_for_validation_and_selection(case):
    table, head = case
    seconds = 0.7 * 12 * 100 * table.full_step_ms / 1e3
    budget = DeadlineBudget(table, head, seconds, 1200, 12, range(0, 1200, 100), 3)
    elapsed = simulate(budget, head, lambda epoch, ms: ms, seconds_beside=0.02 * seconds / 24)[2]
    assert 0.9 * seconds < elapsed <= seconds


def test_deadline_reserves_time_for_the_last_validation(case):
    table, head = case
    budget = DeadlineBudget(table, head, 100.0, 1200, 12, [0], 3)
    budget.adopt(plan_of(table, head, None, 0.0, 1.0))
    step_ms = [table.predict_ms(head)] * 9
    allowance = budget.allow(
        Progress(11, 12, 1100, 1200, 96.0, step_ms, validation_seconds=[2.0], selection_seconds=1.0)
    )
    assert 100 * allowance.rho * table.full_step_ms / 1e3 == pytest.approx(4 * 0.98 - 1.5 * 2)


def test_long_deadline_trains_every_tensor_at_rho_1(case):
    table, head = case
    budget = DeadlineBudget(table, head, 1e6, 1200, 12, range(0, 1200, 100), 3)
    allowance = budget.allow(Progress(epochs=12, total_steps=1200))
    assert allowance.rho == 1.0
    assert select_tensors(table, np.ones(len(head)), head, allowance.table_rho).mask.all()


def test_impossible_deadline_is_refused_and_a_missed_one_trains_the_head_only(case):
    table, head = case
    with pytest.raises(UserError, match=r"--deadline 1: training the head alone for 1200 steps takes about \d+ s here"):
        DeadlineBudget(table, head, 1.0, 1200, 12, range(0, 1200, 100), 3)
    budget = DeadlineBudget(table, head, 60.0, 1200, 12, range(0, 1200, 100), 3)
    allowance = budget.allow(Progress(6, 12, 600, 1200, elapsed_seconds=59.9))
    assert allowance.rho == budget.smallest_rho
    selection = select_tensors(table, np.ones(len(head)), head, allowance.table_rho)
    np.testing.assert_array_equal(selection.mask, head)


def test_the_first_validation_before_a_deadline_is_compiled_too(case):
    table, head = case
    budgets = [
        DeadlineBudget(replace(table, details=details), head, 60.0, 1200, 12, [0], 3)
        for details in ({}, {"compiling_ms": 4000.0})
    ]
    for elapsed, slowdown, expected in ((55.0, 1.0, False), (55.0, 1.5, True), (56.5, 1.0, True)):
        late = Progress(0, 12, 100, 1200, elapsed_seconds=elapsed, slowdown=slowdown)
        assert [budget.is_out_of_time(late, selection_is_due=False) for budget in budgets] == [False, expected]
    measured = late._replace(validation_seconds=[1.0])
    assert not any(budget.is_out_of_time(measured, selection_is_due=False) for budget in budgets)


def test_one_slow_validation_does_not_change_the_plan(case):
    progress = History(validation_seconds=[9.0, 1.0, 1.1, 9.0]).progress(Schedule(1, 9))
    assert progress.validation_seconds == [1.0, 1.1, 9.0]
    table, head = case
    budget = DeadlineBudget(table, head, 100.0, 1200, 12, [0], 3)
    plans = [
        budget.allow(Progress(11, 12, 1100, 1200, 97.0, validation_seconds=seconds, selection_seconds=1.0)).rho
        for seconds in (progress.validation_seconds, [1.1])
    ]
    assert plans[0] == plans[1] < 1


@pytest.fixture(scope="module")
def with_forward():
    """As `case`, with a forward pass that is half of the step."""
    model = make_small_model()
    return make_table(model, t_dy_ms=0.5, t_dw_ms=0.5, constant_ms=1.0, t_fw_ms=1.0), head_mask(model)


def test_smallest_rho_includes_the_making_of_the_heads_features(with_forward):
    table, head = with_forward
    depth, count = table.depth(head), len(head)
    for misses in (0.0, 0.25, 1.0):
        expected_ms = 1.0 + 1.0 * depth + 1.0 * depth + misses * (count - depth)  # constant, training, R, making of P
        assert smallest_rho(table, head, misses) == pytest.approx(expected_ms / table.full_step_ms)
        assert RhoBudget(table, head, 0.99, misses).smallest_rho == smallest_rho(table, head, misses)
    assert table.t_dy_ms[0] + table.t_dw_ms[0] == 1.0
    with pytest.raises(UserError, match=r"making its cached features included; give at least 0\.\d+"):
        RhoBudget(table, head, smallest_rho(table, head, 0.25) - 0.01, 0.25)
    with pytest.raises(UserError, match=r"of a full step here; give at least 0\.\d+"):
        RhoBudget(table, head, smallest_rho(table, head, 0.25))


def test_what_making_features_takes_is_subtracted_from_the_next_allowance(with_forward):
    table, head = with_forward
    rho = 0.5
    for making in (0.0, 0.01):
        budget = RhoBudget(table, head, rho, misses=0.0)
        step_ms = table.predict_ms(head, 0.0)
        budget.adopt(Plan(head, None, step_ms, (rho + making) * table.full_step_ms - step_ms, True, 0.0))
        assert budget.allow(Progress()).rho == pytest.approx(rho - making)


def test_steps_on_cached_features_are_compared_with_their_own_prediction(with_forward):
    table, head = with_forward
    assert table.predict_ms(head, 0.0) < table.predict_ms(head)
    for misses in (0.0, 0.2, 1.0):
        budget, plan = RhoBudget(table, head, 0.7), plan_of(table, head, None, 0.0, misses)
        budget.adopt(plan)
        assert plan.step_ms == table.predict_ms(head, 0.0 if misses < 1 else 1.0)
        progress = Progress(step_ms=[plan.step_ms] * 50, slowdowns=[1.0] * 15)
        assert budget.allow(progress).correction == pytest.approx(1.0)


def test_resumed_budget_continues_with_the_making_of_its_features(with_forward):
    table, head = with_forward
    allowed = []
    for resumed in (False, True):
        budget = RhoBudget(table, head, 0.5, misses=0.0)
        budget.correction = 1.1
        budget.adopt(Plan(head, None, table.predict_ms(head, 0.0), 3.0, True, 0.0))
        if resumed:
            record, budget = budget.to_record(), RhoBudget(table, head, 0.5, misses=0.0)
            budget.resume(record, head)
        allowed.append(budget.allow(Progress()))
    assert allowed[0] == allowed[1] and allowed[0].rho != 0.5


def test_deadline_counts_what_making_features_takes(with_forward):
    table, head = with_forward
    shortest = []
    for misses in (0.0, 0.5, 1.0):
        with pytest.raises(UserError, match=r"takes about (\d+) s") as caught:
            DeadlineBudget(table, head, 0.1, 100_000, 1, [0], 3, misses)
        shortest.append(int(str(caught.value).split("about ")[1].split(" s")[0]))
    assert shortest[0] < shortest[1] < shortest[2]
