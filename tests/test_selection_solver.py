"""The solver against brute force, and its promises: never over budget, the same answer every time."""

import itertools

import numpy as np
import pytest

from selection_solver_DP import selection_DP, solve


def cost(t_dy, t_dw, mask):
    deepest = np.flatnonzero(mask)[-1] if np.any(mask) else -1
    return np.sum(t_dy[: deepest + 1]) + np.sum(t_dw[np.asarray(mask) == 1])


def brute_force(t_dy, t_dw, importance, budget):
    """Largest importance over all 2^N masks, computed for all of them at once."""
    n = len(t_dy)
    masks = np.array(list(itertools.product((0, 1), repeat=n)))
    deepest = np.where(masks.any(1), n - 1 - np.argmax(masks[:, ::-1], axis=1), -1)
    chain = np.concatenate(([0], np.cumsum(t_dy)))[deepest + 1]
    feasible = masks @ t_dw + chain <= budget
    return (masks @ importance)[feasible].max(initial=0.0)


def random_case(rng):
    """Times with zeros and ties, importances with zeros, ties and negatives, in integers."""
    n = int(rng.integers(1, 15))
    high = int(rng.choice([2, 5, 50]))
    t_dy, t_dw = rng.integers(0, high, (2, n))
    importance = rng.integers(-3, 6, n) if rng.random() < 0.5 else rng.normal(0.3, 1, n)
    return t_dy, t_dw, importance.astype(float), float(rng.uniform(0, 1.1))


def test_equals_brute_force_on_1000_random_cases():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        t_dy, t_dw, importance, rho = random_case(rng)
        budget = rho * float(t_dy.sum() + t_dw.sum())
        reached, mask = selection_DP(t_dy, t_dw, importance, rho)
        assert reached == pytest.approx(brute_force(t_dy, t_dw, importance, budget))
        assert importance @ mask == pytest.approx(reached)
        assert cost(t_dy, t_dw, mask) <= budget


def test_float_times_never_exceed_the_budget_and_lose_little():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(1, 13))
        t_dy, t_dw = rng.exponential(1, (2, n)) * (rng.random((2, n)) < 0.8)
        importance = rng.normal(0.3, 1, n)
        budget = rng.uniform(0.05, 1) * (t_dy.sum() + t_dw.sum())
        selection = solve(t_dy, t_dw, importance, budget)
        assert cost(t_dy, t_dw, selection.mask) <= budget
        assert selection.time == pytest.approx(cost(t_dy, t_dw, selection.mask))
        # Rounding costs each tensor at most one step, so a budget that much smaller bounds the result from below.
        lower = brute_force(t_dy, t_dw, importance, budget * (1 - (n + 1) / 10_000))
        assert selection.importance >= lower - 1e-9


def test_zero_cost_positive_tensors_are_always_selected_and_negative_ones_never():
    t_dy, t_dw = [0, 0, 0, 5], [0, 0, 3, 1]
    importance = [0.5, -0.1, 1.0, 9.0]
    _, mask = selection_DP(t_dy, t_dw, importance, 0.0)
    assert mask.tolist() == [1, 0, 0, 0]
    _, mask = selection_DP(t_dy, t_dw, importance, 1.0)
    assert mask.tolist() == [1, 0, 1, 1]


def test_the_deepest_tensor_can_be_selected():
    reached, mask = selection_DP([1, 1, 1], [1, 1, 1], [0.1, 0.1, 5.0], 4 / 6)
    assert mask.tolist() == [0, 0, 1]
    assert reached == 5.0


def test_ties_are_broken_the_same_way_and_towards_the_shallow():
    masks = {tuple(selection_DP([1, 1, 1], [1, 1, 1], [1.0, 1.0, 1.0], 0.4)[1].tolist()) for _ in range(5)}
    assert masks == {(1, 0, 0)}


def test_nothing_fits_into_a_budget_below_zero():
    selection = solve([1.5, 1.0], [1.0, 1.0], [1.0, 1.0], -3.0)
    assert selection.mask.tolist() == [0, 0] and selection.time == 0


@pytest.mark.parametrize(
    ("t_dy", "t_dw", "importance", "message"),
    [
        ([1, 2], [1], [1, 1], "one length"),
        ([1, -2], [1, 1], [1, 1], "negative"),
        ([1, np.nan], [1, 1], [1, 1], "finite"),
        ([1, 1], [1, 1], [1, np.inf], "finite"),
    ],
)
def test_bad_input_is_refused(t_dy, t_dw, importance, message):
    with pytest.raises(ValueError, match=message):
        selection_DP(t_dy, t_dw, importance, 0.5)
