"""A made-up device that trains within a time budget."""

import numpy as np

from elastic_trainer.selection.budget import Progress
from elastic_trainer.selection.select import select_tensors


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
