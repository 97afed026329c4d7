"""What the forward pass costs by depth, compared with a naive computation of each way to run it."""

import numpy as np
import pytest

from elastic_trainer.timing.forward_costs import FeatureUse, forward_costs, forward_sums


def random_case(rng):
    """Wall times of R and P by depth, and features that may be used, some of them cached before."""
    t_fw_ms = rng.exponential(size=12) * (rng.random(12) < 0.7)
    recomputed_ms, prefix_ms = forward_sums(t_fw_ms, rng.choice([0.0, 0.5]))
    share, cached_depth = float(rng.choice([0.0, 0.2, 0.9, 1.0, 3.0])), rng.choice([None, *range(13)])
    features = FeatureUse(share, cached_depth, min(share, 1.0) * float(rng.choice([0.0, 0.5, 1.0])))
    return recomputed_ms, prefix_ms, features


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_cheapest_way_equals_a_naive_comparison_and_never_gets_cheaper_with_depth(seed, copies):
    rng = np.random.default_rng(seed)
    recomputed_ms, prefix_ms, features = random_case(rng)
    reading_ms, writing_ms = rng.exponential(size=(2, 13)) * copies
    costs = forward_costs(recomputed_ms, prefix_ms, features, *([reading_ms, writing_ms] if copies else []))
    on_features_ms, computing_ms = recomputed_ms + reading_ms, prefix_ms + writing_ms
    for depth in range(13):
        ways = {(recomputed_ms[depth] + prefix_ms[depth], 0.0, -1)}
        if features.share < 1 and prefix_ms[depth] > prefix_ms[12]:
            ways.add((on_features_ms[depth], features.share * computing_ms[depth], depth))
        kept = features.cached_depth
        if kept is not None and depth <= kept:
            ways.add((on_features_ms[kept], features.cached_share * computing_ms[kept], kept))
        found = (costs.step_ms[depth], costs.making_ms[depth], costs.cached_depth[depth])
        assert any(found == pytest.approx(way) for way in ways)
        assert found[0] + found[1] == pytest.approx(min(step + making for step, making, _ in ways))
    total_ms = costs.step_ms + costs.making_ms
    assert copies or (np.diff(total_ms) >= -1e-12).all()


def test_recomputed_and_prefix_times_add_up_to_the_forward_pass():
    recomputed_ms, prefix_ms = forward_sums(np.array([1.0, 0.0, 2.0]), 0.5)
    np.testing.assert_array_equal(recomputed_ms, [0, 1, 1, 3])
    np.testing.assert_array_equal(prefix_ms, [3.5, 2.5, 2.5, 0.5])


def test_preprocessing_alone_is_never_cached():
    costs = forward_costs(np.array([0.0, 1.0, 2.0, 2.0]), np.array([2.5, 1.5, 0.5, 0.5]), FeatureUse(share=0.1))
    np.testing.assert_array_equal(costs.cached_depth, [0, 1, -1, -1])
    np.testing.assert_array_equal(costs.making_ms, [0.25, pytest.approx(0.15), 0, 0])
