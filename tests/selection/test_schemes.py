"""The elastic scheme: it measures the device's slowdown during training."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table
from small_runs import elastic_run

from elastic_trainer.datasets.augmentation import Augmentation
from elastic_trainer.engine.features import FeatureCache
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.budget import (
    CORRECTION_BOUND,
    MAX_CARRY_OVER,
    Progress,
    feature_misses,
    gradient_pass_steps,
)
from elastic_trainer.selection.elastic import ElasticScheme
from elastic_trainer.selection.importance import ImportanceEvaluator, Random
from elastic_trainer.selection.schemes import SchemeContext
from elastic_trainer.selection.select import select_upper_part
from elastic_trainer.settings import Settings


def test_elastic_run_records_slowdown_and_correction(tmp_path):
    table = make_table(make_small_model())
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6)
    summary, selections, trained = elastic_run(tmp_path, settings, table)
    assert len(selections) == 3
    for row in selections:
        slowdown, correction = float(row["slowdown"]), float(row["correction"])
        assert slowdown > 0 and 1 / CORRECTION_BOUND <= correction <= CORRECTION_BOUND
        assert abs(float(row["rho"]) - 0.6) <= MAX_CARRY_OVER + 1e-9
        assert float(row["budget_step_ms"]) == pytest.approx(float(row["rho"]) * table.full_step_ms * slowdown)
        assert float(row["predicted_step_ms"]) <= float(row["budget_step_ms"]) + 1e-9
    assert float(selections[0]["correction"]) == 1
    assert len({row["slowdown"] for row in selections}) == 3  # measured before each selection
    slowdowns = [one for selection in trained for one in (selection.slowdown, *selection.slowdowns)]
    full_ms = [table.full_step_ms * slowdown for slowdown in slowdowns]
    most = (
        1e3 * summary["train_seconds"] / (summary["steps"] - 3) / min(full_ms)
    )  # the first step of each selection is not timed
    assert 0.5 * summary["median_step_ms"] / max(full_ms) < summary["rho_measured"] < most


def test_gradient_passes_do_not_change_the_weights():
    """At rho 1 everything is selected, so runs with and without gradient passes are equal."""
    weights, passes = [], []
    for correct in (True, False):
        model = make_small_model()
        settings = Settings(learning_rate=0.05, num_epochs=4, interval=2, rho=1.0, deterministic=not correct)
        trainer = Trainer(model, make_small_data(), settings=settings, table=make_table(model))
        trainer.run()
        weights.append([variable.numpy() for variable in model.variables])
        passes.append([len(selection.slowdowns) for selection in trainer.history.selections])
    assert passes == [[2, 2], [0, 0]] and gradient_pass_steps([0, 12, 24]) == {3, 9, 15, 21}
    for with_passes, without in zip(*weights, strict=True):
        np.testing.assert_array_equal(with_passes, without)


def elastic_scheme(settings, selector=(), caches=True, **times):
    """An elastic scheme of the small network with a table of equal times, its budget, and a state to select for."""
    model = make_small_model()
    data = make_small_data()
    optimizer = make_optimizer("sgd", 0.01, 0.0, 10)
    optimizer.build(model.trainable_variables)
    task = ImageClassification(model)
    features = FeatureCache(data) if caches else None
    scheme = ElasticScheme(SchemeContext(task, data, settings, make_table(model, **times)), *selector)
    return scheme, scheme.budget, TrainState(task, optimizer, data.batch_size, features=features)


def test_features_are_made_for_an_interval_and_kept_with_their_selection(monkeypatch):
    settings = Settings(num_epochs=40, interval=10, rho=0.6, deterministic=True)
    scheme, budget, state = elastic_scheme(settings, t_fw_ms=1.0, constant_ms=1.0)
    table, head = budget.table, head_mask(state.model)
    first = scheme.select(Progress(total_steps=240, features_possible=True), state)
    caching_ms = 0.1 * (len(head) - table.depth(first.mask))  # 24 images for 60 steps of 4
    assert first.uses_features and budget._caching_ms == pytest.approx(caching_ms)
    assert first.predicted_step_ms == pytest.approx(table.predict_ms(first.mask, 0.0))
    assert first.predicted_step_ms + caching_ms <= first.budget_step_ms + 1e-9
    again = first.mask.astype(float)  # the same tensors matter
    monkeypatch.setattr(ImportanceEvaluator, "importance", lambda *_: again)
    cached = Progress(step=60, total_steps=240, features_possible=True, mask=first.mask, feature_steps=60)
    kept = scheme.select(cached, state)
    assert (kept.mask == first.mask).all() and kept.uses_features and budget._caching_ms == 0
    half = scheme.select(cached._replace(step=120, feature_steps=3), state)
    assert half.uses_features and budget._caching_ms == pytest.approx(caching_ms / 2)
    none = scheme.select(Progress(step=180, total_steps=240, mask=half.mask), state)
    assert not none.uses_features and budget._caching_ms == 0 and none.mask.sum() < first.mask.sum()


@pytest.mark.parametrize("selector", [(), (None, select_upper_part)])
def test_a_selection_for_which_features_turn_out_not_to_be_possible_is_the_one_without(selector, monkeypatch):
    """The latest steps are compared once with what they trained, not with the selection that is given up."""
    settings = Settings(num_epochs=40, interval=10, rho=0.6)
    monkeypatch.setattr(ImportanceEvaluator, "pass_ms", lambda *_: 1.0)
    found = []
    for possible in (True, False):
        scheme, budget, state = elastic_scheme(settings, selector, caches=False, t_fw_ms=1.0, constant_ms=1.0)
        first = scheme.select(Progress(total_steps=240), state)
        step_ms, slowdowns = [1.1 * budget.table.predict_ms(head_mask(state.model))] * 20, [1.0] * 5
        now = Progress(step=60, total_steps=240, features_possible=possible, step_ms=step_ms, slowdowns=slowdowns)
        found.append((scheme.select(now._replace(mask=first.mask), state), budget.correction))
    (repeated, correction), (without, expected) = found
    assert not repeated.uses_features and correction == expected != 1.0
    assert (repeated.rho, repeated.correction) == (without.rho, without.correction)
    np.testing.assert_array_equal(repeated.importance, without.importance)
    np.testing.assert_array_equal(repeated.mask, without.mask)


@pytest.mark.parametrize("selector", [(None, select_upper_part), (Random,)])
@pytest.mark.parametrize("interval", [40, 20])
def test_gradients_are_compiled_for_the_speed_alone_only_where_a_later_selection_uses_it(selector, interval):
    settings = Settings(num_epochs=40, interval=interval, rho=0.6)
    scheme, _, state = elastic_scheme(settings, selector)
    selection = scheme.select(Progress(total_steps=240), state)
    assert ("_gradients" in vars(scheme._evaluator)) == (selection.slowdown != 1.0) == (interval < 40)


def test_upper_part_is_traced_again_only_if_the_budget_asks_for_another(monkeypatch):
    settings = Settings(num_epochs=40, interval=10, rho=0.6)
    scheme, budget, state = elastic_scheme(settings, selector=(None, select_upper_part))
    monkeypatch.setattr(ImportanceEvaluator, "pass_ms", lambda *_: budget.table.gradient_pass_ms)
    first = scheme.select(Progress(total_steps=240), state)
    # A little less is too little for its last tensor.
    budget._asked = budget.rho = first.predicted_step_ms / budget.table.full_step_ms
    shares = []
    for index, slower in enumerate((1.004, 0.996, 1.2), start=1):
        step_ms = [slower * budget.table.predict_ms(first.mask)] * 20
        now = Progress(step=60 * index, total_steps=240, step_ms=step_ms, slowdowns=[1.0] * 5, mask=first.mask)
        again = scheme.select(now, state)
        shares.append(again.budget_step_ms)
        assert (again.mask == first.mask).all() == (slower < 1.1)
    assert len(set(shares)) == 3  # although the budget was corrected each time


def test_slowdown_and_correction_turn_a_plan_into_wall_time(monkeypatch):
    settings = Settings(num_epochs=40, interval=10, rho=0.6)
    scheme, budget, state = elastic_scheme(settings, t_fw_ms=1.0, constant_ms=1.0)
    budget.correction = 1.2
    monkeypatch.setattr(ImportanceEvaluator, "pass_ms", lambda *_: 2 * budget.table.gradient_pass_ms)
    selection = scheme.select(Progress(total_steps=240, features_possible=True), state)
    assert (selection.slowdown, selection.correction) == (2, 1.2)
    step_ms = budget.table.predict_ms(selection.mask, 0.0)
    assert selection.predicted_step_ms == pytest.approx(2 * 1.2 * step_ms)
    caching_ms = 2 * 1.2 * budget._caching_ms
    assert 0 < caching_ms <= selection.budget_step_ms - selection.predicted_step_ms + 1e-9


def test_misses_are_the_expected_share_of_images_shown_for_the_first_time():
    for augment, count in (("none", 1), ("flip", 2), ("flip_crop", 8)):
        data, views = make_small_data(augment=augment), Augmentation(augment, 0, 10_000)
        assert data.view_count == count and feature_misses(data, 6) == 1.0
        for first, cached, epochs in ((0, 0, 3), (0, 0, 5), (0, 0, 20), (14, 0, 6), (7, 2, 6)):
            drawn = np.stack([views.views(epoch) for epoch in range(first, first + cached + epochs)], axis=1)
            new = np.mean([len({*row.tolist()}) - len({*row[:cached].tolist()}) for row in drawn])
            misses = feature_misses(data, 6 * epochs, 6 * (first + cached), 6 * cached)
            assert misses == pytest.approx(new / epochs, rel=0.02)
    assert feature_misses(make_small_data(augment="flip_rotate"), 600) == 1.0


def test_by_an_estimated_table_it_selects_after_some_steps_too():
    settings = Settings(num_epochs=40, interval=10, rho=0.6)
    data, model = make_small_data(), make_small_model()
    table = replace(make_table(model), details={"is_estimate": True})
    scheme = ElasticScheme(SchemeContext(ImageClassification(model), data, settings, table))
    assert scheme.due == {0, 10, 30, 60, 120, 180}
