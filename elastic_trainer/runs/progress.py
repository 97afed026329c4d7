"""The progress bar of a run, and a line if an epoch's loss is no better than chance."""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm import tqdm

from elastic_trainer.engine.state import StepResult
from elastic_trainer.runs.history import RECENT, History, means_of, median_step_ms
from elastic_trainer.runs.listener import Listener

BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
MIN_LOSSES = 6  # of an epoch; the first few say nothing about the learning rate


class ProgressBar(Listener):
    """Shows epoch, loss, measures, time left, and step time compared with the budget."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = tqdm(disable=True)  # nothing is shown until training starts
        self._results: list[StepResult] = []  # of the epoch
        self._is_advised = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._bar = tqdm(total=1.0, initial=self.trainer.share, bar_format=BAR, dynamic_ncols=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._describe()

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._describe(", selecting")

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._describe()

    def on_tick(self) -> None:
        self._results = self.trainer.history.results
        if self._bar.update(max(self.trainer.share - self._bar.n, 0.0)):  # redrawn at most ten times a second
            self._bar.set_postfix_str(progress_text(self.trainer.history), refresh=False)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._describe(", validating")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._describe()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Say once if the loss in the second half of an epoch was above that of guessing."""
        trainer, losses = self.trainer, [result.loss for result in self._results]
        loss, guessing = float(np.mean(losses[len(losses) // 2 :])), trainer.data.guessing_loss
        is_judged = guessing is not None and len(losses) >= MIN_LOSSES and not self._is_advised
        if is_judged and loss > guessing and not trainer.training.model.losses:  # regularisers count in the loss
            self._is_advised = True
            tqdm.write(
                f"epoch {epoch + 1}: the training loss is {loss:.2f}; class frequencies alone give {guessing:.2f}; "
                "train longer if it is falling, else try another --learning_rate"
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        self._bar.close()

    def _describe(self, doing: str = "") -> None:
        """Show the epoch, of how many if that is known, and what is done besides training."""
        trainer = self.trainer
        count = f"/{trainer.schedule.epochs}" if trainer.deadline is None else ""
        self._bar.set_description(f"epoch {len(trainer.history.epochs) + 1}{count}{doing}", refresh=bool(doing))


def progress_text(history: History) -> str:
    """Means of the latest steps, the latest validation, and the step time compared with the budget."""
    recent = history.results[-RECENT:]
    text = ", ".join(f"{name} {_shown(name, value)}" for name, value in means_of(recent).items())
    for row in history.validated[-1:]:
        name = "accuracy" if "test_accuracy" in row else "loss"
        text += f"; validation {name} {_shown(name, row[f'test_{name}'])}"
    step_ms, budget_ms = median_step_ms(recent), history.selection.budget_step_ms
    if step_ms is not None:
        text += f", step {step_ms:.0f}{f' of {budget_ms:.0f}' if budget_ms else ''} ms"
    return text


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.3g}"
