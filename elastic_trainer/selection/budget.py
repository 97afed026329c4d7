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
subtracted. In the paper (section 6) nothing is measured again; its published system misses rho by up to 11 points.

A table that is only estimated (`profiling.tables`) does not know how fast this device is: the first gradient passes say
that. Then the selection's own steps correct the tensors that they train, and the others by the rest of a full step,
after `CORRECTED_AFTER` steps and before each later selection.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Selection, step_limit_ms
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table import StepPrediction, TimingTable, sharpened
from elastic_trainer.timing.wall_time import slowdown_of_steps

# Of the budget: the current upper part is kept if it takes at most SHORTFALL less than the best one, and at most
# OVERRUN beyond the budget.
SHORTFALL, OVERRUN = 0.05, 0.01
CORRECTION_BOUND = 1.25  # beyond this a wrong table is more likely than a wrong prediction
ESTIMATE_BOUND, ESTIMATE_ERROR = 3.0, 0.3  # the same two of an estimated table
CORRECTED_AFTER = (10, 30)  # steps of a run whose table is estimated, before which it selects once more
UNASKED_RHO = 0.5  # where none is asked for: with a deadline
PREDICTION_ERROR = 0.04  # standard deviation of the table's predictions during runs (docs/log/rho.md)
MAX_CARRY_OVER = 0.03  # of a full step: the most by which earlier selections change a selection's budget
MIN_SCATTER = 0.05  # a few measurements may agree by chance
# Of an interval, at least and at most; in between one for every hundred steps. A pass takes about a full step, so an
# interval of less than 25 steps has one for every five, and at least one.
GRADIENT_PASSES = (5, 15)
MIN_CACHE_SAVING = 0.1  # of what the prefix takes; less is within the error of the timing table


class Progress(NamedTuple):
    """The state of a run when a selection may be due."""

    step: int = 0  # steps done
    total_steps: int = 1
    step_ms: Sequence[float] = ()  # measured steps since the last selection
    slowdowns: Sequence[float] = ()  # of gradient passes since then, evenly spread; before the first, of some just now
    selection_seconds: float | None = None  # mean time of a selection; None before the first
    features_possible: bool = False  # whether features of the frozen prefix can be cached now
    mask: np.ndarray | None = None  # of the current selection; None before the first
    feature_steps: int = 0  # latest steps that used the features of one selection; 0 if the last step used none
    steps_per_epoch: int = 1  # of a complete epoch


def smallest_rho(table: TimingTable, head: np.ndarray, misses: float = 1.0) -> float:
    """Step time of training the head alone, bool [N] over `model.trainable_variables`, over a full step's.

    `misses` of cached features as in `timing.fit`; 1 without any.
    """
    if head.all():
        return 1.0
    return min(table.predict_ms(head, misses) / table.full_step_ms, 1.0)  # of a tiny network, the table may say more


