"""A deadline: what a run takes beside its training steps, and the time budget that ends all of it in time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.selection.budget import LATEST_STEPS, Allowance, Progress, TimeBudget, latest_slowdown
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import duration_text
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table import TimingTable

DEADLINE_RHO = 0.6  # for which a deadline's epochs are chosen: a larger one led to no better model (docs/results.md)
# Shares of the time left that are kept in reserve before a deadline. Until steps are measured, they may take 16 % more
# than predicted (docs/log/deadlines.md), and a run that is stopped loses the end of its learning-rate schedule.
DEADLINE_RESERVE, FIRST_RESERVE = 0.02, 0.1
FIRST_STEPS = 5  # whose median time is the speed at which the export's time was measured
MAX_SELECTING = 0.1  # share of a deadline that selections may take, where the interval is not given
# Assumed until it is measured: a selection takes this many full steps, if the table does not say how long compiling
# takes, and a validation this many forward passes over all test images, since it also reads them.
FIRST_SELECTION_STEPS, FIRST_VALIDATION = 30, 1.5
# Times the longest of the latest validations, kept for the last one before a deadline (docs/log/deadlines.md).
VALIDATION_MARGIN = 1.5


class DeadlineTooShortError(UserError):
    """A deadline leaves too little time even to train the head alone."""


@dataclass(frozen=True)
class RunTime:
    """Seconds of everything but steps, at the speed of the timing table or as measured since."""

    validation: float  # of one
    selection: float = 0.0  # of one; it compiles a step
    compiling: float = 0.0  # one graph: the gradient pass that measures the speed, and validation, have one each
    first_model: float = 0.0  # fitting and validating the closed-form head before the first step; 0: the run does not
    averaging: float = 0.0  # averaging the head after the last step; 0: the run does not
    end: float = 0.0  # what follows training: testing the best model on images held out for that, and the export
    validation_share: float = 1.0  # of training time, which validations before the last take at most; 1: no limit

    @classmethod
    def of(cls, table: TimingTable, data: ShuffledData, settings: Settings, export_seconds: float = 0.0) -> RunTime:
        """What the table predicts for a run with `settings` on `data`, whose export takes `export_seconds`."""

        def validation(examples: ShuffledData) -> float:
            return FIRST_VALIDATION * examples.test_batches * table.forward_ms / 1e3

        fitting = data.steps_per_epoch * table.forward_ms / 1e3
        compiling = (table.compiling_ms or 0.0) / 1e3
        return cls(
            validation(data),
            FIRST_SELECTION_STEPS * table.full_step_ms / 1e3 if table.compiling_ms is None else compiling,
            compiling,
            fitting + validation(data) if settings.starts_with_head and settings.save_model else 0.0,
            VALIDATION_MARGIN * fitting + compiling if settings.average_head else 0.0,
            export_seconds + (0.0 if data.held_out is None else validation(data.held_out)),
            settings.validation_share,
        )

    def earlier_validations(self, count: int, training: float) -> float:
        """Of `count` validations before the last one, where steps take `training` seconds."""
        seconds = max(count, 0) * self.validation
        return seconds if self.validation_share >= 1 else min(seconds, self.validation_share * training)

    def beside(self, epochs: int, selections: int, training: float) -> float:
        """Of all but the steps, from the first selection to the last validation; the steps take `training` seconds."""
        selecting = selections * self.selection + 2 * self.compiling
        validations = self.earlier_validations(epochs - 1, training) + self.validation
        return self.first_model + selecting + validations + self.averaging

    def fitting_epochs(
        self, seconds: float, epoch: float, most: int, interval: float, may_lengthen: bool = True
    ) -> tuple[int, float]:
        """How many epochs fit into all of training's `seconds`, from one to `most`, and the interval of selections.

        The steps of an epoch take `epoch` seconds. The interval, in epochs, is lengthened where selections would take
        more than `MAX_SELECTING` of the time, unless it may not be.
        """
        limits = may_lengthen and self.selection > 0
        allowed = max(int(MAX_SELECTING * seconds / self.selection), 1) if limits else math.inf

        def fits(count: int) -> bool:
            selections = math.ceil(min(max(count / interval, 1), allowed))
            return count * epoch + self.beside(count, selections, count * epoch) <= seconds

        epochs = min(next(filter(fits, range(int(seconds / epoch), 1, -1)), 1), most)
        return epochs, max(interval, math.ceil(epochs / allowed))


class DeadlineBudget(TimeBudget):
    """Steps that end all of training, validation included, `seconds` after the start of the program.

    Of these, `elapsed` have passed before training starts. Selections are due before `selection_steps`, counted from 0.

    Raises:
        DeadlineTooShortError: even training the head alone takes longer.
    """

    kept: ClassVar[tuple[str, ...]] = (*TimeBudget.kept, "_max_rho", "_most_steps")
    _max_rho = 1.0
    _most_steps: int | None = None  # of a run whose length follows from the time

    def __init__(
        self,
        table: TimingTable,
        head: np.ndarray,
        seconds: float,
        schedule: Schedule,
        selection_steps: Sequence[int],
        run_time: RunTime,
        misses: float = 1.0,
        elapsed: float = 0.0,
    ) -> None:
        super().__init__(table, head, misses)
        self._all_seconds, self._selection_steps, self._run_time = seconds, selection_steps, run_time
        self._first_ratio: float | None = None  # of the first steps' times in this process over the table's prediction
        self._total_steps = schedule.total_steps
        start = Progress(epochs=schedule.epochs, total_steps=schedule.total_steps)
        training = schedule.total_steps * self.smallest_rho * table.full_step_ms / 1e3
        shortest = elapsed + training / (1 - DEADLINE_RESERVE) + self._beside_steps(start, 1.0, training) + run_time.end
        if seconds < shortest:
            raise DeadlineTooShortError(
                f"--deadline {duration_text(seconds)}: training the head alone for {schedule.total_steps} steps takes "
                f"about {duration_text(shortest)} here; give more time or fewer --num_epochs"
            )

    def allow(self, progress: Progress) -> Allowance:
        """The time left over what full training would need for the steps left; at most 1, at least the head alone.

        A slower device and a wrong prediction need the same answer here, so the latest steps stand for both.
        """
        ratio = statistics.median(self._over_prediction(progress) or [latest_slowdown(progress)])
        left = self._seconds(progress) - progress.elapsed_seconds
        reserve = DEADLINE_RESERVE if progress.step_ms else FIRST_RESERVE
        left = left * (1 - reserve) - self._beside_steps(progress, ratio, left)
        steps = progress.total_steps - progress.step
        if self._most_steps is not None:  # the largest rho that leaves time for an epoch; the length follows from it
            steps = min(steps, progress.steps_per_epoch)
        step_ms = 1e3 * left / max(steps, 1) - progress.overhead_ms
        rho = step_ms / (self.table.full_step_ms * ratio)
        return Allowance(min(max(rho, self.smallest_rho), self._max_rho), ratio)

    def limit_rho(self, rho: float) -> None:
        """Use no more time than steps of `rho` take, unless the head alone takes more."""
        self._max_rho = max(rho, self.smallest_rho)

    def lengthen_to(self, steps: int) -> None:
        """Let the length of the run follow from the time, up to `steps` in all, instead of rho."""
        self._most_steps = max(steps, self._total_steps)

    def fitting_steps(self, progress: Progress) -> int | None:
        if not progress.step_ms:
            return None
        validation = later = statistics.median(progress.validation_seconds or [0.0])
        if len(progress.validation_seconds) == 1:  # the first also compiles, and makes features
            later = min(validation, self._run_time.validation * (progress.slowdown or 1.0))
        pace = (statistics.median(progress.step_ms[-LATEST_STEPS:]) + progress.overhead_ms) / 1e3
        epoch = pace * progress.steps_per_epoch
        pace += replace(self._run_time, validation=later).earlier_validations(1, epoch) / progress.steps_per_epoch
        # Features are still made until the next selection is due.
        due = [step for step in self._selection_steps if step >= progress.step]
        start = max((step for step in self._selection_steps if step < progress.step), default=0)
        steps = min(due, default=progress.total_steps) - start
        caching_ms = self._caching_ms * (progress.slowdown or 1.0) * steps - progress.caching_ms
        left = (self._seconds(progress) - progress.elapsed_seconds) * (1 - DEADLINE_RESERVE)
        left -= VALIDATION_MARGIN * validation + self._averaging(progress)
        left -= max(caching_ms, 0.0) / 1e3
        for selections in range(len(due) + 1):
            training = left - selections * (progress.selection_seconds or 0.0)
            steps = progress.step + max(int(training / pace), 0)
            if sum(step < steps for step in due) <= selections:
                break
        return min(steps, self._most_steps or self._total_steps)

    def is_out_of_time(self, progress: Progress, selection_is_due: bool) -> bool:
        # A gradient pass after that step, and the slower first step of a new graph, must fit into the margin.
        if progress.validation_seconds:
            needed = VALIDATION_MARGIN * max(progress.validation_seconds)
        else:
            first = VALIDATION_MARGIN * self._run_time.validation + self._run_time.compiling
            needed = first * (progress.slowdown or 1.0)
        needed += sum(progress.step_ms[-1:]) / 1e3 + self._averaging(progress)
        if selection_is_due:
            needed += progress.selection_seconds or 0.0
        return progress.elapsed_seconds + needed > self._seconds(progress)

    def _over_prediction(self, progress: Progress) -> list[float]:
        """Times of the latest steps over the table's prediction for them; empty before the first plan."""
        return [ms / self._step_ms for ms in progress.step_ms[-LATEST_STEPS:]] if self._step_ms else []

    def _seconds(self, progress: Progress) -> float:
        """When training must have ended, so that what follows it ends in time."""
        return self._all_seconds - self._run_time.end * self._slowdown(progress)

    def _slowdown(self, progress: Progress) -> float:
        """How much slower steps are now than the first ones of this process; at least 1."""
        ratios = self._over_prediction(progress)
        if self._first_ratio is None:
            self._first_ratio = statistics.median(ratios) if len(ratios) >= FIRST_STEPS else None
            return 1.0
        return max(statistics.median(ratios) / self._first_ratio, 1.0) if ratios else 1.0

    def _averaging(self, progress: Progress) -> float:
        """What averaging the head takes: as much as the first model, if this run has fitted one."""
        if not self._run_time.averaging:
            return 0.0
        measured = VALIDATION_MARGIN * progress.first_model_seconds * self._slowdown(progress)
        return measured or self._run_time.averaging * (progress.slowdown or 1.0)

    def _beside_steps(self, progress: Progress, slowdown: float, left: float) -> float:
        """What all but the steps takes of the seconds `left`: as measured, else by the table at this slowdown."""
        table, has_started, selecting = self._run_time, progress.step > 0, progress.selection_seconds
        now = replace(
            table,
            validation=statistics.median(progress.validation_seconds or [table.validation * slowdown]),
            selection=table.selection * slowdown if selecting is None else selecting,
            compiling=table.compiling * slowdown if selecting is None else 0.0,
            first_model=0.0 if has_started else table.first_model * slowdown,
            averaging=self._averaging(progress) if has_started else table.averaging * slowdown,
        )
        selections = sum(progress.step <= step < progress.total_steps for step in self._selection_steps)
        reserve = (VALIDATION_MARGIN - 1) * now.validation  # for the last one
        return now.beside(progress.epochs - progress.epoch, selections, left) + reserve
