"""The solver equals brute force, the paper's recursion and a MILP, and keeps the budget, also with rounded times."""

import itertools

import numpy as np
import pytest
from benchmark_solver import milp_optimum, paper_recursion

from selection_solver_DP import MAX_CELLS, ROUNDING_LOSS, selection_DP, solve


def cost(t_dy, t_dw, mask):
    deepest = np.flatnonzero(mask)[-1] if np.any(mask) else -1
    return np.sum(t_dy[: deepest + 1]) + np.sum(t_dw[np.asarray(mask) == 1])


def all_masks(t_dy, t_dw, importance, budget):
    """Masks and importances of all selections within the budget."""
    n = len(t_dy)
    masks = np.array(list(itertools.product((0, 1), repeat=n)))
    depth = np.where(masks.any(1), n - np.argmax(masks[:, ::-1], axis=1), 0)
    chain = np.concatenate(([0], np.cumsum(t_dy)))[depth]
    feasible = masks @ t_dw + chain <= budget
    return masks[feasible], (masks @ importance)[feasible]


def brute_force(t_dy, t_dw, importance, budget):
    return all_masks(t_dy, t_dw, importance, budget)[1].max(initial=0.0)


def random_case(rng):
    """Times with zeros and ties, importances with zeros, ties and negatives, in integers."""
    n = int(rng.integers(1, 15))
    high = int(rng.choice([2, 5, 50]))
    t_dy, t_dw = rng.integers(0, high, (2, n))
    importance = rng.integers(-3, 6, n) if rng.random() < 0.5 else rng.normal(0.3, 1, n)
    return t_dy, t_dw, importance.astype(float), float(rng.uniform(0, 1.1))


def test_solver_equals_brute_force_and_the_recursion_of_the_paper():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        t_dy, t_dw, importance, rho = random_case(rng)
        budget = rho * float(t_dy.sum() + t_dw.sum())
        reached, mask = selection_DP(t_dy, t_dw, importance, rho)
        assert reached == pytest.approx(brute_force(t_dy, t_dw, importance, budget))
        assert importance @ mask == pytest.approx(reached)
        assert cost(t_dy, t_dw, mask) <= budget
        if budget < 60:  # it takes long
            expected = paper_recursion(t_dy.tolist(), t_dw.tolist(), importance.tolist(), int(budget))[0]
            assert reached == pytest.approx(expected)


def real_case(rng, n):
    """Times without a common unit, some of them 0: spread narrowly or widely, or only four different values."""
    kind = rng.choice(["exponential", "lognormal", "equal"])
    if kind == "equal":
        times = rng.choice(rng.exponential(1, 4), (2, n))
    else:
        times = rng.exponential(1, (2, n)) if kind == "exponential" else rng.lognormal(0, 2, (2, n))
    t_dy, t_dw = times * (rng.random((2, n)) < 0.8)
    importance = rng.normal(0.5, 1, n)
    if rng.random() < 0.3:  # importance follows time: many selections are nearly as good
        importance = t_dw * rng.uniform(0.8, 1.2, n)
    return t_dy, t_dw, importance, rng.uniform(0.05, 1) * (t_dy.sum() + t_dw.sum())


def test_float_times_never_exceed_the_budget_and_lose_little():
    rng = np.random.default_rng(1)
    for _ in range(200):
        t_dy, t_dw, importance, budget = real_case(rng, int(rng.integers(1, 13)))
        selection = solve(t_dy, t_dw, importance, budget)
        assert cost(t_dy, t_dw, selection.mask) <= budget
        assert selection.time == pytest.approx(cost(t_dy, t_dw, selection.mask))
        assert selection.importance == pytest.approx(importance @ selection.mask)
        assert selection.importance >= brute_force(t_dy, t_dw, importance, (1 - ROUNDING_LOSS) * budget) - 1e-9


