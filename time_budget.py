"""The time budget of elastic training: how long the next steps may take, kept true while training.

A timing table is measured once, but devices heat up, slow down and get company. At each selection two things are
measured anew:

    slowdown     a gradient pass over all tensors now, over the same pass when the table was made: full training, as it
                 would run now, takes slowdown·full_step_ms a step
    correction   the latest steps over the table's prediction for them times slowdown: what the prediction leaves out.
                 Approached by a third each time (one interval is a noisy witness), and bounded

and the next selection must fit into rho·full_step_ms / correction of the table's time. rho is what the user asked for
(`RhoBudget`), or what the time left until a deadline allows (`DeadlineBudget`). In the paper (section 5) nothing is
measured again; its published system misses rho by up to 11 points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from timing_table import TimingTable
from utils import UserError

CORRECTION_BOUND = 1.25  # beyond this a wrong table is more likely than a wrong prediction
CORRECTION_GAIN = 1 / 3
LATEST_STEPS = 50  # the steps next to the measurement of slowdown are the ones to compare with it
DEADLINE_RESERVE = 0.02  # share of the time left that is kept for what nobody foresaw
FIRST_SELECTION_STEPS = 30  # what a selection takes, in full steps, as long as none has been measured


class Progress(NamedTuple):
    """Where a run stands when a selection may be due.

    Attributes:
        epoch, epochs: the epoch that begins, counted from 0, and how many there are.
        step, total_steps: steps done, and in all.
        elapsed_seconds: wall time since training began, everything included.
        step_ms: measured steps since the last selection.
        overhead_ms: what a step takes beside its own time (data, records), on average.
        validation_seconds, selection_seconds: of one validation or selection, on average; None before the first.
    """

    epoch: int = 0
    epochs: int = 1
    step: int = 0
    total_steps: int = 1
    elapsed_seconds: float = 0.0
    step_ms: Sequence[float] = ()
    overhead_ms: float = 0.0
    validation_seconds: float | None = None
    selection_seconds: float | None = None


class Allowance(NamedTuple):
    """What the next selection may cost.

    Attributes:
        rho: step time over that of full training as it would run now.
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

    def target_rho(self, progress: Progress, slowdown: float) -> float:
        """Step time over a full step's that is allowed from now on."""
        raise NotImplementedError

    def allow(self, progress: Progress, slowdown: float) -> Allowance:
        """The allowance of the next selection, corrected by the steps measured since the last one."""
        latest = list(progress.step_ms)[-LATEST_STEPS:]
        if latest and self._predicted_ms is not None:
            error = statistics.median(latest) / (self._predicted_ms * slowdown)
            self.correction *= (error / self.correction) ** CORRECTION_GAIN
            self.correction = min(max(self.correction, 1 / CORRECTION_BOUND), CORRECTION_BOUND)
        rho = self.target_rho(progress, slowdown)
        full_step_ms = self.table.full_step_ms * slowdown
        share = rho / self.correction if rho < 1 else 1.0
        return Allowance(rho, share, full_step_ms, slowdown, self.correction)

    def adopt(self, mask: np.ndarray) -> float:
        """Note that bool [N] `mask` trains from now on; returns the table's prediction, which its steps are held to."""
        self._predicted_ms = self.table.predict_ms(mask)
        return self._predicted_ms


class RhoBudget(TimeBudget):
    """Steps of at most `rho` of a full one.

    Raises:
        UserError: even training the head alone takes more.
    """

    def __init__(self, table: TimingTable, head: np.ndarray, rho: float) -> None:
        super().__init__(table, head)
        self._rho = rho
        if rho < self.smallest_rho:
            shown = math.ceil(self.smallest_rho * 1000) / 1000
            raise UserError(
                f"--rho {rho:g}: training the head alone takes {self.smallest_rho:.1%} of a full step here; "
                f"give at least {shown:g}"
            )

    def target_rho(self, progress: Progress, slowdown: float) -> float:
        return self._rho


class DeadlineBudget(TimeBudget):
    """Steps that end all of training, validation included, `seconds` after its begin.

    Args:
        seconds: wall time for all of training.
        total_steps, epochs: how many there will be.
        interval: epochs between two selections.
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
        interval: int,
        test_batches: int,
    ) -> None:
        super().__init__(table, head)
        self._seconds, self._interval, self._test_batches = seconds, interval, test_batches
        start = Progress(epochs=epochs, total_steps=total_steps)
        shortest = total_steps * self.smallest_rho * table.full_step_ms / 1e3 / (1 - DEADLINE_RESERVE)
        shortest += self._beside_steps_seconds(start, 1.0)
        if seconds < shortest:
            raise UserError(
                f"--deadline {seconds:g}: training the head alone for {total_steps} steps takes about {shortest:.0f} s "
                "here; give more time or fewer --num_epochs"
            )

    def _beside_steps_seconds(self, progress: Progress, slowdown: float) -> float:
        """Seconds that validations and selections still to come will take."""
        validation, selection = progress.validation_seconds, progress.selection_seconds
        if validation is None:
            validation = self._test_batches * self.table.forward_ms * slowdown / 1e3
        if selection is None:
            selection = FIRST_SELECTION_STEPS * self.table.full_step_ms * slowdown / 1e3
        epochs_left = progress.epochs - progress.epoch
        return epochs_left * validation + math.ceil(epochs_left / self._interval) * selection

    def target_rho(self, progress: Progress, slowdown: float) -> float:
        """The time left over what full training would need for the steps left; at most 1, at least the head alone."""
        left = self._seconds - progress.elapsed_seconds
        left = left * (1 - DEADLINE_RESERVE) - self._beside_steps_seconds(progress, slowdown)
        step_ms = 1e3 * left / max(progress.total_steps - progress.step, 1) - progress.overhead_ms
        return min(max(step_ms / (self.table.full_step_ms * slowdown), self.smallest_rho), 1.0)
