"""The curve of the demo. TensorFlow is loaded before this is imported, else its own lines are printed."""

from __future__ import annotations

import time
from typing import Any

from elastic_trainer.runs.listener import Listener

EVERY = 0.5  # seconds of training between two tests


class Curve(Listener):
    """Tests while a run trains, and at its end; the clock of training stands meanwhile."""

    def __init__(self, start: float, percent: float) -> None:
        self._start, self._next, self.points = start, EVERY, [(0.0, percent)]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now, start = self._seconds(), time.perf_counter()
        if now >= self._next:
            with self.trainer.history.clocks.paused("training"):
                results = self.trainer.training.evaluation(self.trainer.data.test())
            self.points.append((now, 100 * results["accuracy"]))
            self._next = now + max(EVERY, time.perf_counter() - start)  # a slow device tests less often

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.points.append((self._seconds(), 100 * self.trainer.history.epochs[-1]["test_accuracy"]))

    def _seconds(self) -> float:
        return self._start + self.trainer.history.clocks.seconds("training")
