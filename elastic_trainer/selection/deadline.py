"""The time budget of a run with a deadline: rho follows from the time that is left, and the run's length, too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.options import duration_text
from elastic_trainer.selection.time_budget import LATEST_STEPS, Allowance, Progress, TimeBudget, latest_slowdown
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable

MAX_SELECTING = 0.1  # share of a deadline that selections may take, where the interval is not given
DEADLINE_RHO = 0.6  # for which a deadline's epochs are chosen (docs/results.md)
# Shares of the time left that are kept in reserve before a deadline. Until steps are measured, they may take 16 % more
# than predicted (docs/log/deadlines.md), and a run that is stopped loses the end of its learning-rate schedule.
DEADLINE_RESERVE, FIRST_RESERVE = 0.02, 0.1
# Times the longest of the latest validations, kept for the last one before a deadline (docs/log/deadlines.md).
VALIDATION_MARGIN = 1.5
FIRST_STEPS = 5  # whose median time is the speed at which the export's time was measured
# Assumed until it is measured: a selection takes so many full steps, if the table does not say how long compiling
# takes, and a validation so many forward passes over all test images, since it also reads them.
FIRST_SELECTION_STEPS, FIRST_VALIDATION = 30, 1.5


class DeadlineTooShortError(UserError):
    """A deadline leaves too little time even to train the head alone."""


class DeadlineBudget(TimeBudget):
    """Steps that end all of training, validation included, `seconds` after the start of the program.

    Args:
        seconds: wall time from there; what has passed of it before training is `elapsed`.
        total_steps, epochs: how many there will be.
        selection_steps: steps, counted from 0, before which a selection is due.
        validation_batches: batches of one validation.
        misses: as for `smallest_rho`.
        elapsed: seconds that have passed of it before training starts.
        start_seconds: what the run does between its first selection and its first step.
        averaging_seconds: what averaging the head after the last step takes at the table's speed.
        end_seconds: kept for what follows training, at the speed of the first steps; more if the device slows down.
        validation_share: of training time, which validations before the last one take at most; 1: no limit.

    Raises:
        DeadlineTooShortError: even training the head alone takes longer.
    """

    def __init__(
        self,
        table: TimingTable,
        head: np.ndarray,
        seconds: float,
        total_steps: int,
        epochs: int,
        selection_steps: Sequence[int],
        validation_batches: int,
        misses: float = 1.0,
        elapsed: float = 0.0,
        start_seconds: float = 0.0,
        averaging_seconds: float = 0.0,
        end_seconds: float = 0.0,
        validation_share: float = 1.0,
    ) -> None:
        super().__init__(table, head, misses)
        self._selection_steps, self._validation_batches = selection_steps, validation_batches
        self._all_seconds, self._end_seconds = seconds, end_seconds
        self._first_ratio: float | None = None  # of the first steps' times in this process over the table's prediction
        self._start_seconds, self._averaging_seconds = start_seconds, averaging_seconds
        self._validation_share = validation_share
        self._max_rho, self._total_steps = 1.0, total_steps
        self._most_steps: int | None = None  # of a run whose length follows from the time
        start = Progress(epochs=epochs, total_steps=total_steps)
        training = total_steps * self.smallest_rho * table.full_step_ms / 1e3
        shortest = elapsed + training / (1 - DEADLINE_RESERVE) + self._beside_steps_seconds(start, 1.0, training)
        if seconds - end_seconds < shortest:
            raise DeadlineTooShortError(
                f"--deadline {duration_text(seconds)}: training the head alone for {total_steps} steps takes about "
                f"{duration_text(shortest + end_seconds)} here; give more time or fewer --num_epochs"
            )

    def allow(self, progress: Progress) -> Allowance:
        """The time left over what full training would need for the steps left; at most 1, at least the head alone.

        A slower device and a wrong prediction need the same answer here, so the latest steps stand for both.
        """
        ratio = statistics.median(self._step_over_prediction(progress) or [latest_slowdown(progress)])
        left = self._seconds(progress) - progress.elapsed_seconds
        reserve = DEADLINE_RESERVE if progress.step_ms else FIRST_RESERVE
        left = left * (1 - reserve) - self._beside_steps_seconds(progress, ratio, left)
        steps = progress.total_steps - progress.step
        if self._most_steps is not None:  # the largest rho that leaves time for an epoch; the length follows from it
            steps = min(steps, progress.steps_per_epoch)
        step_ms = 1e3 * left / max(steps, 1) - progress.overhead_ms
        full_step_ms = self.table.full_step_ms * ratio
        rho = min(max(step_ms / full_step_ms, self.smallest_rho), self._max_rho)
        return Allowance(rho, rho, full_step_ms, ratio, correction=1.0)

    def _seconds(self, progress: Progress) -> float:
        """When training must have ended, so that what follows it ends in time."""
        return self._all_seconds - self._end_seconds * self._slowdown(progress)

    def _averaging(self, progress: Progress) -> float:
        """What averaging the head takes: as much as the first model, if this run has fitted one."""
        if not self._averaging_seconds:
            return 0.0
        measured = VALIDATION_MARGIN * progress.first_model_seconds * self._slowdown(progress)
        return measured or self._averaging_seconds * (progress.slowdown or 1.0)

    def _slowdown(self, progress: Progress) -> float:
        """How much slower steps are now than the first ones of this process; at least 1."""
        ratios = self._step_over_prediction(progress)
        if self._first_ratio is None:
            self._first_ratio = statistics.median(ratios) if len(ratios) >= FIRST_STEPS else None
            return 1.0
        return max(statistics.median(ratios) / self._first_ratio, 1.0) if ratios else 1.0

    def limit_rho(self, rho: float) -> None:
        """Use no more time than steps of `rho` take, unless the head alone takes more."""
        self._max_rho = max(rho, self.smallest_rho)

    def lengthen_to(self, steps: int) -> None:
        """Let the length of the run follow from the time, up to so many steps in all, instead of rho."""
        self._most_steps = max(steps, self._total_steps)

    def to_record(self) -> dict[str, float]:
        """See `TimeBudget.to_record`."""
        record = {**super().to_record(), "max_rho": self._max_rho}
        return record if self._most_steps is None else {**record, "most_steps": self._most_steps}

    def resume(self, record: dict[str, float], mask: np.ndarray) -> None:
        """See `TimeBudget.resume`."""
        self._max_rho = record.get("max_rho", 1.0)
        self._most_steps = int(record["most_steps"]) if "most_steps" in record else None
        super().resume(record, mask)

    def fitting_steps(self, progress: Progress) -> int | None:
        """See `TimeBudget.fitting_steps`."""
        if not progress.step_ms:
            return None
        validation = later = statistics.median(progress.validation_seconds or [0.0])
        if len(progress.validation_seconds) == 1:  # the first also compiles, and makes features
            usual = first_validation_seconds(self.table, self._validation_batches) * (progress.slowdown or 1.0)
            later = min(validation, usual)
        pace_ms = statistics.median(progress.step_ms[-LATEST_STEPS:]) + progress.overhead_ms
        pace_ms += limited_validation(1e3 * later / progress.steps_per_epoch, self._validation_share, pace_ms)
        left = (self._seconds(progress) - progress.elapsed_seconds) * (1 - DEADLINE_RESERVE)
        left -= VALIDATION_MARGIN * validation
        due = [step for step in self._selection_steps if step >= progress.step]
        left -= self._making_seconds(progress, min(due, default=progress.total_steps))
        left -= self._averaging(progress)
        for selections in range(len(due) + 1):
            left_ms = 1e3 * (left - selections * (progress.selection_seconds or 0.0))
            steps = progress.step + max(int(left_ms / pace_ms), 0)
            if sum(step < steps for step in due) <= selections:
                break
        return min(steps, self._most_steps or self._total_steps)

    def _making_seconds(self, progress: Progress, end: int) -> float:
        """What making features still takes until step `end`, before which the next selection is due."""
        start = max((step for step in self._selection_steps if step < progress.step), default=0)
        planned_ms = self._making_ms * (progress.slowdown or 1.0) * (end - start)
        return max(planned_ms - progress.making_ms, 0.0) / 1e3

    def is_out_of_time(self, progress: Progress, selection_is_due: bool) -> bool:
        """See `TimeBudget.is_out_of_time`.

        A gradient pass after that step, and the slower first step of a new graph, must fit into the margin.
        """
        if progress.validation_seconds:
            needed = VALIDATION_MARGIN * max(progress.validation_seconds)
        else:
            first_seconds = VALIDATION_MARGIN * first_validation_seconds(self.table, self._validation_batches)
            needed = (first_seconds + (self.table.compiling_ms or 0.0) / 1e3) * (progress.slowdown or 1.0)
        needed += sum(progress.step_ms[-1:]) / 1e3 + self._averaging(progress)
        if selection_is_due:
            needed += progress.selection_seconds or 0.0
        return progress.elapsed_seconds + needed > self._seconds(progress)

    def _beside_steps_seconds(self, progress: Progress, slowdown: float, left: float) -> float:
        """Seconds of those `left` to keep beside steps: for what comes first, validations, selections, averaging."""
        validation = first_validation_seconds(self.table, self._validation_batches) * slowdown
        if progress.validation_seconds:
            validation = statistics.median(progress.validation_seconds)
        selections_left = sum(progress.step <= step < progress.total_steps for step in self._selection_steps)
        if progress.selection_seconds is None:
            selecting = first_selections_seconds(self.table, selections_left) * slowdown
        else:
            selecting = selections_left * progress.selection_seconds
        earlier = limited_validation((progress.epochs - progress.epoch - 1) * validation, self._validation_share, left)
        first = 0.0 if progress.step else self._start_seconds * slowdown
        averaging = self._averaging(progress) if progress.step else self._averaging_seconds * slowdown
        return max(earlier, 0.0) + VALIDATION_MARGIN * validation + selecting + first + averaging


def start_seconds(table: TimingTable, data: ShuffledData, settings: Settings) -> float:
    """What fitting and validating the closed-form head takes at the table's speed; 0 for a run without that model."""
    if not (settings.starts_with_head and settings.save_model):
        return 0.0
    fitting = data.steps_per_epoch * table.forward_ms / 1e3
    return fitting + first_validation_seconds(table, data.test_batches)


