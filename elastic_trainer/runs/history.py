"""The history of a run, in numbers: its records are written from this, its time budget follows from this.

A checkpoint keeps all of it (`History.to_record`), so a resumed run continues as if it had not been interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic_trainer.engine.state import StepResult
from elastic_trainer.selection.budget import Progress
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Selection
from elastic_trainer.system.machine import gpu_peak_memory_mb
from elastic_trainer.system.memory import peak_memory_mb

RECENT = 20  # steps whose means are shown


class Clocks:
    """Seconds spent on training (which includes selection), on selection, on validation, and since the start.

    Attributes:
        spans: start and end of each period of training, in seconds since 1970 by the clock at the start of its process.
        clock_shift: by how many seconds that clock was set until training last stopped, the most of all processes.
        meter: returns joules since a fixed moment, or None if unknown; read when training starts and stops.
        joules: energy of training before the current period; None once a part of it is unknown.
    """

    def __init__(
        self,
        elapsed: float = 0.0,
        joules: float | None = 0.0,
        spans: Sequence[Any] = (),
        clock_shift: float = 0.0,
        **seconds: float,
    ) -> None:
        self._seconds = {"training": 0.0, "selection": 0.0, "validation": 0.0, **seconds}
        self._started: dict[str, float] = {}
        self._made = time.perf_counter()
        self._start_time = self._made - elapsed
        self.joules, self.spans, self.clock_shift = joules, [*spans], clock_shift
        self._offset = time.time() - time.perf_counter()  # of the time of day, which jumps where a board sets its clock
        self.meter: Callable[[], float | None] = lambda: None
        self._joules_before: float | None = None

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
        if name not in self._started:
            yield
            return
        self._stop(name)
        try:
            yield
        finally:
            self._start(name)

    def _start(self, name: str) -> None:
        if name == "training":
            self._joules_before = self.meter()
        self._started[name] = time.perf_counter()

    def _stop(self, name: str) -> None:
        start, end = self._started.pop(name), time.perf_counter()
        self._seconds[name] += end - start
        if name == "training":
            before, after = self._joules_before, self.meter()
            self.spans.append([start + self._offset, end + self._offset])
            shift = time.time() - time.perf_counter() - self._offset
            self.clock_shift = max(self.clock_shift, shift, key=abs)
            if self.joules is not None:
                self.joules = None if before is None or after is None else self.joules + after - before

    def seconds(self, name: str) -> float:
        return self._seconds[name] + (time.perf_counter() - self._started[name] if name in self._started else 0.0)

    def count_from(self, start: float) -> None:
        """Count what the program took before, from `start` on by `time.perf_counter`, as wall time of the run."""
        self._start_time -= self._made - start

    def elapsed(self) -> float:
        """Wall seconds since the run started, without the time between an interruption and the continuation."""
        return time.perf_counter() - self._start_time

    def to_record(self) -> dict[str, Any]:
        """The arguments of `Clocks` that continue from here, as JSON types."""
        seconds = {name: self.seconds(name) for name in self._seconds}
        kept = {name: getattr(self, name) for name in ("joules", "spans", "clock_shift")}
        return {**seconds, **kept, "elapsed": self.elapsed()}


@dataclass
class History:
    """See the module's header.

    Attributes:
        step: steps done.
        epochs: rows of metrics.csv, one for each epoch that was completed.
        results: steps of the current epoch.
        validation_seconds: of each validation, with the records and the saving that belong to it, but without making
            features of the test examples.
        test_feature_seconds: what making those took the last time.
        is_over: a listener ended the run, or the deadline leaves no time for another step.
        saved_score: `task.Score` of the best model that was saved; None if there is none.
        start: validation of the model that training started from; None if it was not tested.
        starts_with_head: that model had the closed-form head, with which training itself does not start.
        first_model_seconds: what fitting and saving that model took.
        first_feature_seconds: the part of it for making features, which are kept.
        average_head_seconds: what averaging the head after the last step took; None before.
        first_step_seconds: when the first step of the schedule was done, after the start of the program; None before.
        caching_ms: computing the features that are kept, in all.
        train_flops: of all steps: forward, backward, update; two for each multiply-accumulate.
    """

    step: int = 0
    selections: list[Selection] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    validation_seconds: list[float] = field(default_factory=list)
    test_feature_seconds: float = 0.0
    clocks: Clocks = field(default_factory=Clocks)
    is_over: bool = False
    saved_score: float | None = None
    start: dict[str, float] | None = None
    starts_with_head: bool = False
    first_model_seconds: float = 0.0
    first_feature_seconds: float = 0.0
    average_head_seconds: float | None = None
    first_step_seconds: float | None = None
    caching_ms: float = 0.0
    train_flops: float = 0.0

    @property
    def selection(self) -> Selection:
        return self.selections[-1]

    def record_step(self, result: StepResult, flops: float) -> None:
        self.step += 1
        self.train_flops += flops
        if self.first_step_seconds is None:
            self.first_step_seconds = self.clocks.elapsed()
        self.results.append(result)
        self.caching_ms += result.caching_ms
        if result.first_call_ms is not None:
            seconds = self.selection.seconds
            seconds["first_call"] = seconds.get("first_call", 0.0) + result.first_call_ms / 1e3
        if result.step_ms is not None:
            self.selection.step_ms.append(result.step_ms)

    def record_validation(self, seconds: float, made_seconds: float) -> None:
        """A validation took that long; `made_seconds` of it are for making features of the test examples."""
        self.validation_seconds.append(seconds - made_seconds)
        self.test_feature_seconds = made_seconds or self.test_feature_seconds

    def start_schedule(self) -> None:
        """Begin another schedule, if the run was finished."""
        self.is_over, self.average_head_seconds, self.first_step_seconds = False, None, None

    @property
    def validated(self) -> list[dict[str, Any]]:
        return [row for row in self.epochs if row.get("test_loss") is not None]

    @property
    def is_validated(self) -> bool:
        """Whether the latest epoch was validated; True before the first."""
        return self.validated[-1:] == self.epochs[-1:]

    def record_epoch(self, test: dict[str, float] | None, is_running: bool = False) -> None:
        """End the current epoch, with the results of its validation if there was one.

        The measures of its steps are results since its start if `is_running`, else they are averaged.
        """
        results, self.results = self.results, []
        means = means_of(results)
        if is_running:
            means |= {name: results[-1].measures[name] for name in means if name != "loss"}
        tested = dict.fromkeys(means) if test is None else test
        self.epochs.append(
            {
                "epoch": len(self.epochs) + 1,
                "step": self.step,
                "train_seconds": self.clocks.seconds("training"),
                "selection_seconds": self.clocks.seconds("selection"),
                "validation_seconds": self.clocks.seconds("validation"),
                "learning_rate": results[-1].learning_rate,
                **{f"train_{name}": value for name, value in means.items()},
                **{f"test_{name}": value for name, value in tested.items()},
                "median_step_ms": median_step_ms(results),
                "budget_step_ms": self.selection.budget_step_ms,
                "trained_tensors": int(self.selection.mask.sum()),
                "train_flops": self.train_flops,
                "energy_joules": self.clocks.joules,
                "peak_memory_mb": peak_memory_mb(),
                "gpu_peak_memory_mb": gpu_peak_memory_mb(),
            }
        )

    def progress(self, schedule: Schedule, features_possible: bool = False) -> Progress:
        """What the time budget has to know when a selection is due. `features_possible`: as in `Progress`."""
        latest = self.selection if self.selections else Selection(np.zeros(0, bool))
        first_calls = sum(selection.seconds.get("first_call", 0.0) for selection in self.selections)
        selecting = self.clocks.seconds("selection") + first_calls
        return Progress(
            step=self.step,
            total_steps=schedule.total_steps,
            steps_per_epoch=schedule.steps_per_epoch,
            step_ms=latest.step_ms,
            slowdowns=latest.slowdowns,
            selection_seconds=selecting / len(self.selections) if self.selections else None,
            features_possible=features_possible,
            mask=latest.mask if self.selections else None,
            feature_steps=self._feature_steps() if features_possible else 0,
        )

    def _feature_steps(self) -> int:
        """Latest steps that used the features of one selection; 0 if the last step used none."""
        start = self.step
        for selection in reversed(self.selections):
            if not selection.uses_features or (selection.mask != self.selection.mask).any():
                break
            start = selection.step
        return self.step - start

    def to_record(self) -> dict[str, Any]:
        """A copy of all of it in JSON's types, which keep floats to the last bit."""
        record = {**vars(self), "selections": [*map(vars, self.selections)], "clocks": self.clocks.to_record()}
        copied: dict[str, Any] = json.loads(json.dumps(record, default=np.ndarray.tolist))
        return copied

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> History:
        """What `to_record` returned; the clocks continue from there."""
        record = deepcopy(record)  # it may be taken up again
        record["selections"] = [_selection(one) for one in record["selections"]]
        record["results"] = [StepResult(*result) for result in record["results"]]
        record["clocks"] = Clocks(**record["clocks"])
        return cls(**record)


def means_of(results: Sequence[StepResult]) -> dict[str, float]:
    """Means over some steps: the loss, and what else they report."""
    names = [name for name in results[-1].measures if name != "loss"]
    means = {name: float(np.mean([result.measures[name] for result in results])) for name in names}
    return {"loss": float(np.mean([result.loss for result in results])), **means}


def median_step_ms(results: Sequence[StepResult]) -> float | None:
    """Of the steps that were timed; None if none was."""
    step_ms = [result.step_ms for result in results if result.step_ms is not None]
    return float(np.median(step_ms)) if step_ms else None


def _selection(record: dict[str, Any]) -> Selection:
    importance = None if record["importance"] is None else np.array(record["importance"])
    return Selection(**{**record, "mask": np.array(record["mask"], bool), "importance": importance})
