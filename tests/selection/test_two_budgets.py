"""The selection under two budgets against trying every selection."""

import itertools

import numpy as np
import pytest

from elastic_trainer.selection.problem import Problem
from elastic_trainer.selection.two_budgets import GAP, solve_both
from elastic_trainer.timing.memory_costs import Kept, MemoryCosts


def problem(seed, count=9):
    rng = np.random.default_rng(seed)
    t_dy, t_dw, importance = rng.exponential(1, count), rng.exponential(1, count), rng.normal(0.5, 1, count)
    t_dy[0] = t_dw[0] = importance[0] = 0.0  # the head
    kept = [
        Kept(tuple(rng.choice(count, rng.integers(0, 3), replace=False).tolist()), int(rng.integers(-1, count)), mb)
        for mb in rng.exponential(1, count).tolist()
    ]
    memory = MemoryCosts(0.0, 1.0, 0.0, rng.exponential(0.1, count), rng.exponential(0.1, count), kept)
    time_budget = (t_dy.sum() + t_dw.sum()) * rng.uniform(0.2, 0.8)
    return t_dy, t_dw, importance, time_budget, memory, memory.predict(np.ones(count, bool)) * rng.uniform(0.3, 0.9)


def fits(selected, t_dy, t_dw, importance, time_budget, memory, memory_mb):
    time = t_dw[selected].sum() + t_dy[: np.flatnonzero(selected)[-1] + 1].sum()
    return time <= time_budget + 1e-6 and memory.predict(selected) <= memory_mb + 1e-6


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_best_of_all_selections_that_fit_both(seed):
    given = problem(seed)
    always = np.arange(9) == 0
    pairs = [(2, 4)] if seed % 2 else []
    best = None
    for bits in itertools.product([False, True], repeat=8):
        selected = np.array([True, *bits])
        if fits(selected, *given) and all(selected[one] == selected[other] for one, other in pairs):
            value = given[2][selected].sum()
            best = value if best is None else max(best, value)
    t_dy, t_dw, importance, left_ms, memory, room_mb = given
    found = solve_both(Problem(t_dy, t_dw, importance, left_ms, always, pairs, np.arange(9)), memory, room_mb) == 1
    assert found[0] and all(found[one] == found[other] for one, other in pairs)
    if best is None:
        assert (found == always).all(), "nothing fits"
    else:
        assert fits(found, *given)
        assert given[2][found].sum() >= best - GAP * abs(best) - 1e-9


def test_memory_alone_decides_where_time_is_plenty():
    t_dy, t_dw, importance, _, memory, _ = problem(0)
    values = []
    for share in (0.3, 0.6, 1.0):
        limit = share * memory.predict(np.ones(9, bool))
        plenty = Problem(t_dy, t_dw, importance, 1e9, np.arange(9) == 0, [], np.arange(9))
        found = solve_both(plenty, memory, limit).astype(bool)
        assert memory.predict(found) <= limit + 1e-6
        values.append(importance[found].sum())
    assert values[0] < values[2] and values[1] <= values[2]
    assert values[2] == pytest.approx(importance[importance > 0].sum()), "everything that gains"
