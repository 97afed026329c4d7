"""Time and energy of a run, by activity."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CLOCKS = ("training", "selection", "validation")


class Clocks:
    """Seconds spent on training (which includes selection), on selection, on validation, and since the start.

    Attributes:
        spans: start and end of each period of training, in seconds since 1970.
        meter: returns joules since a fixed moment, or None if unknown; read when training starts and stops.
        joules: energy of training before the current period; None once a part of it is unknown.
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
        self._start_time = time.perf_counter() - elapsed
        self.joules, self.spans = joules, [*spans]
        self.meter: Callable[[], float | None] = lambda: None
        self._training_started: tuple[float, float | None] = (0.0, None)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Count the time of this block as `name`."""
        self._start(name)
        try:
            yield
        finally:
            self._stop(name)

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Do not count the time of this block as `name`."""
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
            self._training_started = time.time(), self.meter()
        self._started[name] = time.perf_counter()

    def _stop(self, name: str) -> None:
        self._seconds[name] = self.seconds(name)
        del self._started[name]
        if name == "training":
            (start, before), after = self._training_started, self.meter()
            self.spans.append([start, time.time()])
            if self.joules is not None:
                self.joules = None if before is None or after is None else self.joules + after - before

    def seconds(self, name: str) -> float:
        """Seconds counted as `name` so far."""
        return self._seconds[name] + (time.perf_counter() - self._started[name] if name in self._started else 0.0)

    def add(self, seconds: float) -> None:
        """Count what the program took before as wall time of the run."""
        self._start_time -= seconds

    def elapsed(self) -> float:
        """Wall seconds since the run started, without the time between an interruption and the continuation."""
        return time.perf_counter() - self._start_time

    def to_record(self) -> dict[str, Any]:
        """The arguments of `Clocks` that continue from here, as JSON types."""
        kept = {"elapsed": self.elapsed(), "joules": self.joules, "spans": self.spans}
        return {**{name: self.seconds(name) for name in CLOCKS}, **kept}
