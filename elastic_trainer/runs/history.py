"""What a run has done so far, in numbers: its records are written from this, its time budget follows from this.

A checkpoint keeps all of it (`History.to_record`), so that a run that was cut off goes on as if it had not been.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.runs import energy
from elastic_trainer.selection.time_budget import Progress

CLOCKS = ("training", "selection", "validation")


@dataclass
class Choice:
    """The tensors to train from now on, and why.

    Attributes:
        mask: bool [N] over `model.trainable_variables`.
        importance: [N], normalised, or None for a scheme that does not measure it.
        predicted_step_ms, budget_step_ms: by the time budget, or None.
        epoch: when it was made, in epochs since the begin.
        rho, slowdown, correction: as in `time_budget.Allowance`, or None.
    """

    mask: np.ndarray
    importance: np.ndarray | None = None
    predicted_step_ms: float | None = None
    budget_step_ms: float | None = None
    epoch: float = 0
    rho: float | None = None
    slowdown: float | None = None
    correction: float | None = None

    @property
    def full_step_ms(self) -> float | None:
        """Full training's step as it would have run when this was chosen, or None without a budget."""
        return self.budget_step_ms / self.rho if self.budget_step_ms and self.rho else None


class StepResult(NamedTuple):
    """One training step: loss, share of right answers, learning rate, wall time (None where it is no measure)."""

    loss: float
    accuracy: float
    learning_rate: float
    step_ms: float | None


@dataclass
class Interval:
    """The steps trained on one choice.

    Attributes:
        step: the first one's number; 0 is the run's first.
        step_flops: FLOPs of each.
        step_ms: their measured times.
        slowdowns: by each gradient pass among them, see `time_budget`.
    """

    choice: Choice
    step: int
    step_flops: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)


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


