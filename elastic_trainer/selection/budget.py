"""The time budget of elastic training: how long the next steps may take, corrected while training.

A timing table is measured once, but devices heat up, slow down and run other programs. Before each selection two things
are measured again:

    slowdown     a gradient pass over all tensors now, over the table's time for it. Full training, as it would run
                 now, takes slowdown·full_step_ms a step. Several such passes are spread over the steps of an interval,
                 so that both see the same disturbances (before the first selection, they run by themselves)
    correction   the measured time of those steps, divided by (the table's prediction × the slowdown of their stretch of
                 the interval). Updated with a Kalman gain, so noisy measurements count less, and bounded

The next selection must fit into rho·full_step_ms / correction of the table's time, if rho is given (`RhoBudget`). What
it takes to make its cached features counts, spread over the steps that use them. Large tensors seldom fill a budget, so
what a selection leaves unused is added to the next one's, and what it took beyond its budget, as measured since, is
subtracted. With a deadline (`DeadlineBudget`), rho follows from the time left and the speed of the latest steps. In the
paper (section 5) nothing is measured again; its published system misses rho by up to 11 points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import keras
import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.options import duration_text
from elastic_trainer.selection.run_time import VALIDATION_MARGIN, RunTime
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Plan
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.wall_time import slowdown_of_steps

CORRECTION_BOUND = 1.25  # beyond this a wrong table is more likely than a wrong prediction
PREDICTION_ERROR = 0.04  # standard deviation of the table's predictions during runs (docs/log/rho.md)
MAX_CARRY_OVER = 0.03  # of a full step: the most by which earlier selections change a selection's budget
MIN_SCATTER = 0.05  # a few measurements may agree by chance
LATEST_STEPS = 50  # before a selection, from which a deadline's budget sees how fast steps are
# Of an interval, at least and at most; in between one for every hundred steps. A pass takes about a full step, so an
# interval of less than 25 steps has one for every five, and at least one.
GRADIENT_PASSES = (5, 15)
MIN_CACHE_SAVING = 0.1  # of what the prefix takes; less is within the error of the timing table
DEADLINE_RHO = 0.6  # for which a deadline's epochs are chosen: a larger one led to no better model (docs/results.md)
# Shares of the time left that are kept in reserve before a deadline. Until steps are measured, they may take 16 % more
# than predicted (docs/log/deadlines.md), and a run that is stopped loses the end of its learning-rate schedule.
DEADLINE_RESERVE, FIRST_RESERVE = 0.02, 0.1
FIRST_STEPS = 5  # whose median time is the speed at which the export's time was measured


class DeadlineTooShortError(UserError):
    """A deadline leaves too little time even to train the head alone."""


class Progress(NamedTuple):
    """The state of a run when a selection may be due.

    Attributes:
        epoch, epochs: the current epoch, counted from 0, and how many there are.
        step, total_steps: steps done, and in all.
        elapsed_seconds: wall time of the run so far, everything included.
        step_ms: measured steps since the last selection.
        slowdowns: by each gradient pass since the last selection, at even distances; before the first, by passes just
            now.
        overhead_ms: mean time of a step beyond its own (data, records).
        validation_seconds: of the latest validations, with the records and the saving that belong to them.
        selection_seconds: mean time of a selection; None before the first.
        slowdown: when the last selection was made; None before the first.
        features_possible: whether features of the frozen prefix can be cached now.
        feature_steps: latest steps that used the features of one selection; 0 if the last step used none.
        caching_ms: what making features took since the last selection.
        steps_per_epoch: of a complete epoch.
        first_model_seconds: what fitting and saving the model before training took; 0 if there was none.
    """

    epoch: int = 0
    epochs: int = 1
    step: int = 0
    total_steps: int = 1
    elapsed_seconds: float = 0.0
    step_ms: Sequence[float] = ()
    slowdowns: Sequence[float] = ()
    overhead_ms: float = 0.0
    validation_seconds: Sequence[float] = ()
    selection_seconds: float | None = None
    slowdown: float | None = None
    features_possible: bool = False
    feature_steps: int = 0
    caching_ms: float = 0.0
    steps_per_epoch: int = 1
    first_model_seconds: float = 0.0


class Allowance(NamedTuple):
    """What the next selection may cost.

    Attributes:
        rho: step time over that of full training as it would run now; see `RhoBudget` for what is carried over.
        slowdown, correction: see the module's header.
    """

    rho: float
    slowdown: float
    correction: float = 1.0

    @property
    def table_rho(self) -> float:
        """`rho` in table time, over the table's full step."""
        return self.rho / self.correction if self.rho < 1 else 1.0


