"""A made-up device that trains within a time budget."""

from copy import copy

import numpy as np

from elastic_trainer.selection.budget import Progress
from elastic_trainer.selection.select import select_tensors


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
        selection = select_tensors(table, rng.random(len(head)), head, allowances[-1].table_rho)
        budget.adopt(selection)
        masks.append(selection.mask)
        step_ms = [device(epoch, table.predict_ms(selection.mask))] * steps
    return allowances, masks
