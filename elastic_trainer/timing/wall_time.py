"""Wall times of calls that take turns, without what other virtual machines and drift add to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from elastic_trainer.machine import is_undisturbed, stolen_seconds

DRIFT_WINDOW = 7


def measure_ms(runs: Sequence[Callable[[], object]], rounds: int, unseen: int = 0, most_tries: int = 1) -> np.ndarray:
    """Wall times [rounds, len(runs)] in ms. All take turns, so that a machine that slows down slows all alike.

    `unseen` calls go before each measured one: what ran before has left the caches to itself. A call from which other
    virtual machines took processor time is measured again, until it was tried `most_tries` times.
    """
    times = np.zeros((rounds, len(runs)))
    for row in times:
        for column, run in enumerate(runs):
            for _ in range(unseen):
                run()
            for tries_left in reversed(range(most_tries)):
                stolen = stolen_seconds() if tries_left else 0.0
                begin = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin
                if not tries_left or is_undisturbed(seconds, stolen_seconds() - stolen):
                    break
            row[column] = seconds * 1e3
    return times


def without_drift(times: np.ndarray) -> np.ndarray:
    """Wall times [rounds, runs] as of a machine of one speed: its usual one while they were measured.

    Neighbours on a shared machine, and heat, slow down whatever runs next to each other in time. That speed is the
    running median, over DRIFT_WINDOW calls in the order they were made, of each time over what that run usually takes.
    """
    from scipy.ndimage import median_filter

    speed = np.ones_like(times)
    for _ in range(3):  # each knows the usual times better, as it knows the speed better
        usual = np.median(times / speed, axis=0)
        speed = median_filter((times / usual).ravel(), DRIFT_WINDOW, mode="nearest").reshape(times.shape)
        speed /= np.median(speed)
    return times / speed
