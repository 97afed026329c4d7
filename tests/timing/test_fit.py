"""The fit of wall time to operation times, and what the forward pass costs by depth."""

import numpy as np
import pytest

from elastic_trainer.timing.fit import Fit, fit_wall_time, forward_sums


def steps(rng, count=12):
    """Step sums [2 * count, 3] of `count` selections with and without a prefix, and which each trains."""
    t_dy_ms, t_dw_ms, recomputed_ms = rng.uniform(0, 50, (3, count))
    computed, cached = (
        np.stack([t_dy_ms, t_dw_ms, forward_ms], axis=1) for forward_ms in (np.full(count, 50.0), recomputed_ms)
    )
    return np.vstack([computed, cached]), np.tile(np.arange(count), 2)


NONE = np.zeros((24, 3))


def test_fit_of_linear_times_recovers_the_factors_without_error():
    sums, selections = steps(np.random.default_rng(0))
    fit = fit_wall_time(sums, NONE, 10 + sums @ [0.7, 0.4, 0.9], selections, rounds=1)
    factors = (fit.constant_ms, fit.t_dy_factor, fit.t_dw_factor, fit.t_fw_factor)
    assert factors == pytest.approx((10, 0.7, 0.4, 0.9), rel=5e-3)
    assert (fit.p95_error_percent, fit.median_error_percent) == pytest.approx((0, 0), abs=0.1)
    assert fit.selections == 12


def test_where_all_parts_overlap_alike_the_longest_step_alone_decides():
    sums, selections = steps(np.random.default_rng(0))
    measured_ms = 0.6 * (20 + sums.sum(axis=1))
    one = [sums.sum(axis=1).argmax()]
    fit = fit_wall_time(sums[one], NONE[one], measured_ms[one], selections[one], rounds=1, other_ms=20.0)
    factors = (fit.constant_ms, fit.t_dy_factor, fit.t_dw_factor, fit.t_fw_factor)
    assert factors == pytest.approx((12, 0.6, 0.6, 0.6))
    assert (fit.selections, fit.median_error_percent, fit.p95_error_percent) == (1, None, None)


@pytest.mark.parametrize("untraced_ms", [0.0, 0.2])
def test_time_beside_the_trace_is_found_within_its_bound(untraced_ms):
    rng = np.random.default_rng(0)
    sums, selections = steps(rng)
    operations = rng.integers(0, 200, (24, 3))
    measured_ms = 10 + (sums + untraced_ms * operations) @ [0.7, 0.4, 0.9]
    fit = fit_wall_time(sums, operations, measured_ms, selections, 1, max_untraced_ms=0.5)
    factors = (fit.constant_ms, fit.t_dy_factor, fit.t_dw_factor, fit.t_fw_factor)
    assert fit.untraced_ms == pytest.approx(untraced_ms, abs=1e-3)
    assert factors == pytest.approx((10, 0.7, 0.4, 0.9), rel=5e-3)
    assert fit.p95_error_percent == pytest.approx(0, abs=0.1)
    assert fit_wall_time(sums, operations, measured_ms, selections, 1, 0.1).untraced_ms <= 0.1


def test_errors_are_of_selections_left_out_of_the_fit_in_both_forms():
    rng = np.random.default_rng(0)
    sums, selections = steps(rng)
    measured_ms = (10 + sums @ [0.7, 0.4, 0.9]) * rng.normal(1, 0.05, len(sums))
    errors = []
    for selection in range(12):
        kept = [row for row in range(24) if row % 12 != selection]
        fit = fit_wall_time(sums[kept], NONE[kept], measured_ms[kept], selections[kept], rounds=1)
        factors = [fit.t_dy_factor, fit.t_dw_factor, fit.t_fw_factor]
        for row in (selection, selection + 12):
            errors.append(100 * abs((fit.constant_ms + sums[row] @ factors) / measured_ms[row] - 1))
    fit = fit_wall_time(sums, NONE, measured_ms, selections, rounds=1)
    assert fit.median_error_percent == pytest.approx(np.median(errors))
    assert fit.p95_error_percent == pytest.approx(np.percentile(errors, 95))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_cheaper_way_equals_a_naive_comparison_and_never_gets_cheaper_with_depth(seed, copies):
    rng = np.random.default_rng(seed)
    t_fw_ms, features_mb = rng.exponential(size=12) * (rng.random(12) < 0.7), rng.exponential(size=12) * copies
    fit = Fit(0.0, 1.0, 1.0, 0.8, None, None, 0, 0, copying_factor=0.5)
    preprocessing_ms, misses = float(rng.choice([0.0, 0.5])), float(rng.choice([0.0, 0.2, 0.9, 1.0, 3.0]))
    recomputed_ms, prefix_ms = (0.8 * ms for ms in forward_sums(t_fw_ms, preprocessing_ms))
    costs = fit.forward_costs(t_fw_ms, preprocessing_ms, features_mb, misses)
    for depth in range(13):
        megabytes = features_mb[depth - 1] if depth else 0.0
        computed = (recomputed_ms[depth] + prefix_ms[depth], 0.0, False)
        cached = (recomputed_ms[depth] + 0.5 * megabytes, misses * (prefix_ms[depth] + 0.5 * megabytes), True)
        is_possible = misses < 1 and prefix_ms[depth] > prefix_ms[12]
        expected = cached if is_possible and sum(cached[:2]) <= computed[0] else computed
        assert (costs.step_ms[depth], costs.caching_ms[depth], costs.is_cached[depth]) == pytest.approx(expected)
    assert copies or (np.diff(costs.step_ms + costs.caching_ms) >= -1e-12).all()
