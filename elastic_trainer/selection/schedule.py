"""The length of a run in steps, and the steps before which a selection is due."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """How long a run is, in steps; of the same training, `past_steps` came before, and it selects as if it had them.

    A finished run goes on with epoch `from_epoch` at `from_step`: its last epoch may have been incomplete.
    """

    steps_per_epoch: int
    total_steps: int
    past_steps: int = 0
    from_epoch: int = 0
    from_step: int = 0

    @classmethod
    def of(cls, settings: Settings, steps_per_epoch: int) -> Schedule:
        """The schedule that `settings` ask for on a data set of `steps_per_epoch`."""
        epoch, step = settings.from_epoch, settings.from_step
        end = min(step + (settings.num_epochs - epoch) * steps_per_epoch, settings.max_steps or sys.maxsize)
        return cls(steps_per_epoch, end, from_epoch=epoch, from_step=step)

    @property
    def epochs(self) -> int:
        """Epochs of the run; the last may be incomplete."""
        return self.from_epoch + math.ceil((self.total_steps - self.from_step) / self.steps_per_epoch)

    def start_of(self, epoch: int) -> int:
        """The first step of an epoch, counted from 0; of the one after the last, the number of steps."""
        return min(self.from_step + (epoch - self.from_epoch) * self.steps_per_epoch, self.total_steps)

    def selection_steps(self, interval: float | None) -> list[int]:
        """Steps, counted from 0, before which a selection is due: the first, and every `interval` epochs (None: never
        again).

        Raises:
            UserError: less than a step lies between two of them.
        """
        if interval is None:
            return [0]
        steps = interval * self.steps_per_epoch
        if steps < 1:
            raise UserError(
                f"--interval {interval:g}: is less than a step; an epoch has {self.steps_per_epoch} steps, so "
                f"give at least {math.ceil(1e4 / self.steps_per_epoch) / 1e4:g}"
            )
        count, past = math.ceil((self.past_steps + self.total_steps) / steps), self.past_steps
        due = [math.ceil(index * steps - 1e-6) - past for index in range(count)]
        return [0, *(step for step in due if 0 < step < self.total_steps)]
