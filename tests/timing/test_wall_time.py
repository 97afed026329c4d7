"""Wall time is measured reliably on a machine that other programs disturb."""

import numpy as np

from elastic_trainer.timing.wall_time import without_drift


def test_drift_of_the_machine_is_removed_from_the_times():
    """Calls of known times on a machine that other programs slow down for ten calls at a time."""
    rng = np.random.default_rng(0)
    true_ms = np.array([100.0, 140.0, 60.0, 180.0, 120.0, 90.0, 160.0])
    calls = 12 * len(true_ms)
    speed = np.ones(calls)
    for start in range(5, calls, 25):
        speed[start : start + 10] = rng.uniform(1.2, 1.6)
    times = true_ms * (speed * rng.normal(1, 0.01, calls)).reshape(12, -1)
    plain, found = (np.abs(np.median(t, axis=0) / true_ms - 1).max() for t in (times, without_drift(times)))
    assert found < 0.02 < plain


def test_times_without_drift_stay_the_same():
    times = np.random.default_rng(0).normal([10.0, 30.0, 20.0], 0.1, (20, 3))
    np.testing.assert_allclose(np.median(without_drift(times), 0), np.median(times, 0), rtol=0.01)
