"""A selection fits into the budget and contains the head."""

import numpy as np
import pytest
from conftest import make_table

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.select import select_tensors


def test_selection_fits_the_budget_and_contains_the_head(small_model):
    table, head = make_table(small_model), head_mask(small_model)
    rng = np.random.default_rng(0)
    smallest = table.predict_ms(head) / table.full_step_ms
    for rho in np.linspace(smallest, 1, 20):
        importance = rng.normal(0.2, 0.5, len(head))
        selection = select_tensors(table, importance, head, float(rho))
        assert selection.mask[head].all()
        assert selection.predicted_step_ms == pytest.approx(table.predict_ms(selection.mask))
        assert selection.predicted_step_ms is not None and selection.budget_step_ms is not None
        assert selection.predicted_step_ms <= selection.budget_step_ms + 1e-9
        assert not (selection.mask & ~head & (importance <= 0)).any()
    everything = select_tensors(table, np.ones(len(head)), head, 1.0)
    assert everything.mask.all()