def test_any_time_resolution_keeps_the_budget():
    rng = np.random.default_rng(2)
    for _ in range(300):
        t_dy, t_dw, importance, budget = real_case(rng, int(rng.integers(1, 200)))
        steps = int(10 ** rng.uniform(0, 4))
        selection = solve(t_dy, t_dw, importance, budget, steps)
        assert selection.time_resolution in (steps, None)  # None if no tensor needs rounding
        assert cost(t_dy, t_dw, selection.mask) <= budget


def test_automatic_resolution_reaches_the_optimum_for_all_but_the_rounding_loss():
    rng = np.random.default_rng(3)
    for _ in range(20):
        t_dy, t_dw, importance, budget = real_case(rng, int(rng.integers(20, 201)))
        optimum = milp_optimum(t_dy, t_dw, importance, (1 - ROUNDING_LOSS) * budget, time_limit_seconds=2)
        # If HiGHS runs out of time, ours must still be at least as good as the best selection that it found.
        assert solve(t_dy, t_dw, importance, budget).importance >= optimum.importance - 1e-9


def test_automatic_resolution_grows_with_the_tensors_up_to_max_cells():
    rng = np.random.default_rng(4)
    steps = []
    for n in (10, 100, 2000):
        t_dw = rng.uniform(1, 2, n)
        steps.append(solve(np.zeros(n), t_dw, np.ones(n), 0.3 * t_dw.sum()).time_resolution or 0)
    assert 0 < steps[0] < steps[1]
    assert 0.99 * MAX_CELLS <= 2000 * steps[2] <= MAX_CELLS
    assert solve([1, 2], [3, 4], [1, 1], 7).time_resolution is None


def test_solver_equals_the_milp_on_many_tensors():
    rng = np.random.default_rng(5)
    for _ in range(60):
        n = 15 + int(100 * rng.random())
        high = int(rng.choice([3, 20, 200]))
        t_dy, t_dw = rng.integers(0, high, (2, n))
        importance = rng.integers(-100, 1000, n).astype(float)  # integers, so that sums compare exactly
        budget = float(rng.uniform(0, 1.1) * (t_dy.sum() + t_dw.sum()))
        selection = solve(t_dy, t_dw, importance, budget)
        optimum = milp_optimum(t_dy, t_dw, importance, budget)
        assert optimum.proven
        assert selection.importance == optimum.importance == importance @ selection.mask
        assert cost(t_dy, t_dw, selection.mask) <= budget


def test_shallowest_of_all_optimal_selections_is_returned():
    rng = np.random.default_rng(7)
    for _ in range(300):
        n = int(rng.integers(1, 10))
        t_dy, t_dw = rng.integers(0, 3, (2, n))
        importance = rng.integers(0, 3, n).astype(float)
        budget = float(rng.uniform(0.2, 1) * (t_dy.sum() + t_dw.sum()))
        masks, reached = all_masks(t_dy, t_dw, importance, budget)
        shallowest = min(mask[::-1].tolist() for mask in masks[reached == reached.max()])[::-1]
        assert solve(t_dy, t_dw, importance, budget).mask.tolist() == shallowest


def test_the_smallest_floats_are_times_like_others():
    with np.errstate(all="raise", under="ignore"):
        found = solve([0.0, 0.0], [1e-323, 1e-323], [1.0, 2.0], 1.5e-323)
    assert found.mask.tolist() == [0, 1]


def test_negative_budget_selects_nothing():
    selection = solve([1.5, 1.0], [1.0, 1.0], [1.0, 1.0], -3.0)
    assert selection.mask.tolist() == [0, 0] and selection.time == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1], [1, 1], 2.0), "one length"),
        (([1, -2], [1, 1], [1, 1], 2.0), "negative"),
        (([1, np.nan], [1, 1], [1, 1], 2.0), "finite"),
        (([1, 1], [1, 1], [1, np.inf], 2.0), "finite"),
        (([1, 1], [1, 1], [1, 1], np.nan), "budget must be finite"),
        (([1.5], [1.5], [1.0], 3.0, 0), "time_resolution"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(*arguments)