def smallest_rho(table: TimingTable, head: np.ndarray, misses: float = 1.0) -> float:
    """Step time of training the head alone over a full step's.

    Args:
        table: timing table of the network.
        head: bool [N] over `model.trainable_variables`.
        misses: of cached features, see `timing.fit`; 1 without any.
    """
    if head.all():
        return 1.0
    return min(table.predict_ms(head, misses) / table.full_step_ms, 1.0)  # of a tiny network, the table may say more


class TimeBudget:
    """What the selections of one run may cost.

    Args:
        table: timing table of the network.
        head: bool [N] over `model.trainable_variables`, what is always trained.
        misses: as for `smallest_rho`.
    """

    def __init__(self, table: TimingTable, head: np.ndarray, misses: float = 1.0) -> None:
        self.table, self.correction = table, 1.0
        self.smallest_rho = smallest_rho(table, head, misses)
        self.mask: np.ndarray | None = None  # of the latest plan
        self._step_ms = self._caching_ms = 0.0  # of the latest plan, in table time

    def allow(self, progress: Progress) -> Allowance:
        """The allowance of the next selection, corrected by what was measured since the last one."""
        raise NotImplementedError

    def is_out_of_time(self, progress: Progress, selection_is_due: bool) -> bool:
        """Whether no time is left for another step, for a selection if it is due, and for the validation after it."""
        return False

    def fitting_steps(self, progress: Progress) -> int | None:
        """How many steps the run can have in all at the speed of the latest ones; None if nothing limits them."""
        return None

    def over_prediction(self, step_ms: Sequence[float]) -> list[float]:
        """Times of the latest of these steps over the table's prediction for them; empty before the first plan."""
        return [ms / self._step_ms for ms in step_ms[-LATEST_STEPS:]] if self._step_ms else []

    def adopt(self, plan: Plan) -> None:
        """Note that the tensors of `plan` train from now on."""
        self.mask, self._step_ms, self._caching_ms = plan.mask, plan.step_ms, plan.caching_ms

    def to_record(self) -> dict[str, float]:
        """What a checkpoint keeps of it, besides the mask."""
        return {"correction": self.correction, "step_ms": self._step_ms, "making_ms": self._caching_ms}

    def resume(self, record: dict[str, float], mask: np.ndarray) -> None:
        """Continue from what `to_record` returned while bool [N] `mask` trained."""
        self.mask, self.correction = mask, record["correction"]
        self._step_ms, self._caching_ms = record["step_ms"], record["making_ms"]


class RhoBudget(TimeBudget):
    """Steps of at most `rho` of a full one on average.

    What a selection leaves unused of its allowance is added to the next one's, and what it takes beyond it is
    subtracted, at most `MAX_CARRY_OVER`. What it took is its prediction, the making of its features included, times the
    correction that its steps led to.

    Raises:
        UserError: even training the head alone takes more.
    """

    def __init__(self, table: TimingTable, head: np.ndarray, rho: float, misses: float = 1.0) -> None:
        super().__init__(table, head, misses)
        if rho < self.smallest_rho:
            raise UserError(
                f"--rho {rho:g}: training the head alone takes {self.smallest_rho:.1%} of a full step here"
                f"{', making its cached features included' if misses < 1 else ''}; "
                f"give at least {math.ceil(self.smallest_rho * 1000) / 1000:g}"
            )
        self._rho, self._allowed = rho, rho

    def allow(self, progress: Progress) -> Allowance:
        if self._step_ms and progress.step_ms and progress.slowdowns:
            predicted_ms = self._step_ms * slowdown_of_steps(progress.slowdowns, len(progress.step_ms))
            ratios = (np.array(progress.step_ms) / predicted_ms).tolist()
            noise = _median_error(ratios) ** 2 + _median_error(progress.slowdowns) ** 2
            gain = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + noise)
            self.correction *= (statistics.median(ratios) / self.correction) ** gain
            self.correction = min(max(self.correction, 1 / CORRECTION_BOUND), CORRECTION_BOUND)
        if self._step_ms:
            took = min((self._step_ms + self._caching_ms) * self.correction / self.table.full_step_ms, 1.0)
            carried = min(max(self._allowed - took, -MAX_CARRY_OVER), MAX_CARRY_OVER)
            self._allowed = min(max(self._rho + carried, self.smallest_rho), 1.0)
        return Allowance(self._allowed, latest_slowdown(progress), self.correction)

    def to_record(self) -> dict[str, float]:
        return {**super().to_record(), "allowed": self._allowed}

    def resume(self, record: dict[str, float], mask: np.ndarray) -> None:
        self._allowed = record["allowed"]
        super().resume(record, mask)