def averaging_seconds(table: TimingTable, data: ShuffledData, settings: Settings) -> float:
    """What averaging the head after the last step takes at the table's speed; 0 for a run that does not."""
    if not settings.average_head:
        return 0.0
    return (VALIDATION_MARGIN * data.steps_per_epoch * table.forward_ms + (table.compiling_ms or 0.0)) / 1e3


def held_out_seconds(table: TimingTable, data: ShuffledData) -> float:
    """What testing the best model after training takes at the table's speed; 0 without images for that."""
    return 0.0 if data.held_out is None else first_validation_seconds(table, data.held_out.test_batches)


def limited_validation(validation: float, share: float, training: float) -> float:
    """What validations take: at most this share of training time; 1: no limit."""
    return validation if share >= 1 else min(validation, share * training)


def first_validation_seconds(table: TimingTable, batches: int) -> float:
    """What a validation takes at the table's speed, until one is measured."""
    return FIRST_VALIDATION * batches * table.forward_ms / 1e3


def first_selections_seconds(table: TimingTable, count: int) -> float:
    """What `count` selections take at the table's speed, until one is measured, and compiling what a run needs beside.

    Each compiles a step. The gradient pass that measures the device's speed and validation are compiled once.
    """
    if table.compiling_ms is None:
        return count * FIRST_SELECTION_STEPS * table.full_step_ms / 1e3
    return (count + 2) * table.compiling_ms / 1e3


