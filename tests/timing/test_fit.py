"""The fit of wall time to operation times."""

import numpy as np
import pytest

from elastic_trainer.timing.fit import fit_wall_time


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
