"""A selection fits into the budget, contains the head, and is the best of all."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from conftest import make_table

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.select import FILLER, select_tensors, select_upper_part
from elastic_trainer.timing.fit import Fit

MISSES = [1.0, 0.0, 0.3, 2.0]


@pytest.mark.parametrize("misses", MISSES)
def test_selection_fits_the_budget_and_contains_the_head(small_model, misses):
    table, head = make_table(small_model, t_fw_ms=1.5), head_mask(small_model)
    rng = np.random.default_rng(0)
    smallest = table.predict_ms(head, misses) / table.full_step_ms
    for rho in np.linspace(smallest, 0.99, 20):
        importance = rng.normal(0.2, 0.5, len(head))
        mask = select_tensors(table, importance, head, float(rho), misses=misses)
        assert mask[head].all() and table.predict_ms(mask, misses) <= rho * table.full_step_ms + 1e-9
    everything = select_tensors(table, -np.ones(len(head)), head, 1.0, misses=misses)
    assert everything.all(), "full training, whatever it gains"


def test_fillers_are_tensors_of_negative_importance_but_none_without_a_gradient(small_model):
    """They train where the budget has room. Without fillers, as in the paper, they are never selected."""
    table, head = make_table(small_model), head_mask(small_model)
    importance = -np.arange(1.0, len(head) + 1)
    importance[:2], importance[2] = 0.0, 1.0
    assert np.flatnonzero(select_tensors(table, importance, head, 0.99) & ~head).tolist() == [2]
    mask = select_tensors(table, importance, head, 0.99, has_fillers=True)
    assert mask[2] and not mask[:2].any(), "the deepest two have no gradient"
    assert mask.sum() == len(head) - 2
    short = select_tensors(table, importance, head, 0.8, has_fillers=True)
    assert short[2] and table.predict_ms(short) <= 0.8 * table.full_step_ms + 1e-9, "what lowers the loss comes first"


@pytest.mark.parametrize("misses", MISSES)
def test_selection_is_the_best_of_all_that_fit(small_model, misses):
    """Every subset is tried. Times are whole numbers of a small unit, so that rounding costs nothing."""
    head = head_mask(small_model)
    rng = np.random.default_rng(1)
    others = np.flatnonzero(~head)
    masks = np.tile(head, (2 ** len(others), 1))
    masks[:, others] = np.array([*product([False, True], repeat=len(others))])
    for _ in range(3):
        t_dw_ms, t_dy_ms, t_fw_ms = rng.integers(0, 9, (3, len(head))).astype(float)
        table = replace(
            make_table(small_model), t_dw_ms=t_dw_ms, t_dy_ms=t_dy_ms, t_fw_ms=t_fw_ms, preprocessing_ms=2.0
        )
        table = replace(table, fit=Fit(3.0, 0.9, 0.5, 0.8, None, None, 0, 0))
        table = replace(table, full_step_ms=table.predict_ms(np.ones(len(head), bool)))
        importance = rng.random(len(head))
        predicted_ms = np.array([table.predict_ms(mask, misses) for mask in masks])
        for rho in (0.3, 0.5, 0.7, 0.9):
            mask = select_tensors(table, importance, head, rho, misses=misses)
            fits = predicted_ms <= rho * table.full_step_ms
            if fits.any():
                best = max(importance[mask].sum() for mask in masks[fits])
                assert importance[mask].sum() == pytest.approx(best, rel=0.01)
            else:
                np.testing.assert_array_equal(mask, head)


def test_selection_is_the_best_of_those_in_which_gammas_train_with_their_kernels(small_model):
    """Every subset is tried. A kernel may be deeper than its gamma, or the reverse, or in the head."""
    head = head_mask(small_model)
    rng = np.random.default_rng(2)
    others, count = np.flatnonzero(~head), len(head)
    masks = np.tile(head, (2 ** len(others), 1))
    masks[:, others] = np.array([*product([False, True], repeat=len(others))])
    for _ in range(6):
        kernels = np.full(count, -1)
        kernels[[2, 5, 6]] = [3, 4, 0]
        t_dw_ms, t_dy_ms = rng.integers(1, 9, (2, count)).astype(float)
        table = replace(make_table(small_model), t_dw_ms=t_dw_ms, t_dy_ms=t_dy_ms, kernels=kernels)
        table = replace(table, full_step_ms=table.predict_ms(np.ones(count, bool)))
        importance = rng.normal(0.5, 0.5, count)
        selected = masks[:, table.positions]
        together = (selected[:, 2] == selected[:, 3]) & (selected[:, 4] == selected[:, 5])
        predicted_ms = np.array([table.predict_ms(mask) for mask in masks])
        for rho in (0.4, 0.6, 0.8, 0.99):
            mask = select_tensors(table, importance, head, rho, has_fillers=True)
            fits = together & (predicted_ms <= rho * table.full_step_ms + 1e-9)
            gains = np.where(head, 0.0, importance)[table.positions]
            gains[[3, 5]] += gains[[2, 4]]
            gains[[2, 4]] = 0.0
            gains[gains < 0] = FILLER
            best = (selected[fits] @ gains).max()
            assert together[(masks == mask).all(axis=1)].all()
            assert mask[table.positions] @ gains == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize("misses", MISSES)
def test_upper_part_is_the_largest_that_fits_even_beyond_one_that_does_not(small_model, misses):
    """A tensor more costs less where features get smaller. A gamma waits for its kernel."""
    head, rng, is_beyond = head_mask(small_model), np.random.default_rng(2), 0
    kernels = np.full(len(head), -1)
    kernels[[3, 7]] = [4, 9]
    table = replace(make_table(small_model), kernels=kernels)
    parts = [head.copy()]
    for depth in range(1, len(head) + 1):
        chosen = [k for k in range(depth) if kernels[k] < depth]
        parts.append(head.copy())
        parts[-1][table.positions[chosen]] = True
    for _ in range(20):
        t_dw_ms, t_dy_ms, t_fw_ms, features_mb = rng.uniform(0, 9, (4, len(head)))
        fit = Fit(3.0, 0.9, 0.5, 0.8, None, None, 0, 0, 5.0, 1.0)
        table = replace(table, t_dw_ms=t_dw_ms, t_dy_ms=t_dy_ms, t_fw_ms=t_fw_ms, features_mb=features_mb, fit=fit)
        table = replace(table, full_step_ms=table.predict_ms(parts[-1]))
        for rho in (0.3, 0.5, 0.7):
            mask = select_upper_part(table, None, head, rho, misses=misses)
            fits = [table.predict_ms(part, misses) <= rho * table.full_step_ms for part in parts]
            best = max((index for index, one in enumerate(fits) if one), default=0)
            np.testing.assert_array_equal(mask, parts[best])
            is_beyond += not all(fits[: best + 1])
    assert is_beyond > 0 or misses == 1
