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
    assert select_tensors(table, importance, head, 1.0).all(), "full training, whatever it gains"


@pytest.mark.parametrize("kernel_of", [{}, {2: 3, 5: 4, 6: 0}])
@pytest.mark.parametrize("misses", MISSES)
def test_selection_is_the_best_of_all_that_fit(small_model, misses, kernel_of):
    """Every subset is tried in which gammas train with their kernels; these may be deeper or less deep, or the head."""
    head, rng, table = head_mask(small_model), np.random.default_rng(1), make_table(small_model)
    others, count = np.flatnonzero(~head), len(head)
    kernels = np.full(count, -1)
    kernels[[*kernel_of]] = [*kernel_of.values()]
    masks = np.tile(head, (2 ** len(others), 1))
    masks[:, others] = np.array([*product([False, True], repeat=len(others))])
    selected = masks[:, table.positions]
    together = np.all([selected[:, k] == selected[:, kernel_of[k]] for k in kernel_of if kernel_of[k]], axis=0)
    for _ in range(3):
        t_dw_ms, t_dy_ms, t_fw_ms = rng.integers(1, 9, (3, count)).astype(float)
        times = {"t_dw_ms": t_dw_ms, "t_dy_ms": t_dy_ms, "t_fw_ms": t_fw_ms, "preprocessing_ms": 2.0}
        table = replace(table, kernels=kernels, fit=Fit(3.0, 0.9, 0.5, 0.8, None, None, 0, 0), **times)
        table = replace(table, full_step_ms=table.predict_ms(np.ones(count, bool)))
        importance = rng.normal(0.5, 0.5, count)
        gains = np.where(head, 0.0, importance)[table.positions]
        for gamma, kernel in kernel_of.items():
            if kernel:  # of the head, it always trains
                gains[kernel] += gains[gamma]
                gains[gamma] = 0.0
        gains[gains < 0] = FILLER
        predicted_ms = np.array([table.predict_ms(mask, misses) for mask in masks])
        for rho in (0.3, 0.5, 0.7, 0.9, 0.99):
            mask = select_tensors(table, importance, head, rho, misses, has_fillers=True)
            fits = together & (predicted_ms <= rho * table.full_step_ms + 1e-9)
            best = (selected[fits] @ gains).max(initial=0.0)
            assert (together & fits)[(masks == mask).all(axis=1)].all() or (not fits.any() and (mask == head).all())
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
