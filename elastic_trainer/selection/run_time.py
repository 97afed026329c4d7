"""What a run takes beside its training steps: the one sum behind deadlines, plans and the number of epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable

MAX_SELECTING = 0.1  # share of a deadline that selections may take, where the interval is not given
# Assumed until it is measured: a selection takes this many full steps, if the table does not say how long compiling
# takes, and a validation this many forward passes over all test images, since it also reads them.
FIRST_SELECTION_STEPS, FIRST_VALIDATION = 30, 1.5
# Times the longest of the latest validations, kept for the last one before a deadline (docs/log/deadlines.md).
VALIDATION_MARGIN = 1.5


@dataclass(frozen=True)
class RunTime:
    """Seconds of everything but steps, at the speed of the timing table or as measured since.

    Attributes:
        validation: of one validation.
        selection: of one selection; it compiles a step.
        compiling: of compiling one graph. The gradient pass that measures the device's speed, and validation, have one
            graph each. 0 if it is not known.
        first_model: of fitting and validating the closed-form head between the first selection and the first step; 0
            for a run without it.
        averaging: of averaging the head after the last step; 0 for a run that does not.
        end: of what follows training: testing the best model on images held out for that, and the export.
        validation_share: of training time, which validations before the last one take at most; 1: no limit.
    """

    validation: float
    selection: float = 0.0
    compiling: float = 0.0
    first_model: float = 0.0
    averaging: float = 0.0
    end: float = 0.0
    validation_share: float = 1.0

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

    def selections(self, count: int) -> float:
        """Of the first `count` selections, with the graphs that are compiled once."""
        return count * self.selection + 2 * self.compiling

    def earlier_validations(self, count: int, training: float) -> float:
        """Of `count` validations before the last one, where steps take `training` seconds."""
        seconds = max(count, 0) * self.validation
        return seconds if self.validation_share >= 1 else min(seconds, self.validation_share * training)

    def beside(self, epochs: int, selections: int, training: float) -> float:
        """Of all but the steps, from the first selection to the last validation; the steps take `training` seconds."""
        validations = self.earlier_validations(epochs - 1, training) + self.validation
        return self.first_model + self.selections(selections) + validations + self.averaging

    def fitting_epochs(
        self, seconds: float, epoch: float, most: int, interval: float, may_lengthen: bool = True
    ) -> tuple[int, float]:
        """How many epochs fit into `seconds`, from one to `most`, and the interval of selections in epochs.

        Args:
            seconds: that are left for all of training.
            epoch: seconds of the steps of an epoch.
            most: epochs that are enough.
            interval: epochs between two selections.
            may_lengthen: lengthen the interval where selections would take more than `MAX_SELECTING` of the time.
        """
        limits = may_lengthen and self.selection > 0
        allowed = max(int(MAX_SELECTING * seconds / self.selection), 1) if limits else math.inf

        def fits(count: int) -> bool:
            selections = math.ceil(min(max(count / interval, 1), allowed))
            return count * epoch + self.beside(count, selections, count * epoch) <= seconds

        epochs = min(next(filter(fits, range(int(seconds / epoch), 1, -1)), 1), most)
        return epochs, max(interval, math.ceil(epochs / allowed))