class DeadlineBudget(TimeBudget):
    """Steps that end all of training, validation included, `seconds` after the start of the program.

    Args:
        table, head, misses: as of `TimeBudget`.
        seconds: wall time from the start of the program.
        schedule: of the run.
        selection_steps: steps, counted from 0, before which a selection is due.
        run_time: what the run takes beside its steps.
        elapsed: seconds that have passed before training starts.

    Raises:
        DeadlineTooShortError: even training the head alone takes longer.
    """

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
        self._max_rho, self._total_steps = 1.0, schedule.total_steps
        self._most_steps: int | None = None  # of a run whose length follows from the time
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
        ratio = statistics.median(self.over_prediction(progress.step_ms) or [latest_slowdown(progress)])
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

    def to_record(self) -> dict[str, float]:
        record = {**super().to_record(), "max_rho": self._max_rho}
        return record if self._most_steps is None else {**record, "most_steps": self._most_steps}

    def resume(self, record: dict[str, float], mask: np.ndarray) -> None:
        self._max_rho = record.get("max_rho", 1.0)
        self._most_steps = int(record["most_steps"]) if "most_steps" in record else None
        super().resume(record, mask)

    def fitting_steps(self, progress: Progress) -> int | None:
        if not progress.step_ms:
            return None
        validation = later = statistics.median(progress.validation_seconds or [0.0])
        if len(progress.validation_seconds) == 1:  # the first also compiles, and makes features
            later = min(validation, self._run_time.validation * (progress.slowdown or 1.0))
        pace = (statistics.median(progress.step_ms[-LATEST_STEPS:]) + progress.overhead_ms) / 1e3
        epoch = pace * progress.steps_per_epoch
        pace += replace(self._run_time, validation=later).earlier_validations(1, epoch) / progress.steps_per_epoch
        due = [step for step in self._selection_steps if step >= progress.step]
        left = (self._seconds(progress) - progress.elapsed_seconds) * (1 - DEADLINE_RESERVE)
        left -= VALIDATION_MARGIN * validation + self._averaging(progress)
        left -= self._making_seconds(progress, min(due, default=progress.total_steps))
        for selections in range(len(due) + 1):
            training = left - selections * (progress.selection_seconds or 0.0)
            steps = progress.step + max(int(training / pace), 0)
            if sum(step < steps for step in due) <= selections:
                break
        return min(steps, self._most_steps or self._total_steps)

    def is_out_of_time(self, progress: Progress, selection_is_due: bool) -> bool:
        """As of `TimeBudget`. A gradient pass after that step, and the slower first step of a new graph, must fit into
        the margin."""
        if progress.validation_seconds:
            needed = VALIDATION_MARGIN * max(progress.validation_seconds)
        else:
            first = VALIDATION_MARGIN * self._run_time.validation + self._run_time.compiling
            needed = first * (progress.slowdown or 1.0)
        needed += sum(progress.step_ms[-1:]) / 1e3 + self._averaging(progress)
        if selection_is_due:
            needed += progress.selection_seconds or 0.0
        return progress.elapsed_seconds + needed > self._seconds(progress)

    def _seconds(self, progress: Progress) -> float:
        """When training must have ended, so that what follows it ends in time."""
        return self._all_seconds - self._run_time.end * self._slowdown(progress)

    def _slowdown(self, progress: Progress) -> float:
        """How much slower steps are now than the first ones of this process; at least 1."""
        ratios = self.over_prediction(progress.step_ms)
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

    def _making_seconds(self, progress: Progress, end: int) -> float:
        """What making features still takes until step `end`, before which the next selection is due."""
        start = max((step for step in self._selection_steps if step < progress.step), default=0)
        planned_ms = self._caching_ms * (progress.slowdown or 1.0) * (end - start)
        return max(planned_ms - progress.caching_ms, 0.0) / 1e3

    def _beside_steps(self, progress: Progress, slowdown: float, left: float) -> float:
        """What all but the steps takes of the seconds `left`: as measured, else by the table at this slowdown."""
        table, has_started = self._run_time, progress.step > 0
        selecting = progress.selection_seconds
        validations = progress.validation_seconds or [table.validation * slowdown]
        now = replace(
            table,
            validation=statistics.median(validations),
            selection=table.selection * slowdown if selecting is None else selecting,
            compiling=table.compiling * slowdown if selecting is None else 0.0,
            first_model=0.0 if has_started else table.first_model * slowdown,
            averaging=self._averaging(progress) if has_started else table.averaging * slowdown,
        )
        selections = sum(progress.step <= step < progress.total_steps for step in self._selection_steps)
        reserve = (VALIDATION_MARGIN - 1) * now.validation  # for the last one
        return now.beside(progress.epochs - progress.epoch, selections, left) + reserve


