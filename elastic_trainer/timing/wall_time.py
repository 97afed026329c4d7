"""Wall times of calls that alternate, without the drift of the machine's speed.

Shared machines, and boards that heat up, change their speed while they are measured. Calls that are compared therefore
alternate, and what slowed down all of them for a while is divided out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

DRIFT_WINDOW = 7  # calls
MIN_ROUNDS, MAX_ROUNDS = 5, 40
FEW_MS = 100  # in which `median_ms` measures short calls


def measure_ms(runs: Sequence[Callable[[], object]], rounds: int, warmup: int = 0) -> np.ndarray:
    """Wall times [rounds, len(runs)] in ms. All runs alternate, so a change of the machine's speed affects all alike.

    Each measured call follows `warmup` calls, which fill the caches.
    """
    times = np.zeros((rounds, len(runs)))
    for row in times:
        for column, run in enumerate(runs):
            for _ in range(warmup):
                run()
            start = time.perf_counter()
            run()
            row[column] = 1e3 * (time.perf_counter() - start)
    return times


def median_ms(run: Callable[[], object]) -> float:
    """Median wall time in ms of calls of a compiled step: of as many as fit into `FEW_MS`, at least `MIN_ROUNDS`."""
    rounds = int(np.clip(FEW_MS / measure_ms([run], 1)[0, 0], MIN_ROUNDS, MAX_ROUNDS))
    return float(np.median(measure_ms([run], rounds)))


def slowdown_of_steps(slowdowns: Sequence[float], steps: int) -> np.ndarray:
    """The device's slowdown during each of `steps` [steps], from some measured at even distances among them.

    A single one may be disturbed, so each stretch takes the median of three neighbours.
    """
    if not slowdowns:
        return np.ones(steps)
    last = max(len(slowdowns) - 3, 0)
    firsts = (min(max(place - 1, 0), last) for place in range(len(slowdowns)))
    smooth = [statistics.median(slowdowns[first : first + 3]) for first in firsts]
    stretches = np.array_split(np.arange(steps), len(slowdowns))
    return np.repeat(smooth, [len(stretch) for stretch in stretches])


def without_drift(times: np.ndarray) -> np.ndarray:
    """Wall times [rounds, runs] as they would be at a constant speed of the machine: its usual one.

    Neighbours on a shared machine, and heat, slow down all calls of a period. The speed is the running median, over
    DRIFT_WINDOW calls in the order they were made, of each time over the usual time of that run.
    """
    speed = np.ones_like(times)
    for _ in range(3):  # a better speed gives better usual times, and the reverse
        usual = np.median(times / speed, axis=0)
        padded = np.pad((times / usual).ravel(), DRIFT_WINDOW // 2, mode="edge")  # SciPy 1.15's filter is wrong for few
        speed = np.median(np.lib.stride_tricks.sliding_window_view(padded, DRIFT_WINDOW), axis=1).reshape(times.shape)
        speed /= np.median(speed)
    return times / speed
