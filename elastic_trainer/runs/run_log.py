"""The files of a run in its folder: config.json, tables, checkpoints and models while it trains, and summary.json.

metrics.csv has a row per epoch, selections.csv a row per tensor of each selection. The row of epoch 0 is the model that
training started from, if it was tested.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.engine.closed_form_head import closed_form_head
from elastic_trainer.networks.tensors import restored
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.listener import Listener
from elastic_trainer.runs.reader import CONFIG, METRICS, SELECTIONS, SUMMARY, is_finished, is_run, read_config
from elastic_trainer.runs.tensorboard import EventsWriter
from elastic_trainer.selection.select import Selection
from elastic_trainer.settings.flags import duration_text
from elastic_trainer.system.errors import START_AGAIN, UserError
from elastic_trainer.system.files import write_csv, write_record
from elastic_trainer.system.machine import environment

if TYPE_CHECKING:
    from elastic_trainer.runs.trainer import Trainer

SELECTION_COLUMNS = (
    *("epoch", "step", "name", "importance", "chosen"),
    *("predicted_step_ms", "budget_step_ms", "measured_step_ms", "rho", "slowdown", "correction"),
)
SCHEDULE = ("num_epochs", "max_steps", "deadline", "from_epoch", "from_step")  # settings that change as a run goes on


class RunLog(Listener):
    """Writes them; a context manager that closes the events file.

    A checkpoint is saved every `Settings.checkpoint_minutes` and at the end, with `Settings.save_model` the models.

    Args:
        folder: of this run alone; empty, or the folder of the run to continue.
        config: the options of the run; they and the environment are written to config.json, unless it exists.
        tensor_names: of `model.trainable_variables`, in their order.

    Attributes:
        events: writes TensorBoard's events; a listener, too, which comes before this.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensor_names: Sequence[str]) -> None:
        super().__init__()
        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self.events, self.checkpoints = EventsWriter(folder), Checkpoints(folder / "checkpoints")
        self._is_new, self._last_save = not is_run(folder), time.monotonic()
        if self._is_new:
            write_record(folder / CONFIG, {**config, "environment": environment()})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.events.close()

    def restore(self, trainer: Trainer) -> None:
        """Load the newest checkpoint into `trainer`, if there is one. A finished run goes on as the settings say."""
        state = self.checkpoints.latest()
        if state is not None:
            trainer.load(state)
        if is_finished(self.folder):
            self._go_on(trainer)
        elif state is None and not self._is_new:
            again = ", and its --deadline counts from now" if trainer.settings.deadline is not None else ""
            print(f"--resume: {self.folder} has no checkpoint yet; the run starts again{again}")

    def _go_on(self, trainer: Trainer) -> None:
        """Record the new schedule of a finished run; from now on, it is an interrupted one."""
        settings = trainer.settings
        if trainer.history.step != settings.from_step:
            raise UserError(f"--resume: {self.folder} has no checkpoint of its end; {START_AGAIN}")
        (self.folder / SUMMARY).unlink()  # first: cut off here, the run ends again as it did
        changed = {name: getattr(settings, name) for name in SCHEDULE}
        write_record(self.folder / CONFIG, {**read_config(self.folder), **changed})
        length = f"of {settings.num_epochs - settings.from_epoch} epochs"
        if settings.deadline is not None:
            length = f"until {duration_text(settings.deadline)} have passed"
        print(f"{self.folder} goes on from epoch {settings.from_epoch} with a new schedule {length}")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Drop what an interrupted run wrote after its checkpoint. Save the model that training starts from, so that
        there is one, and best.keras is never a worse one.

        With a deadline, it is tested in any case: that says how long a validation takes here.
        """
        trainer = self.trainer
        self._write_tables()
        wants = trainer.settings.save_model or trainer.settings.deadline is not None
        if wants and trainer.history.step == 0 and trainer.history.start is None and trainer.schedule.total_steps > 1:
            self._save_start()
        self._last_save = time.monotonic()

    def _save_start(self) -> None:
        trainer, history, training = self.trainer, self.trainer.history, self.trainer.training
        saves, memory, found = trainer.settings.save_model, training.memory, None
        # Selecting first, training keeps the features that are computed here. Late, or where memory has a limit, the
        # model comes first.
        is_late = trainer.deadline is not None and history.clocks.elapsed() > trainer.deadline.seconds / 2
        if not memory.has_limit and not is_late:
            with history.clocks.running("training"):
                trainer.prepare()
        start, features = time.perf_counter(), training.features
        if trainer.settings.starts_with_head:  # what it takes is kept for averaging the head, too
            room_mb, before = memory.left_mb - features.kept_mb, features.seconds
            found = closed_form_head(trainer.task, trainer.data, room_mb, trainer.may_stop, features)
            history.first_feature_seconds = features.seconds - before
        trained = [found.layer.kernel, found.layer.bias] if found else []
        with restored(trained):
            if saves and found and found.accuracy > found.accuracy_before:
                found.assign()
                history.starts_with_head = True
            fitted = time.perf_counter()
            history.start = trainer.evaluate()
            validated = time.perf_counter()
            if saves:
                self._save_model(trainer.task.score.of(history.start))
        saved = time.perf_counter()
        history.first_model_seconds = fitted - start + saved - validated
        history.record_validation(saved - fitted, training.evaluation.made_seconds)

    def on_tick(self) -> None:
        if time.monotonic() - self._last_save >= 60 * self.trainer.settings.checkpoint_minutes:
            self.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        history = self.trainer.history
        self._write_tables()
        saves = self.trainer.settings.save_model and history.is_validated
        if saves and self._save_model(self.trainer.task.score.of(history.epochs[-1], "test_")):
            self.save()  # or a resumed run could repeat the epoch that best.keras is from
        else:
            self.on_tick()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.save()

    def save(self) -> None:
        """Save a checkpoint now. Raises `UserError` if a weight is not finite: the last good checkpoint must stay."""
        history = self.trainer.history
        with history.clocks.paused("training"):
            self.checkpoints.save(history.step, self.trainer.state())
        self._last_save = time.monotonic()

    def _save_model(self, score: float) -> bool:
        """Save the model; whether it is the best so far."""
        from elastic_trainer.networks.saved_model import save_last_and_best

        history = self.trainer.history
        is_best = save_last_and_best(self.trainer.training.model, self.folder, score, history.saved_score)
        history.saved_score = score if is_best else history.saved_score
        return is_best

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
        """Write summary.json, delete all checkpoints but the last, and return what summary.json contains.

        That is options of the run, and `results`: `run_results`, and what else is known once training has ended.
        `summary.update_summary` adds what comes after training.
        """
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        summary = {**{key: self._config.get(key) for key in keys}, **results}
        write_record(self.folder / SUMMARY, summary)
        self.checkpoints.keep_last()
        return summary


def _tensor_rows(selection: Selection, names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    measured = statistics.median(selection.step_ms) if selection.step_ms else None
    budget = (selection.predicted_step_ms, selection.budget_step_ms, measured)
    correction = (selection.rho, selection.slowdown, selection.correction)
    for index, name in enumerate(names):
        importance = None if selection.importance is None else float(selection.importance[index])
        chosen = (name, importance, int(selection.mask[index]))
        yield (f"{selection.epoch:.6g}", selection.step, *chosen, *budget, *correction)