@dataclass
class History:
    """See the module's header.

    Attributes:
        step: steps done.
        intervals: choices in their order.
        epochs: rows of metrics.csv, one for each epoch that was completed and tested.
        results: steps of the epoch under way.
        test_seconds: of each test, with the records and the saving that go with it.
        out_of_time: the deadline leaves no time for another step.
    """

    step: int = 0
    intervals: list[Interval] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    test_seconds: list[float] = field(default_factory=list)
    out_of_time: bool = False
    clocks: Clocks = field(default_factory=Clocks)

    @property
    def choice(self) -> Choice:
        """The choice that holds now."""
        return self.intervals[-1].choice

    @property
    def step_ms(self) -> list[float]:
        """All measured steps."""
        return [ms for interval in self.intervals for ms in interval.step_ms]

    @property
    def selection_seconds(self) -> float | None:
        """Of one selection, on average; None before the first."""
        return self.clocks.seconds("selection") / len(self.intervals) if self.intervals else None

    @property
    def latest_test_seconds(self) -> list[float]:
        """Of the latest three: on a busy device a test may take twice as long as the one before."""
        return self.test_seconds[-3:]

    @property
    def best_accuracy(self) -> float:
        """On the test images, 0…1; -1 before the first test."""
        return max((row["test_accuracy"] for row in self.epochs), default=-1.0)

    def record_step(self, result: StepResult) -> None:
        self.step += 1
        self.results.append(result)
        if result.step_ms is not None:
            self.intervals[-1].step_ms.append(result.step_ms)

    def record_slowdown(self, slowdown: float | None) -> None:
        """By a gradient pass; None where there was none."""
        if slowdown is not None:
            self.intervals[-1].slowdowns.append(slowdown)

    def record_epoch(self, test_loss: float, test_accuracy: float) -> None:
        """End the epoch under way with its test."""
        results, self.results = self.results, []
        step_ms = [result.step_ms for result in results if result.step_ms is not None]
        self.epochs.append(
            {
                "epoch": len(self.epochs) + 1,
                "step": self.step,
                "train_seconds": self.clocks.seconds("training"),
                "selection_seconds": self.clocks.seconds("selection"),
                "validation_seconds": self.clocks.seconds("validation"),
                "learning_rate": results[-1].learning_rate,
                "train_loss": float(np.mean([result.loss for result in results])),
                "train_accuracy": float(np.mean([result.accuracy for result in results])),
                "test_loss": test_loss,
                "test_accuracy": test_accuracy,
                "median_step_ms": float(np.median(step_ms)) if step_ms else None,
                "budget_step_ms": self.choice.budget_step_ms,
                "trained_tensors": int(self.choice.mask.sum()),
                "train_flops": self.flops(),
                "energy_joules": self.clocks.joules,
                "peak_memory_mb": energy.peak_memory_mb(),
                "gpu_peak_memory_mb": energy.gpu_peak_memory_mb(),
            }
        )

    def peak(self, name: str) -> float | None:
        """The largest value of a column of metrics.csv (a resumed run is another process, with a peak of its own)."""
        return max((row[name] for row in self.epochs if row[name] is not None), default=None)

    def flops(self) -> float:
        """FLOPs of all steps so far: forward, backward, update; two for each multiply-accumulate."""
        ends = [*(interval.step for interval in self.intervals[1:]), self.step]
        return sum(one.step_flops * (end - one.step) for one, end in zip(self.intervals, ends, strict=True))

    def full_training_ms(self) -> float | None:
        """What full training, as it would have run, takes for the measured steps; None without a budget.

        An interval's slowdown is the mean of those at its begin and at its end; of the first interval it is the one at
        the end, since what runs right after a start is slow.
        """
        total_ms = 0.0
        for index, interval in enumerate(self.intervals):
            choice, change = interval.choice, 1.0
            if choice.slowdown and interval.slowdowns:
                change = float(np.median(interval.slowdowns)) / choice.slowdown
            if index > 0:
                change = (1 + change) / 2
            total_ms += change * (choice.full_step_ms or 0.0) * len(interval.step_ms)
        return total_ms or None

    def progress(self, epochs: int, total_steps: int) -> Progress:
        """What the time budget has to know when a selection is due."""
        training, selection = (self.clocks.seconds(name) for name in ("training", "selection"))
        return Progress(
            len(self.epochs),
            epochs,
            self.step,
            total_steps,
            self.clocks.elapsed(),
            tuple(self.intervals[-1].step_ms) if self.intervals else (),
            tuple(self.intervals[-1].slowdowns) if self.intervals else (),
            max(1e3 * (training - selection) - sum(self.step_ms), 0.0) / max(self.step, 1),
            statistics.median(self.latest_test_seconds) if self.test_seconds else None,
            self.selection_seconds,
        )

    def to_record(self) -> dict[str, Any]:
        """All of it, fit for JSON (which keeps floats to the last bit)."""
        return {
            "step": self.step,
            "intervals": [{**vars(one), "choice": _choice_record(one.choice)} for one in self.intervals],
            "epochs": self.epochs,
            "results": self.results,
            "test_seconds": self.test_seconds,
            "clocks": self.clocks.to_record(),
            "out_of_time": self.out_of_time,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> History:
        """What `to_record` wrote; the clocks go on from there."""
        return cls(
            record["step"],
            [Interval(**{**one, "choice": _choice(one["choice"])}) for one in record["intervals"]],
            record["epochs"],
            [StepResult(*result) for result in record["results"]],
            record["test_seconds"],
            record["out_of_time"],
            Clocks(**record["clocks"]),
        )


def _choice_record(choice: Choice) -> dict[str, Any]:
    importance = None if choice.importance is None else choice.importance.tolist()
    return {**vars(choice), "mask": choice.mask.astype(int).tolist(), "importance": importance}


def _choice(record: dict[str, Any]) -> Choice:
    importance = None if record["importance"] is None else np.array(record["importance"])
    return Choice(**{**record, "mask": np.array(record["mask"], bool), "importance": importance})
