"""The time budget is corrected by measurements, within bounds."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from elastic_trainer.selection.budget import (
    CORRECTION_BOUND,
    MAX_CARRY_OVER,
    SHORTFALL,
    Progress,
    RhoBudget,
    gradient_pass_steps,
    smallest_rho,
)
from elastic_trainer.selection.select import select_tensors
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table import StepPrediction


def simulate(budget, head, device, epochs=12, steps=100):
    """Train on a device that takes `device(epoch, ms)` for `ms` of the table; returns allowances and masks."""
    table = budget.table
    rng = np.random.default_rng(0)
    allowances, masks = [], []
    step_ms: list[float] = []
    for epoch in range(epochs):
        slowdowns = [device(max(epoch - 1, 0), table.gradient_pass_ms) / table.gradient_pass_ms] * 5
        progress = Progress(epoch * steps, epochs * steps, step_ms, slowdowns)
        allowances.append(copy(budget.allow(progress)))
        mask = select_tensors(table, rng.random(len(head)), head, allowances[-1].table_rho)
        budget.adopt(mask, table.predict(mask))
        masks.append(mask)
        step_ms = [device(epoch, table.predict_ms(mask))] * steps
    return allowances, masks


def test_uniform_slowdown_changes_the_allowance_but_not_the_selection(case):
    table, head = case
    allowances, masks = simulate(RhoBudget(table, head, 0.6), head, lambda epoch, ms: ms * (1 + (epoch >= 6)))
    assert [a.slowdown for a in allowances] == [1.0] * 7 + [2.0] * 5
    for a in allowances:
        assert a.correction == pytest.approx(1)
    for mask, a in zip(masks, allowances, strict=True):
        assert table.predict_ms(mask) <= a.table_rho * table.full_step_ms + 1e-9


@pytest.mark.parametrize("wrong", [1.15, 0.9])
def test_wrong_prediction_is_corrected(case, wrong):
    """Selections take `wrong` times their prediction; the gradient pass over all tensors takes what the table says."""
    table, head = case

    def device(epoch, ms):
        return ms if ms == table.gradient_pass_ms else ms * wrong

    allowances, masks = simulate(RhoBudget(table, head, 0.6), head, device)
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
            mask = select_tensors(table, importance, head, allowed)
            taken.append(min(table.predict_ms(mask) * correction / table.full_step_ms, 1.0))
        budget.adopt(mask, table.predict(mask))
        assert np.mean(used) <= rho + 1e-9
        expected = min(rho + min(expected - used[-1], MAX_CARRY_OVER), 1.0)
    if rho == 0.6:
        assert np.mean(used) > np.mean(plain) + 0.003 and max(used) > rho


@pytest.mark.parametrize(("wrong", "making"), [(1.1, 0.0), (0.9, 0.0), (1.0, 0.01)])
def test_what_steps_and_their_features_took_beyond_an_allowance_is_balanced_by_the_next(case, wrong, making):
    """The device takes `wrong` times as long. Once the table is corrected, nothing is carried over."""
    table, head = case
    budget = RhoBudget(table, head, 0.6)
    allowance = budget.allow(Progress())
    for index in range(12):
        step_ms = allowance.table_rho * table.full_step_ms  # the selection fills its budget
        budget.adopt(head, StepPrediction(step_ms, making * table.full_step_ms, making > 0))
        allowance = budget.allow(Progress(step_ms=[wrong * step_ms] * 50, slowdowns=[1.0] * 15))
        beyond = wrong - 1 + making
        assert (allowance.rho - 0.6) * beyond <= 0 and abs(allowance.rho - 0.6) <= MAX_CARRY_OVER + 1e-9
        assert index or abs(allowance.rho - 0.6) > 0.9 * min(abs(beyond), MAX_CARRY_OVER) - 1e-9
        making = 0.0
    assert allowance.rho == pytest.approx(0.6, abs=1e-3)


def test_correction_is_bounded_and_still_allows_the_head(case):
    table, head = case
    budget = RhoBudget(table, head, 0.01 + table.predict_ms(head) / table.full_step_ms)
    for factor, bound in ((50.0, CORRECTION_BOUND), (0.02, 1 / CORRECTION_BOUND)):
        for _ in range(3):
            budget.adopt(head, table.predict(head))
            allowance = budget.allow(Progress(step_ms=[factor * table.predict_ms(head)] * 9, slowdowns=[1.0] * 9))
        assert allowance.correction == pytest.approx(bound)
        if bound > 1:
            assert allowance.rho == budget.smallest_rho
            mask = select_tensors(table, np.ones(len(head)), head, allowance.table_rho)
            np.testing.assert_array_equal(mask, head)


def test_load_that_goes_away_within_an_interval_is_no_wrong_prediction(case):
    """Each stretch of steps is compared with the gradient pass in it."""
    table, head = case
    budget = RhoBudget(table, head, 0.6)
    budget.adopt(head, table.predict(head))
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
        budget.adopt(head, table.predict(head))
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


def test_smallest_rho_includes_the_making_of_the_heads_features_and_is_named_by_the_error(with_forward):
    table, head = with_forward
    depth, count = table.depth(head), len(head)
    for misses, where in ((0.0, "included"), (0.25, "included"), (1.0, "here")):
        expected_ms = 1.0 + 1.0 * depth + 1.0 * depth + misses * (count - depth)  # constant, training, R, making of P
        smallest = smallest_rho(table, head, misses)
        assert smallest == pytest.approx(expected_ms / table.full_step_ms)
        with pytest.raises(UserError, match=rf"{where}; give at least (0\.\d+)") as caught:
            RhoBudget(table, head, smallest - 0.01, misses)
        suggested = float(str(caught.value).rsplit(" ", 1)[1])
        assert smallest <= suggested < smallest + 0.0011
        assert RhoBudget(table, head, suggested, misses).smallest_rho == smallest


@pytest.mark.parametrize("is_estimate", [False, True])
def test_a_resumed_budget_allows_what_it_would_have_allowed(is_estimate, with_forward):
    """It knows the making of the features, and what an estimated table has learned."""
    table, head = with_forward
    table = replace(table, details={"is_estimate": is_estimate})
    mask = select_tensors(table, np.ones(len(head)), head, 0.5, misses=0.0)
    step_ms = table.predict_ms(mask)
    measured = Progress(step_ms=[1.3 * step_ms] * 20, slowdowns=[1.0] * 5, mask=mask)
    budget, resumed = RhoBudget(table, head, 0.5, misses=0.0), RhoBudget(table, head, 0.5, misses=0.0)
    budget.adopt(mask, StepPrediction(step_ms, 0.5, True))
    budget.allow(measured)
    resumed.resume(budget.to_record())
    assert resumed.table.digest() == budget.table.digest()
    assert resumed.allow(Progress()).rho == budget.allow(Progress()).rho != 0.5
    if is_estimate:
        assert budget.table.predict_ms(mask) == pytest.approx(1.3 * step_ms, rel=0.05)
    else:
        assert budget.table is table and budget.correction > 1.1


def test_steps_stay_unless_others_are_clearly_closer_to_the_budget(case):
    table, head = case
    budget, best = RhoBudget(table, head, 0.5), StepPrediction(0.49 * table.full_step_ms, 0.0, False)
    limit_ms = 0.5 * table.full_step_ms
    for current_ms, stays in (
        (best.step_ms - 0.99 * SHORTFALL * limit_ms, True),
        (best.step_ms - 1.01 * SHORTFALL * limit_ms, False),
        (1.009 * limit_ms, True),
        (1.011 * limit_ms, False),
    ):
        current = StepPrediction(0.5 * current_ms, 0.5 * current_ms, True)
        assert budget.is_close(best, current, 1.0, Progress()) is stays
        lost_ms = abs(current_ms - best.step_ms)
        for changing_ms, is_longer in ((0.99 * lost_ms, False), (1.01 * lost_ms, True)):
            progress = Progress(step=10, total_steps=20, selection_seconds=10 * changing_ms / 1e3)
            assert budget.is_close(best, current, 1.0, progress) is (stays or is_longer), "a change has to pay"
