"""Short elastic runs, steps of full training that alternate with theirs, and logs that do more than a run's own.

Whatever disturbs the machine disturbs steps that alternate alike. Importing this imports TensorFlow.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import data as image_data
import train
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.machine import is_undisturbed, stolen_seconds
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_rows
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import make_budget
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.settings import NetworkSettings, Settings
    from elastic_trainer.timing.table import TimingTable

Log = TypeVar("Log", bound=RunLog)
Rows = list[dict[str, str]]
BUSY = [sys.executable, "-c", "while True: pass"]


class AlternatingDigits:
    """Digits, cut to a few steps an epoch; before each batch a step of full training of another network is timed.

    It stands in for `ImageData` in a run.

    Args:
        network: gives input size, batch size and seed.
        steps: in an epoch.
        full: the step of full training.

    Attributes:
        full_ms: time of the step of full training before each batch.
        undisturbed: whether other virtual machines took no time from that step and from the run's step after it.
    """

    def __init__(self, network: NetworkSettings, steps: int, full: Callable[[Any, Any], object]) -> None:
        digits = image_data.load("digits", network.input_size, network.batch_size, network.seed)
        train, test = (
            split._replace(images=split.images[:count], labels=split.labels[:count])
            for split, count in ((digits._train, steps * network.batch_size), (digits._test, network.batch_size))
        )
        self._data = ImageData("digits", digits.class_names, train, test, network.batch_size, network.seed)
        self._full = full
        self.full_ms: list[float] = []
        self.undisturbed: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train(self, epoch: int, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
        """Batches as of `ImageData.train`, each after a timed step of full training."""
        for batch in self._data.train(epoch, skip, count):
            start, stolen = time.perf_counter(), stolen_seconds()
            self.full_ms.append(float(measure_ms([partial(self._full, batch.inputs, batch.targets)], 1)[0, 0]))
            yield batch
            self.undisturbed.append(is_undisturbed(time.perf_counter() - start, stolen_seconds() - stolen))


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
