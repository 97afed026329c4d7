"""Seconds and joules of a run, by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CLOCKS = ("training", "selection", "validation")


class Clocks:
    """Seconds spent training (selection is part of it), selecting, and validating; and since it all began.

    Attributes:
        spans: begin and end of each stretch of training, in seconds since 1970.
        meter: joules since some moment, or None for unknown; asked when training starts and stops.
        joules: spent in training, but for the stretch under way; None once a part of it is unknown.
    """

    def __init__(
        self,
        training: float = 0.0,
        selection: float = 0.0,
        validation: float = 0.0,
        elapsed: float = 0.0,
        joules: float | None = 0.0,
        spans: Sequence[Sequence[float]] = (),
    ) -> None:
        self._seconds = {"training": training, "selection": selection, "validation": validation}
        self._started: dict[str, float] = {}
        self._begin = time.perf_counter() - elapsed
        self.joules, self.spans = joules, [*spans]
        self.meter: Callable[[], float | None] = lambda: None
        self._training_began: tuple[float, float | None] = (0.0, None)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        self._start(name)
        try:
            yield
        finally:
            self._stop(name)

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Leave what happens in this block out of `name`, where that runs."""
        runs = name in self._started
        if runs:
            self._stop(name)
        try:
            yield
        finally:
            if runs:
                self._start(name)

    def _start(self, name: str) -> None:
        if name == "training":
            self._training_began = time.time(), self.meter()
        self._started[name] = time.perf_counter()

    def _stop(self, name: str) -> None:
        self._seconds[name] = self.seconds(name)
        del self._started[name]
        if name == "training":
            (begin, before), after = self._training_began, self.meter()
            self.spans.append([begin, time.time()])
            if self.joules is not None:
                self.joules = None if before is None or after is None else self.joules + after - before

    def seconds(self, name: str) -> float:
        """Up to this moment."""
        return self._seconds[name] + (time.perf_counter() - self._started[name] if name in self._started else 0.0)

    def elapsed(self) -> float:
        """Wall seconds since the run began, without those between a cut and its resumption."""
        return time.perf_counter() - self._begin

    def to_record(self) -> dict[str, Any]:
        kept = {"elapsed": self.elapsed(), "joules": self.joules, "spans": self.spans}
        return {**{name: self.seconds(name) for name in CLOCKS}, **kept}
