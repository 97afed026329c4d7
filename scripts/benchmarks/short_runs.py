"""Short elastic runs with what benchmarks do beside each step. Importing this imports TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

import train
from elastic_trainer.machine import is_undisturbed, stolen_seconds
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_rows
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.budget import make_budget
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.settings import NetworkSettings, Settings
    from elastic_trainer.timing.table import TimingTable

Rows = list[dict[str, str]]
BUSY = [sys.executable, "-c", "while True: pass"]


class ShortRunLog(RunLog):
    """A run's log that also times a step of full training before each step, and disturbs a part of the run.

    Whatever disturbs the machine disturbs both steps.

    Args:
        folder, config, tensor_names: see `RunLog`.
        full: runs a step of full training of another network; None times none.
        busy_processes: that disturb the run.
        busy: from which to which share of its steps.

    Attributes:
        full_ms, step_ms, making_ms: times of the step of full training, of the run's own step (None if it was not
            timed), and of making its features, for each step.
        undisturbed: whether other virtual machines took no time from both steps.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        tensor_names: list[str],
        full: Callable[[], object] | None,
        busy_processes: int,
        busy: tuple[float, float],
    ) -> None:
        super().__init__(folder, config, tensor_names)
        self._full, self._busy_processes, self._busy = full, busy_processes, busy
        self._children: list[subprocess.Popen[bytes]] = []
        self.full_ms: list[float] = []
        self.step_ms: list[float | None] = []
        self.making_ms: list[float] = []
        self.undisturbed: list[bool] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See `RunLog`."""
        self._disturb(self.trainer.history.step)
        self._start = time.perf_counter(), stolen_seconds()
        if self._full is not None:
            self.full_ms.append(float(measure_ms([self._full], 1)[0, 0]))
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See `RunLog`."""
        start, stolen = self._start
        self.undisturbed.append(is_undisturbed(time.perf_counter() - start, stolen_seconds() - stolen))
        result = self.trainer.history.results[-1]
        self.step_ms.append(result.step_ms)
        self.making_ms.append(result.making_ms)
        super().on_train_batch_end(batch, logs)

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """See `RunLog`."""
        self._disturb(step)
        super().on_selection_begin(step, logs)

    def __exit__(self, *exception: object) -> None:
        self._end_busy()
        super().__exit__(*exception)

    def _disturb(self, step: int) -> None:
        """Start or end the processes, before this step."""
        first, end = (share * self.trainer.schedule.total_steps for share in self._busy)
        if not first <= step < end:
            self._end_busy()
        elif not self._children:
            self._children = [subprocess.Popen(BUSY) for _ in range(self._busy_processes)]

    def _end_busy(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._children = []


def full_training(network: NetworkSettings, data: ImageData) -> Callable[[], object]:
    """A call that runs a step of full training of a new, separate network, on the first batch of `data`."""
    batch = next(iter(data.train(0)))
    return partial(common.full_training_step(network), batch.inputs, batch.targets)


def elastic_run(
    model: keras.Model,
    data: ImageData,
    settings: Settings,
    table: TimingTable,
    full: Callable[[], object] | None = None,
    busy_processes: int = 0,
    busy: tuple[float, float] = (0.5, 1.0),
) -> tuple[dict[str, Any], ShortRunLog, Rows, Rows]:
    """A run in a temporary folder: its summary, its log, the rows of metrics.csv, and a row of each selection.

    Args:
        model, data, settings, table: of the run.
        full, busy_processes, busy: see `ShortRunLog`.
    """
    names = tensor_names(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        ShortRunLog(Path(folder), {}, names, full, busy_processes, busy) as log,
    ):
        budget = make_budget(model, data, settings, table)
        summary = train.elastic_training(model, data, settings, log, budget)
        return summary, log, read_rows(Path(folder) / METRICS), read_rows(Path(folder) / SELECTIONS)[:: len(names)]
