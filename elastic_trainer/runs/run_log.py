"""The log of a run: everything that it leaves in its folder is written through this."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import UserError
from elastic_trainer.files import atomic_path, write_json
from elastic_trainer.machine import environment
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.reader import CONFIG, SUMMARY
from elastic_trainer.runs.tables import write_tables
from elastic_trainer.settings import BEST_MODEL, LAST_MODEL

if TYPE_CHECKING:
    import keras

    from elastic_trainer.runs.history import History
    from elastic_trainer.runs.tensorboard import EventsWriter


class RunLog:
    """config.json, metrics.csv, selections.csv, summary.json, checkpoints, saved models and TensorBoard's events.

    The tables are written completely after each epoch. Use as a context manager, which closes the events file.

    Args:
        folder: of this run alone; empty, or that of the run to continue.
        config: the options of the run; they and the environment are written to config.json, unless it exists.
        tensor_names: names of `model.trainable_variables`, in their order.

    Attributes:
        checkpoints: of this run.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensor_names: Sequence[str]) -> None:
        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._events: EventsWriter | None = None
        if not (folder / CONFIG).exists():
            write_json(folder / CONFIG, {**config, "environment": environment()})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._events is not None:
            with contextlib.nullcontext() if exception[0] is None else contextlib.suppress(UserError):
                self._events.close()

    def start(self, history: History, events: dict[str, int] | None = None) -> None:
        """Start recording, from a checkpoint's `history` and `flushed_events` if there is one.

        What was recorded after that checkpoint is deleted, since it is recorded again.
        """
        from elastic_trainer.runs.tensorboard import EventsWriter

        self._history = history
        self._events = EventsWriter(self.folder, history, events)
        if events is not None:
            write_tables(self.folder, history, self._names)

    @property
    def _writer(self) -> EventsWriter:
        """TensorBoard's events, once recording has started."""
        assert self._events is not None, "start comes first"
        return self._events

    def flushed_events(self) -> dict[str, int]:
        """Have all events up to now on the disk; returns the size in bytes of each of their files."""
        return self._writer.flushed()

    def end_interval(self) -> None:
        """To be called before a new selection is recorded: what was trained so far belongs to the budget so far."""
        self._writer.end_point()

    def record_selection(self) -> None:
        """Record the latest selection of the history."""
        self._writer.add_selection(self._history.selection)

    def record_step(self) -> None:
        """Record the latest training step of the history."""
        self._writer.add_step(self._history.results[-1])

    def record_epoch(self) -> None:
        """Record the latest epoch of the history."""
        self._writer.add_epoch(self._history.epochs[-1])
        write_tables(self.folder, self._history, self._names)
        self._writer.flush()

    def save_model(self, model: keras.Model, best: bool) -> None:
        """Keep `model` as last.keras, and as best.keras if it is the best so far."""
        from elastic_trainer.networks.saved_model import save_model

        for name in (LAST_MODEL, BEST_MODEL) if best else (LAST_MODEL,):
            with atomic_path(self.folder / name) as temporary:
                save_model(model, temporary)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the run's options and its `results`, delete the checkpoints; returns the summary."""
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        summary = {**{key: self._config.get(key) for key in keys}, **results}
        self._writer.finish()
        write_json(self.folder / SUMMARY, summary)
        self.checkpoints.clear()
        return summary