def deadline_epochs(
    table: TimingTable,
    seconds: float,
    steps_per_epoch: int,
    validation_batches: int,
    most: int,
    interval: float,
    may_lengthen: bool = True,
    validation_share: float = 1.0,
) -> tuple[int, float]:
    """How many epochs to train before a deadline, if nothing else is asked for, and the interval of selections.

    As many epochs as fit at `DEADLINE_RHO`, from one to `most`. More time than that is not used, since neither more
    epochs nor a larger rho led to a better model (docs/results.md).

    Args:
        table: timing table of the network.
        seconds: wall time that is left for all of training.
        steps_per_epoch, validation_batches: of the images.
        most: epochs that are enough.
        interval: epochs between two selections.
        may_lengthen: lengthen the interval where selections would take more than `MAX_SELECTING` of the time.
        validation_share: as of `DeadlineBudget`.
    """
    validation = first_validation_seconds(table, validation_batches)
    training = DEADLINE_RHO * steps_per_epoch * table.full_step_ms / 1e3
    epoch = training + limited_validation(validation, validation_share, training)
    one = first_selections_seconds(table, 1) - first_selections_seconds(table, 0)
    allowed = max(int(MAX_SELECTING * seconds / one), 1) if one and may_lengthen else math.inf

    def fits(count: int) -> bool:
        selections = math.ceil(min(max(count / interval, 1), allowed))
        beside = first_selections_seconds(table, selections) + (validation if validation_share < 1 else 0.0)
        return count * epoch + beside <= seconds

    epochs = min(next(filter(fits, range(int(seconds / epoch), 1, -1)), 1), most)
    return epochs, max(interval, math.ceil(epochs / allowed))
