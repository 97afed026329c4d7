"""The files that a run writes into its folder: config.json, its tables while it trains, and summary.json.

metrics.csv has a row per epoch, selections.csv a row per tensor of each selection. The row of epoch 0 is the model that
training started from, if it was tested.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.listener import Listener
from elastic_trainer.runs.reader import CONFIG, METRICS, SELECTIONS, SUMMARY, is_run
from elastic_trainer.runs.tensorboard import EventsWriter
from elastic_trainer.selection.select import Selection
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_csv, write_record
from elastic_trainer.system.machine import environment

SELECTION_COLUMNS = (
    *("epoch", "step", "name", "importance", "chosen"),
    *("predicted_step_ms", "budget_step_ms", "measured_step_ms", "rho", "slowdown", "correction"),
)


class RunLog(Listener):
    """Writes config.json, metrics.csv, selections.csv and summary.json; a context manager that closes the events file.

    Args:
        folder: of this run alone; empty, or the folder of the run to continue.
        config: the options of the run; they and the environment are written to config.json, unless it exists.
        tensor_names: of `model.trainable_variables`, in their order.

    Attributes:
        is_continued: whether an earlier process started this run.
        events: writes TensorBoard's events; a listener, too.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensor_names: Sequence[str]) -> None:
        super().__init__()
        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self.events = EventsWriter(folder)
        self.is_continued = is_run(folder)
        if not self.is_continued:
            write_record(folder / CONFIG, {**config, "environment": environment()})
        self.checkpoints = Checkpoints(folder / "checkpoints")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.nullcontext() if exception[0] is None else contextlib.suppress(UserError):
            self.events.close()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Drop what an interrupted run wrote after its checkpoint."""
        self._write_tables()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._write_tables()

    def _write_tables(self) -> None:
        history = self.trainer.history
        if history.epochs:
            rows = [*history.epochs]
            if history.start is not None:
                tested = {f"test_{name}": value for name, value in history.start.items()}
                rows.insert(0, {**dict.fromkeys(rows[0]), "epoch": 0, "step": 0, "train_seconds": 0.0, **tested})
            write_csv(self.folder / METRICS, [*rows[0]], ([*row.values()] for row in rows))
        rows_of_tensors = (row for selection in history.selections for row in _tensor_rows(selection, self._names))
        write_csv(self.folder / SELECTIONS, SELECTION_COLUMNS, rows_of_tensors)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, delete the checkpoints, and return what summary.json contains.

        That is options of the run, and `results`: `run_results`, and what else is known once training has ended.
        `summary.update_summary` adds what comes after training.
        """
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        summary = {**{key: self._config.get(key) for key in keys}, **results}
        self.events.finish()
        write_record(self.folder / SUMMARY, summary)
        self.checkpoints.clear()
        return summary


def _tensor_rows(selection: Selection, names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    measured = statistics.median(selection.step_ms) if selection.step_ms else None
    budget = (selection.predicted_step_ms, selection.budget_step_ms, measured)
    correction = (selection.rho, selection.slowdown, selection.correction)
    for index, name in enumerate(names):
        importance = None if selection.importance is None else float(selection.importance[index])
        chosen = (name, importance, int(selection.mask[index]))
        yield (f"{selection.epoch:.6g}", selection.step, *chosen, *budget, *correction)
