"""Short elastic runs in temporary folders, and logs that keep or do more than a run's own. Imports TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_rows
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import make_budget

if TYPE_CHECKING:
    import keras

    from elastic_trainer.settings import Settings
    from elastic_trainer.timing.table import TimingTable

Log = TypeVar("Log", bound=RunLog)
Rows = list[dict[str, str]]
BUSY = [sys.executable, "-c", "while True: pass"]


class StepTimesLog(RunLog):
    """Also keeps the time of each step in ms, None for a step that was not timed, and that of making features."""

    step_ms: tuple[float | None, ...] = ()
    making_ms: tuple[float, ...] = ()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See `RunLog`."""
        result = self.trainer.history.results[-1]
        self.step_ms += (result.step_ms,)
        self.making_ms += (result.making_ms,)
        super().on_train_batch_end(batch, logs)


class DisturbingLog(RunLog):
    """Starts busy processes at the first selection in the second half of the run, and ends them at its end."""

    busy_processes = 0
    _children: tuple[subprocess.Popen[bytes], ...] = ()

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """See `RunLog`."""
        if not self._children and step >= self.trainer.schedule.total_steps / 2:
            self._children = tuple(subprocess.Popen(BUSY) for _ in range(self.busy_processes))
        super().on_selection_begin(step, logs)

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        super().__exit__(*exception)


def elastic_run(
    model: keras.Model,
    data: Any,
    settings: Settings,
    table: TimingTable,
    make_log: Callable[[Path, dict[str, Any], list[str]], Log],
    features_possible: bool = False,
) -> tuple[dict[str, Any], Log, Rows, Rows]:
    """The summary of a run, its log, the rows of metrics.csv, and those of selections.csv, one a selection.

    Args:
        model, settings, table: of the run.
        data: its images, or `AlternatingDigits`.
        make_log: takes what `RunLog` takes.
        features_possible: as of `make_budget`.
    """
    names = tensor_names(model)
    with tempfile.TemporaryDirectory() as folder, (log := make_log(Path(folder), {}, names)):
        budget = make_budget(model, data, settings, table, features_possible)
        summary = train.elastic_training(model, data, settings, log, budget)
        return summary, log, read_rows(Path(folder) / METRICS), read_rows(Path(folder) / SELECTIONS)[:: len(names)]
