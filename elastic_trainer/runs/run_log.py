"""The log of a run: its options, tables, curves and summary."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import UserError
from elastic_trainer.files import write_json
from elastic_trainer.machine import environment
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.listener import Listener
from elastic_trainer.runs.reader import CONFIG, SUMMARY
from elastic_trainer.runs.tables import write_tables

if TYPE_CHECKING:
    from elastic_trainer.runs.tensorboard import EventsWriter


class RunLog(Listener):
    """config.json, metrics.csv, selections.csv, summary.json and TensorBoard's events.

    The tables are written completely after each epoch. Use as a context manager, which closes the events file.

    Args:
        folder: of this run alone; empty, or that of the run to continue.
        config: the options of the run; they and the environment are written to config.json, unless it exists.
        tensor_names: names of `model.trainable_variables`, in their order.

    Attributes:
        checkpoints: of this run.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensor_names: Sequence[str]) -> None:
        super().__init__()
        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._events: EventsWriter | None = None
        self._flushed: dict[str, int] | None = None
        if not (folder / CONFIG).exists():
            write_json(folder / CONFIG, {**config, "environment": environment()})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._events is not None:
            with contextlib.nullcontext() if exception[0] is None else contextlib.suppress(UserError):
                self._events.close()

    def resume(self, events: dict[str, int]) -> None:
        """Go on from a checkpoint with these `flushed_events`: what was recorded after it is recorded again."""
        self._flushed = events

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        from elastic_trainer.runs.tensorboard import EventsWriter

        self._events = EventsWriter(self.folder, self.trainer.history, self._flushed)
        if self._flushed is not None:
            write_tables(self.folder, self.trainer.history, self._names)

    @property
    def _writer(self) -> EventsWriter:
        """TensorBoard's events, once recording has started."""
        assert self._events is not None, "on_train_begin comes first"
        return self._events

    def flushed_events(self) -> dict[str, int]:
        """Have all events up to now on the disk; returns the size in bytes of each of their files."""
        return self._writer.flushed()

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """What was trained so far belongs to the budget so far."""
        self._writer.end_point()

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._writer.add_selection(self.trainer.history.selection)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._writer.add_step(self.trainer.history.results[-1])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._writer.add_epoch(self.trainer.history.epochs[-1])
        write_tables(self.folder, self.trainer.history, self._names)
        self._writer.flush()

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the run's options and its `results`, delete the checkpoints; returns the summary."""
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        summary = {**{key: self._config.get(key) for key in keys}, **results}
        self._writer.finish()
        write_json(self.folder / SUMMARY, summary)
        self.checkpoints.clear()
        return summary
