"""What the forward pass costs by depth, compared with a naive computation of each way to run it."""

import numpy as np
import pytest

from elastic_trainer.timing.forward_costs import forward_costs, forward_sums


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_cheaper_way_equals_a_naive_comparison_and_never_gets_cheaper_with_depth(seed, copies):
    rng = np.random.default_rng(seed)
    t_fw_ms = rng.exponential(size=12) * (rng.random(12) < 0.7)
    recomputed_ms, prefix_ms = forward_sums(t_fw_ms, rng.choice([0.0, 0.5]))
    misses = float(rng.choice([0.0, 0.2, 0.9, 1.0, 3.0]))
    reading_ms, writing_ms = rng.exponential(size=(2, 13)) * copies
    costs = forward_costs(recomputed_ms, prefix_ms, reading_ms, writing_ms, misses)
    for depth in range(13):
        computed = (recomputed_ms[depth] + prefix_ms[depth], 0.0, False)
        making_ms = misses * (prefix_ms[depth] + writing_ms[depth])
        cached = (recomputed_ms[depth] + reading_ms[depth], making_ms, True)
        is_possible = misses < 1 and prefix_ms[depth] > prefix_ms[12]
        expected = cached if is_possible and sum(cached[:2]) <= computed[0] else computed
        assert (costs.step_ms[depth], costs.making_ms[depth], costs.is_cached[depth]) == pytest.approx(expected)
    assert copies or (np.diff(costs.step_ms + costs.making_ms) >= -1e-12).all()


def test_recomputed_and_prefix_times_add_up_to_the_forward_pass():
    recomputed_ms, prefix_ms = forward_sums(np.array([1.0, 0.0, 2.0]), 0.5)
    np.testing.assert_array_equal(recomputed_ms, [0, 1, 1, 3])
    np.testing.assert_array_equal(prefix_ms, [3.5, 2.5, 2.5, 0.5])


def test_preprocessing_alone_is_never_cached():
    none = np.zeros(4)
    costs = forward_costs(np.array([0.0, 1.0, 2.0, 2.0]), np.array([2.5, 1.5, 0.5, 0.5]), none, none, misses=0.1)
    np.testing.assert_array_equal(costs.is_cached, [True, True, False, False])
    np.testing.assert_array_equal(costs.making_ms, [0.25, pytest.approx(0.15), 0, 0])