def feature_misses(data: ShuffledData, steps: int, cached_steps: int = 0) -> float:
    """`misses` (`timing.fit`) of this many steps, after `cached_steps` on the same features.

    1 where a cache would save less than `MIN_CACHE_SAVING` of the prefix.
    """
    missing = data.distinct_views(cached_steps + steps) - data.distinct_views(cached_steps)
    misses = float(missing / (steps * data.batch_size))
    return misses if misses <= 1 - MIN_CACHE_SAVING else 1.0


def first_misses(data: ShuffledData, settings: Settings) -> float:
    """`misses` of the steps until the second selection; 1 without a cache."""
    schedule = Schedule.of(settings, data.steps_per_epoch)
    steps = min(math.ceil(settings.interval * data.steps_per_epoch), schedule.total_steps)
    return 1.0 if settings.feature_cache == "off" else feature_misses(data, steps)


def make_budget(
    model: keras.Model,
    data: ShuffledData,
    settings: Settings,
    table: TimingTable,
    elapsed: float = 0.0,
    export_seconds: float = 0.0,
    head: np.ndarray | None = None,
) -> TimeBudget:
    """The time budget that `settings` ask for.

    Args:
        model, data, settings, table: of the run.
        elapsed: seconds of a deadline that have passed before training starts.
        export_seconds: of a deadline, kept for the export.
        head: as of `TimeBudget`; by default that of the model.

    Raises:
        UserError: even training the head alone exceeds it; `DeadlineTooShortError` if it is a deadline.
    """
    head, misses = head_mask(model) if head is None else head, first_misses(data, settings)
    if settings.deadline is None:
        return RhoBudget(table, head, settings.rho, misses)
    schedule = Schedule.of(settings, data.steps_per_epoch)
    selection_steps = schedule.selection_steps(settings.interval)
    run_time = RunTime.of(table, data, settings, export_seconds)
    return DeadlineBudget(table, head, settings.deadline, schedule, selection_steps, run_time, misses, elapsed)


def gradient_pass_steps(ends: Sequence[int]) -> set[int]:
    """Steps, counted from 1, after which a gradient pass is timed: at even distances in each interval.

    Args:
        ends: 0, and the last step of each interval.
    """
    found = set()
    for start, end in pairwise(ends):
        fewest, most = GRADIENT_PASSES
        steps = end - start
        passes = min(max(steps // 100, min(steps // 5, fewest), 1), most)
        found |= {end - (2 * k + 1) * steps // (2 * passes) for k in range(passes)}
    return found


def latest_slowdown(progress: Progress) -> float:
    """The slowdown now, by the latest gradient passes."""
    return statistics.median(progress.slowdowns[-GRADIENT_PASSES[0] :] or [1.0])


def _median_error(values: Sequence[float]) -> float:
    """Standard error of the median of `values`, as a share of it."""
    median = statistics.median(values)
    scatter = 1.4826 * statistics.median(abs(value / median - 1) for value in values)  # as a standard deviation
    return 1.2533 * max(scatter, MIN_SCATTER) / math.sqrt(len(values))
