"""The time budget of elastic training: how long the next steps may take, kept true while training.

A timing table is measured once, but devices heat up, slow down and get company. For each selection two things are
measured anew:

    slowdown     a gradient pass over all tensors now, over the table's time for it: full training, as it would run now,
                 takes slowdown·full_step_ms a step. A few such passes take turns with the latest steps, so that
                 whatever slows down the one slows down the other (before the first selection, by themselves)
    correction   those steps over the table's prediction for them times slowdown: what the prediction leaves out.
                 Approached as far as their scatter lets one believe it (a Kalman filter's gain, trusting the table as
                 much each time), and bounded

and the next selection must fit into rho·full_step_ms / correction of the table's time, if rho is given (`RhoBudget`);
what the one before left over of its own comes on top, since large tensors seldom fill a budget, and what it took beyond
it, as measured since, comes off.
With a deadline (`DeadlineBudget`), rho follows from the time left and the pace of the latest steps. In the paper
(section 5) nothing is measured again; its published system misses rho by up to 11 points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from elastic_trainer.timing.table import TimingTable
from utils import UserError

CORRECTION_BOUND = 1.25  # beyond this a wrong table is more likely than a wrong prediction
PREDICTION_ERROR = 0.04  # standard deviation of the table's predictions as they meet a run (docs/time_budget.md)
CARRIED = 0.03  # share of a full step by which a selection's budget may differ from rho for what those before took
LEAST_SCATTER = 0.05  # a few measurements may agree by chance
LATEST_STEPS = 50  # before a selection; gradient passes take turns with them, and they are compared with those
PASSES = (5, 15)  # of an interval, at least (if it has the steps) and at most; in between one for every hundred steps
DEADLINE_RESERVE = 0.02  # share of the time left that is kept for what nobody foresaw
# Times the longest of the latest tests, kept for the last one before a deadline (docs/time_budget.md).
TEST_MARGIN = 1.5
# As long as none has been measured: what a selection takes, in full steps, and a validation, in forward passes over all
# test images (reading the images, and TensorFlow's first call, come on top).
FIRST_SELECTION_STEPS, FIRST_VALIDATION = 30, 1.5


class Progress(NamedTuple):
    """Where a run stands when a selection may be due.

    Attributes:
        epoch, epochs: the epoch that begins or is under way, counted from 0, and how many there are.
        step, total_steps: steps done, and in all.
        elapsed_seconds: wall time since training began, everything included.
        step_ms: measured steps since the last selection.
        slowdowns: the slowdown by each gradient pass since the last selection; before the first, of passes just now.
        overhead_ms: what a step takes beside its own time (data, records), on average.
        test_seconds: of one test, with the records and the saving that go with it; None before the first.
        selection_seconds: of one selection, on average; None before the first.
    """

    epoch: int = 0
    epochs: int = 1
    step: int = 0
    total_steps: int = 1
    elapsed_seconds: float = 0.0
    step_ms: Sequence[float] = ()
    slowdowns: Sequence[float] = ()
    overhead_ms: float = 0.0
    test_seconds: float | None = None
    selection_seconds: float | None = None


class Allowance(NamedTuple):
    """What the next selection may cost.

    Attributes:
        rho: step time over that of full training as it would run now; see `RhoBudget` for what is carried over.
        table_share: the same in the table's time, as a share of its full step: rho / correction.
        full_step_ms: full training's step as it would run now.
        slowdown, correction: see the module's header.
    """

    rho: float
    table_share: float
    full_step_ms: float
    slowdown: float
    correction: float


class TimeBudget:
    """What the selections of one run may cost.

    Args:
        table: timing table of the network.
        head: bool [N] over `model.trainable_variables`, what is always trained.

    Raises:
        UserError: the table says that training the head takes longer than training all.
    """

    def __init__(self, table: TimingTable, head: np.ndarray) -> None:
        self.table, self.correction = table, 1.0
        self.smallest_rho = table.predict_ms(head) / table.full_step_ms
        self._predicted_ms: float | None = None
        if self.smallest_rho > 1:
            raise UserError(
                "the timing table says that training the head alone takes longer than training all; profile anew"
            )

    def allow(self, progress: Progress) -> Allowance:
        """The allowance of the next selection, corrected by what was measured since the last one."""
        raise NotImplementedError

    def first_test_seconds(self) -> float:
        """What the first test may take, as far as there is a deadline that it must not miss."""
        return 0.0

    def _paces(self, progress: Progress) -> list[float]:
        """Times of the latest steps over the table's time for them; empty before the first."""
        return [ms / self._predicted_ms for ms in progress.step_ms[-LATEST_STEPS:]] if self._predicted_ms else []

    def resume(self, mask: np.ndarray, rho: float, correction: float) -> None:
        """Go on from a selection that was made before this object was, and from the allowance it was made with."""
        self.correction = correction
        self.adopt(mask)

    def adopt(self, mask: np.ndarray) -> float:
        """Note that bool [N] `mask` trains from now on; returns the table's prediction, which its steps are held to."""
        self._predicted_ms = self.table.predict_ms(mask)
        return self._predicted_ms


