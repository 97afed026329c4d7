"""The times of all steps of a run, which its own records sum up."""

from __future__ import annotations

from typing import Any

from elastic_trainer.runs.run_log import RunLog


class StepTimesLog(RunLog):
    """A run's log that also keeps the time of each step in ms, None for a step that was not timed, and of features."""

    step_ms: tuple[float | None, ...] = ()
    making_ms: tuple[float, ...] = ()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See `RunLog`."""
        result = self.trainer.history.results[-1]
        self.step_ms += (result.step_ms,)
        self.making_ms += (result.making_ms,)
        super().on_train_batch_end(batch, logs)
