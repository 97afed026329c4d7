"""The linear fit of wall time to operation times."""

import numpy as np
import pytest

from elastic_trainer.timing.fit import fit_wall_time


def test_fit_of_linear_times_recovers_the_factors_without_error():
    rng = np.random.default_rng(0)
    t_dy_ms, t_dw_ms = rng.uniform(0, 50, (2, 12))
    fit = fit_wall_time(t_dy_ms, t_dw_ms, 10 + 0.7 * t_dy_ms + 0.4 * t_dw_ms, rounds=1)
    assert (fit.constant_ms, fit.chain_factor, fit.own_factor) == pytest.approx((10, 0.7, 0.4))
    assert (fit.p95_error_percent, fit.median_error_percent) == pytest.approx((0, 0), abs=1e-6)