class RhoBudget(TimeBudget):
    """Steps of at most `rho` of a full one on average.

    What a selection leaves over of its allowance is added to the next one's, and what it takes beyond it comes off, at
    most `CARRIED`. What it took is judged by the correction that its steps led to.

    Raises:
        UserError: even training the head alone takes more.
    """

    def __init__(self, table: TimingTable, head: np.ndarray, rho: float) -> None:
        super().__init__(table, head)
        self._rho, self._allowed = rho, rho
        if rho < self.smallest_rho:
            shown = math.ceil(self.smallest_rho * 1000) / 1000
            raise UserError(
                f"--rho {rho:g}: training the head alone takes {self.smallest_rho:.1%} of a full step here; "
                f"give at least {shown:g}"
            )

    def allow(self, progress: Progress) -> Allowance:
        paces, slowdown = self._paces(progress), _slowdown(progress)
        if paces and progress.slowdowns:
            noise = _median_error(paces) ** 2 + _median_error(progress.slowdowns) ** 2
            gain = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + noise)
            self.correction *= (statistics.median(paces) / slowdown / self.correction) ** gain
            self.correction = min(max(self.correction, 1 / CORRECTION_BOUND), CORRECTION_BOUND)
        if self._predicted_ms is not None:
            took = min(self._predicted_ms * self.correction / self.table.full_step_ms, 1.0)
            carried = min(max(self._allowed - took, -CARRIED), CARRIED)
            self._allowed = min(max(self._rho + carried, self.smallest_rho), 1.0)
        share = self._allowed / self.correction if self._allowed < 1 else 1.0
        return Allowance(self._allowed, share, self.table.full_step_ms * slowdown, slowdown, self.correction)

    def resume(self, mask: np.ndarray, rho: float, correction: float) -> None:
        self._allowed = rho
        super().resume(mask, rho, correction)


class DeadlineBudget(TimeBudget):
    """Steps that end all of training, validation included, `seconds` after its begin.

    Args:
        seconds: wall time for all of training.
        total_steps, epochs: how many there will be.
        selection_steps: steps, counted from 0, before which a selection is due.
        test_batches: batches of one validation.

    Raises:
        UserError: even training the head alone takes longer.
    """

    def __init__(
        self,
        table: TimingTable,
        head: np.ndarray,
        seconds: float,
        total_steps: int,
        epochs: int,
        selection_steps: Sequence[int],
        test_batches: int,
    ) -> None:
        super().__init__(table, head)
        self._seconds, self._selection_steps, self._test_batches = seconds, selection_steps, test_batches
        start = Progress(epochs=epochs, total_steps=total_steps)
        shortest = total_steps * self.smallest_rho * table.full_step_ms / 1e3 / (1 - DEADLINE_RESERVE)
        shortest += self._beside_steps_seconds(start, 1.0)
        if seconds < shortest:
            raise UserError(
                f"--deadline {seconds:g}: training the head alone for {total_steps} steps takes about {shortest:.0f} s "
                "here; give more time or fewer --num_epochs"
            )

    def first_test_seconds(self) -> float:
        return FIRST_VALIDATION * self._test_batches * self.table.forward_ms / 1e3

    def _beside_steps_seconds(self, progress: Progress, slowdown: float) -> float:
        """Seconds to keep for validations and selections still to come."""
        test, selection = progress.test_seconds, progress.selection_seconds
        if test is None:
            test = self.first_test_seconds() * slowdown
        if selection is None:
            selection = FIRST_SELECTION_STEPS * self.table.full_step_ms * slowdown / 1e3
        selections_left = sum(step >= progress.step for step in self._selection_steps)
        return (progress.epochs - progress.epoch - 1 + TEST_MARGIN) * test + selections_left * selection

    def allow(self, progress: Progress) -> Allowance:
        """The time left over what full training would need for the steps left; at most 1, at least the head alone.

        For the time left it is one whether the device or the prediction changed, so the latest steps speak for both.
        """
        pace = statistics.median(self._paces(progress) or [_slowdown(progress)])
        left = self._seconds - progress.elapsed_seconds
        left = left * (1 - DEADLINE_RESERVE) - self._beside_steps_seconds(progress, pace)
        step_ms = 1e3 * left / max(progress.total_steps - progress.step, 1) - progress.overhead_ms
        full_step_ms = self.table.full_step_ms * pace
        rho = min(max(step_ms / full_step_ms, self.smallest_rho), 1.0)
        return Allowance(rho, rho, full_step_ms, pace, correction=1.0)


def pass_steps(ends: Sequence[int]) -> set[int]:
    """Steps, counted from 1, after which a gradient pass is timed: evenly among the latest of each interval.

    Args:
        ends: 0, and the last step of each interval.
    """
    found = set()
    for begin, end in pairwise(ends):
        passes = min(max((end - begin) // 100, PASSES[0]), PASSES[1])
        window = min(end - begin, LATEST_STEPS)
        found |= {end - (2 * k + 1) * window // (2 * passes) for k in range(passes)}
    return found


def _slowdown(progress: Progress) -> float:
    return statistics.median(progress.slowdowns or [1.0])


def _median_error(values: Sequence[float]) -> float:
    """Standard error of the median of `values`, as a share of it."""
    median = statistics.median(values)
    scatter = 1.4826 * statistics.median(abs(value / median - 1) for value in values)  # as a standard deviation
    return 1.2533 * max(scatter, LEAST_SCATTER) / math.sqrt(len(values))
