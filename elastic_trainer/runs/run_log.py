"""The files that a run writes into its folder while it trains, and its summary."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.errors import UserError
from elastic_trainer.files import write_json
from elastic_trainer.machine import environment
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.listener import Listener
from elastic_trainer.runs.reader import CONFIG, SUMMARY, is_run, read_config
from elastic_trainer.runs.tables import write_tables
from elastic_trainer.runs.tensorboard import EventsWriter


class RunLog(Listener):
    """Writes config.json, metrics.csv, selections.csv and summary.json.

    The tables are written completely after each epoch. Use it as a context manager, which closes the events file.

    Args:
        folder: the folder of this run alone; empty, or that of the run to continue.
        config: the options of the run; they and the environment are written to config.json, unless it exists.
        tensor_names: names of `model.trainable_variables`, in their order.
        reached: seconds after the program's start at which it had done what the keys name.

    Attributes:
        is_continued: whether an earlier process started this run.
        checkpoints: those of this run.
        events: writes TensorBoard's events; a listener, too.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        tensor_names: Sequence[str],
        reached: dict[str, float | None] | None = None,
    ) -> None:
        super().__init__()
        self._reached = {**(reached or {})}
        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self.events = EventsWriter(folder)
        self.is_continued = is_run(folder)
        run_id = read_config(folder).get("run_id") if self.is_continued else secrets.token_hex(8)
        if not self.is_continued:
            write_json(folder / CONFIG, {**config, "run_id": run_id, "environment": environment()})
        self.checkpoints = Checkpoints(folder / "checkpoints", run_id)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.nullcontext() if exception[0] is None else contextlib.suppress(UserError):
            self.events.close()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Drop what an interrupted run wrote after its checkpoint."""
        write_tables(self.folder, self.trainer.history, self._names)
        if self.trainer.history.selections:  # an earlier process did parts of what the clocks have counted
            self._reached["first_step"] = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if "first_step" not in self._reached:
            self._reached["first_step"] = self.trainer.history.clocks.elapsed()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        write_tables(self.folder, self.trainer.history, self._names)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, from the run's options and its `results`, and delete the checkpoints.

        Returns:
            What summary.json contains.
        """
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        reached = {**self._reached, "end": self.trainer.history.clocks.elapsed()}
        summary = {**{key: self._config.get(key) for key in keys}, **results, "seconds_after_start": reached}
        self.events.finish()
        write_json(self.folder / SUMMARY, summary)
        self.checkpoints.clear()
        return summary
