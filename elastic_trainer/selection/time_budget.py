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
subtracted. With a deadline (`selection.deadline`), rho follows from the time left and the speed of the latest steps. In
the paper (section 5) nothing is measured again; its published system misses rho by up to 11 points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.selection.select import Plan
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.wall_time import slowdown_of_steps

CORRECTION_BOUND = 1.25  # beyond this a wrong table is more likely than a wrong prediction
PREDICTION_ERROR = 0.04  # standard deviation of the table's predictions during runs (docs/log/rho.md)
CARRIED = 0.03  # share of a full step by which a selection's budget may differ from rho because of earlier selections
MIN_SCATTER = 0.05  # a few measurements may agree by chance
LATEST_STEPS = 50  # before a selection, from which a deadline's budget sees how fast steps are
# Of an interval, at least and at most; in between one for every hundred steps. A pass takes about a full step, so an
# interval of less than 25 steps has one for every five, and at least one.
GRADIENT_PASSES = (5, 15)


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
        making_ms: what making features took since the last selection.
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
    making_ms: float = 0.0
    steps_per_epoch: int = 1
    first_model_seconds: float = 0.0


class Allowance(NamedTuple):
    """What the next selection may cost.

    Attributes:
        rho: step time over that of full training as it would run now; see `RhoBudget` for what is carried over.
        table_rho: the same in table time, over the table's full step: rho / correction.
        full_step_ms: full training's step as it would run now.
        slowdown, correction: see the module's header.
    """

    rho: float
    table_rho: float
    full_step_ms: float
    slowdown: float
    correction: float


def smallest_rho(table: TimingTable, head: np.ndarray, misses: float = 1.0) -> float:
    """Step time of training the head alone over a full step's.

    Args:
        table: timing table of the network.
        head: bool [N] over `model.trainable_variables`.
        misses: of cached features, see `timing.forward_costs`; 1 without any.
    """
    if head.all():
        return 1.0
    return min(table.predict_ms(head, misses) / table.full_step_ms, 1.0)  # of a tiny network, the table may say more


def check_rho(
    table: TimingTable, head: np.ndarray, rho: float, misses: float = 1.0, of_plain_fit: bool = False
) -> None:
    """Raise `UserError` if training the head alone takes more than `rho` of a full step, or of one of plain `fit`.

    Other arguments as for `smallest_rho`.
    """
    smallest = smallest_rho(table, head, misses) / (table.plain_over_full if of_plain_fit else 1.0)
    if rho < smallest:
        step = "step of plain fit" if of_plain_fit else "full step"
        raise UserError(
            f"--rho {rho:g}: training the head alone takes {smallest:.1%} of a {step} here"
            f"{', making its cached features included' if misses < 1 else ''}; "
            f"give at least {math.ceil(smallest * 1000) / 1000:g}"
        )


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
        self._step_ms = self._making_ms = 0.0  # of the latest plan, in table time

    def allow(self, progress: Progress) -> Allowance:
        """The allowance of the next selection, corrected by what was measured since the last one."""
        raise NotImplementedError

    def is_out_of_time(self, progress: Progress, selection_is_due: bool) -> bool:
        """Whether no time is left for another step, for a selection if it is due, and for the validation after it."""
        return False

    def fitting_steps(self, progress: Progress) -> int | None:
        """How many steps the run can have in all at the speed of the latest ones; None if nothing limits them."""
        return None

    def _step_over_prediction(self, progress: Progress) -> list[float]:
        """Times of the latest steps over the table's prediction for them; empty before the first."""
        return [ms / self._step_ms for ms in progress.step_ms[-LATEST_STEPS:]] if self._step_ms else []

    def adopt(self, plan: Plan) -> None:
        """Note that the tensors of `plan` train from now on."""
        self.mask, self._step_ms, self._making_ms = plan.mask, plan.step_ms, plan.making_ms

    def to_record(self) -> dict[str, float]:
        """What a checkpoint keeps of it, besides the mask."""
        return {"correction": self.correction, "step_ms": self._step_ms, "making_ms": self._making_ms}

    def resume(self, record: dict[str, float], mask: np.ndarray) -> None:
        """Continue from what `to_record` returned while bool [N] `mask` trained."""
        self.mask, self.correction = mask, record["correction"]
        self._step_ms, self._making_ms = record["step_ms"], record["making_ms"]


class RhoBudget(TimeBudget):
    """Steps of at most `rho` of a full one on average.

    What a selection leaves unused of its allowance is added to the next one's, and what it takes beyond it is
    subtracted, at most `CARRIED`. What it took is its prediction, the making of its features included, times the
    correction that its steps led to.

    Raises:
        UserError: even training the head alone takes more.
    """

    def __init__(self, table: TimingTable, head: np.ndarray, rho: float, misses: float = 1.0) -> None:
        super().__init__(table, head, misses)
        check_rho(table, head, rho, misses)
        self._rho, self._allowed = rho, rho

    def allow(self, progress: Progress) -> Allowance:
        """See `TimeBudget.allow`."""
        if self._step_ms and progress.step_ms and progress.slowdowns:
            predicted_ms = self._step_ms * slowdown_of_steps(progress.slowdowns, len(progress.step_ms))
            ratios = (np.array(progress.step_ms) / predicted_ms).tolist()
            noise = _median_error(ratios) ** 2 + _median_error(progress.slowdowns) ** 2
            gain = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + noise)
            self.correction *= (statistics.median(ratios) / self.correction) ** gain
            self.correction = min(max(self.correction, 1 / CORRECTION_BOUND), CORRECTION_BOUND)
        if self._step_ms:
            took = min((self._step_ms + self._making_ms) * self.correction / self.table.full_step_ms, 1.0)
            carried = min(max(self._allowed - took, -CARRIED), CARRIED)
            self._allowed = min(max(self._rho + carried, self.smallest_rho), 1.0)
        table_rho = self._allowed / self.correction if self._allowed < 1 else 1.0
        slowdown = latest_slowdown(progress)
        return Allowance(self._allowed, table_rho, self.table.full_step_ms * slowdown, slowdown, self.correction)

    def to_record(self) -> dict[str, float]:
        """See `TimeBudget.to_record`."""
        return {**super().to_record(), "allowed": self._allowed}

    def resume(self, record: dict[str, float], mask: np.ndarray) -> None:
        """See `TimeBudget.resume`."""
        self._allowed = record["allowed"]
        super().resume(record, mask)


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
