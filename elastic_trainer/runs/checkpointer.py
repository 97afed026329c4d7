"""Saves checkpoints, the last model and the best one while a run trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from elastic_trainer.engine.closed_form_head import closed_form_head
from elastic_trainer.networks.tensors import restored
from elastic_trainer.runs.listener import Listener

if TYPE_CHECKING:
    from elastic_trainer.runs.run_log import RunLog
    from elastic_trainer.runs.trainer import Trainer


class Checkpointer(Listener):
    """Saves a checkpoint every `Settings.checkpoint_minutes`, and with `Settings.save_model` the models.

    Everything is saved in the folder of `run`, which listens before this does.
    """

    def __init__(self, run: RunLog) -> None:
        super().__init__()
        self._run, self._last = run, time.monotonic()

    def restore(self, trainer: Trainer) -> None:
        """Load the newest checkpoint into `trainer`, if there is one."""
        state = self._run.checkpoints.latest()
        if state is None:
            if self._run.is_continued:
                again = ", and its --deadline counts from now" if trainer.settings.deadline is not None else ""
                print(f"--resume: {self._run.folder} has no checkpoint yet; the run starts again{again}")
            return
        trainer.load(state)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Save the model that training starts from, so that there is one, and best.keras is never a worse one.

        With a deadline, it is tested in any case: that says how long a validation takes here.
        """
        trainer = self.trainer
        wants = trainer.settings.save_model or trainer.settings.deadline is not None
        if wants and trainer.history.step == 0 and trainer.history.start is None and trainer.schedule.total_steps > 1:
            self._save_start()
        self._last = time.monotonic()

    def _save_start(self) -> None:
        trainer, history, start = self.trainer, self.trainer.history, time.perf_counter()
        saves = trainer.settings.save_model
        found = None
        if trainer.settings.starts_with_head and saves:
            found = closed_form_head(trainer.task, trainer.data, trainer.training.memory.left_mb)
        trained = [found.layer.kernel, found.layer.bias] if found else []
        with restored(trained):
            if found and found.accuracy > found.accuracy_before:
                found.assign()
                history.starts_with_head = True
            fitted = time.perf_counter()
            history.start = trainer.evaluate()
            validated = time.perf_counter()
            if saves:
                self._save_model(trainer.task.score.of(history.start))
        saved = time.perf_counter()
        history.first_model_seconds = fitted - start + saved - validated
        history.validation_seconds.append(saved - fitted)

    def on_tick(self) -> None:
        self._save_if_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        history = self.trainer.history
        saves = self.trainer.settings.save_model and history.is_validated
        if saves and self._save_model(self.trainer.task.score.of(history.epochs[-1], "test_")):
            self.save()  # or a resumed run could repeat the epoch that best.keras is from
        else:
            self._save_if_due()

    def save(self) -> None:
        """Save a checkpoint now. Raises `UserError` if a weight is not finite: the last good checkpoint must stay."""
        history = self.trainer.history
        with history.clocks.paused("training"):
            self._run.events.end_point()
            self._run.checkpoints.save(history.step, self.trainer.state())
        self._last = time.monotonic()

    def _save_if_due(self) -> None:
        if time.monotonic() - self._last >= 60 * self.trainer.settings.checkpoint_minutes:
            self.save()

    def _save_model(self, score: float) -> bool:
        """Save the model; whether it is the best so far."""
        from elastic_trainer.networks.saved_model import save_last_and_best

        history = self.trainer.history
        is_best = save_last_and_best(self.trainer.training.model, self._run.folder, score, history.saved_score)
        history.saved_score = score if is_best else history.saved_score
        return is_best
