"""What a run has done so far, in numbers: its records are written from this, its time budget follows from this.

A checkpoint keeps all of it (`History.to_record`), so that a run that was cut off goes on as if it had not been.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.machine import gpu_peak_memory_mb, peak_memory_mb
from elastic_trainer.runs.clocks import Clocks
from elastic_trainer.selection.selection import Choice
from elastic_trainer.selection.time_budget import Progress


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
                "peak_memory_mb": peak_memory_mb(),
                "gpu_peak_memory_mb": gpu_peak_memory_mb(),
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