class RhoBudget:
    """Steps of at most `rho` of a full one on average.

    What a selection leaves unused of its allowance is added to the next one's, and what it takes beyond it is
    subtracted, at most `MAX_CARRY_OVER`. What it took is its prediction, the making of its features included, times the
    correction that its steps led to.

    Args:
        table, head, misses: as of `smallest_rho`.
        rho: None: none was asked for; `UNASKED_RHO`, or what the head takes.

    Attributes:
        rho: of the next selection: step time over that of full training as it would run now, with what is carried over.
        slowdown, correction: see the module's header.

    Raises:
        UserError: even training the head alone takes more.
    """

    # In a checkpoint.
    kept: ClassVar[tuple[str, ...]] = ("correction", "_step_ms", "_caching_ms", "rho", "_known")

    def __init__(self, table: TimingTable, head: np.ndarray, rho: float | None, misses: float = 1.0) -> None:
        self.table, self.correction, self.slowdown = table, 1.0, 1.0
        self.smallest_rho = smallest_rho(table, head, misses)
        self._step_ms = self._caching_ms = 0.0  # of the latest selection, in table time
        self._known: list[tuple[list[bool], float]] = []  # measured selections, by which an estimate was corrected
        if rho is not None and rho < self.smallest_rho:
            raise UserError(
                f"--rho {rho:g}: training the head alone takes {self.smallest_rho:.1%} of a full step here"
                f"{', making its cached features included' if misses < 1 else ''}; "
                f"give at least {math.ceil(self.smallest_rho * 1000) / 1000:g}"
            )
        self._asked = self.rho = max(UNASKED_RHO, self.smallest_rho) if rho is None else rho

    @property
    def table_rho(self) -> float:
        """`rho` in table time, over the table's full step."""
        return self.rho / self.correction if self.rho < 1 else 1.0

    @property
    def is_new(self) -> bool:
        """Whether no selection was made by its table."""
        return not self._step_ms

    def allow(self, progress: Progress) -> RhoBudget:
        """Itself, for the next selection: corrected by what was measured since the last one."""
        error, bound = PREDICTION_ERROR, CORRECTION_BOUND
        if self.table.is_estimate:
            error, bound = ESTIMATE_ERROR, ESTIMATE_BOUND
        is_measured = self._step_ms and progress.step_ms and progress.slowdowns
        if is_measured:
            predicted_ms = self._step_ms * slowdown_of_steps(progress.slowdowns, len(progress.step_ms))
            ratios = (np.array(progress.step_ms) / predicted_ms).tolist()
            noise = _median_error(ratios) ** 2 + _median_error(progress.slowdowns) ** 2
            gain = error**2 / (error**2 + noise)
            self.correction *= (statistics.median(ratios) / self.correction) ** gain
            self.correction = min(max(self.correction, 1 / bound), bound)
        if self._step_ms:
            took = min((self._step_ms + self._caching_ms) * self.correction / self.table.full_step_ms, 1.0)
            carried = min(max(self.rho - took, -MAX_CARRY_OVER), MAX_CARRY_OVER)
            self.rho = min(max(self._asked + carried, self.smallest_rho), 1.0)
        if is_measured and self.table.is_estimate and progress.mask is not None and not progress.feature_steps:
            self._sharpen([*map(bool, progress.mask)], self._step_ms * self.correction)
        self.slowdown = statistics.median(progress.slowdowns[-GRADIENT_PASSES[0] :] or [1.0])  # by the latest passes
        return self

    def is_close(self, best: StepPrediction, current: StepPrediction, misses: float, progress: Progress) -> bool:
        """Whether the `current` steps may stay, although the `best` ones within the budget, with `misses`, are others.

        A new selection needs a new graph and new features, which a few tensors more or less are not worth; nor is a
        change that takes longer than it saves in the steps that are left.
        """
        limit_ms = step_limit_ms(self.table, self.table_rho, misses)
        best_ms, current_ms = best.step_ms + best.caching_ms, current.step_ms + current.caching_ms
        changing_ms = 1e3 * (progress.selection_seconds or 0.0) / self.slowdown
        is_as_large = best_ms - SHORTFALL * limit_ms <= current_ms <= (1 + OVERRUN) * limit_ms
        return is_as_large or abs(best_ms - current_ms) <= changing_ms / (progress.total_steps - progress.step)

    def _sharpen(self, mask: list[bool], step_ms: float) -> None:
        """Correct the table by a selection that was measured, in table time, instead of all selections alike."""
        table = sharpened(self.table, np.array(mask), step_ms)
        if table is not self.table:
            self.table, self.correction = table, 1.0
            self._known.append((mask, step_ms))

    def adopt(
        self,
        mask: np.ndarray,
        prediction: StepPrediction,
        importance: np.ndarray | None = None,
        knows_time: bool = True,
    ) -> Selection:
        """Note what the next steps take, which train `mask`; their selection in wall time, unless that is not known."""
        self._step_ms, self._caching_ms, uses_features = prediction
        return Selection(
            mask,
            importance,
            predicted_step_ms=self._step_ms * self.slowdown * self.correction if knows_time else None,
            budget_step_ms=self.rho * self.table.full_step_ms * self.slowdown if knows_time else None,
            uses_features=uses_features,
            rho=self.rho,
            slowdown=self.slowdown,
            correction=self.correction,
        )

    def to_record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {name: getattr(self, name) for name in self.kept}

    def resume(self, record: dict[str, Any]) -> None:
        """Continue from what `to_record` returned, of the same table."""
        for mask, step_ms in record["_known"]:
            self._sharpen(mask, step_ms)
        for name in self.kept:
            setattr(self, name, record[name])


def feature_misses(data: ShuffledData, steps: int, step: int = 0, cached_steps: int = 0) -> float:
    """`misses` (`timing.fit`) of this many steps after `step` ones, the last `cached_steps` on the same features.

    1 where a cache would save less than `MIN_CACHE_SAVING` of the prefix.
    """
    first = step - cached_steps
    missing = data.distinct_views(cached_steps + steps, first) - data.distinct_views(cached_steps, first)
    misses = float(missing / (steps * data.batch_size))
    return misses if misses <= 1 - MIN_CACHE_SAVING else 1.0


def first_misses(data: ShuffledData, settings: Settings) -> float:
    """`misses` of the steps until the second selection; 1 without a cache."""
    if settings.feature_cache == "off":
        return 1.0
    schedule = Schedule.of(settings, data.steps_per_epoch)
    return feature_misses(data, [*schedule.selection_steps(settings.interval), schedule.total_steps][1])


def gradient_pass_steps(ends: Sequence[int]) -> set[int]:
    """Steps, counted from 1, after which a gradient pass is timed, evenly spread over each interval.

    `ends` are 0 and the last step of each interval.
    """
    found = set()
    for start, end in pairwise(ends):
        fewest, most = GRADIENT_PASSES
        steps = end - start
        passes = min(max(steps // 100, min(steps // 5, fewest), 1), most)
        found |= {end - (2 * k + 1) * steps // (2 * passes) for k in range(passes)}
    return found


def _median_error(values: Sequence[float]) -> float:
    """Standard error of the median of `values`, as a share of it."""
    median = statistics.median(values)
    scatter = 1.4826 * statistics.median(abs(value / median - 1) for value in values)  # as a standard deviation
    return 1.2533 * max(scatter, MIN_SCATTER) / math.sqrt(len(values))
