"""The progress bar of a run, and advice if the loss does not fall."""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm import tqdm

from elastic_trainer.runs.history import History
from elastic_trainer.runs.listener import Listener

BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
MIN_CHANGE = 0.02  # between the mean losses of both halves of an epoch, for a loss that falls or rises
CERTAIN = 1.9  # standard errors
DIVERGED = 10  # times the loss of guessing, which no learning rate that is too low leads to
MIN_LOSSES = 6  # of an epoch; the first few say nothing about the learning rate


class ProgressBar(Listener):
    """Shows epoch, loss, measures, time left, and step time compared with the budget."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = tqdm(disable=True)  # nothing is shown until training starts

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._bar = tqdm(total=1.0, initial=self._done(), bar_format=BAR, dynamic_ncols=True)
        self._title, self._is_advised = self._epoch_title(), False
        self._losses = [result.loss for result in self.trainer.history.results]  # those of an interrupted epoch

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._title, self._losses = self._epoch_title(), []
        self._bar.set_description(self._title, refresh=False)

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._bar.set_description(f"{self._title}, selecting")

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._bar.set_description(self._title, refresh=False)

    def on_tick(self) -> None:
        self._losses += [result.loss for result in self.trainer.history.results[len(self._losses) :]]
        if self._bar.update(max(self._done() - self._bar.n, 0.0)):  # redrawn at most ten times a second
            self._bar.set_postfix_str(progress_text(self.trainer.history), refresh=False)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._bar.set_description(f"{self._title}, validating")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._bar.set_description(self._title, refresh=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        trainer = self.trainer
        advice = None if trainer.training.model.losses else self._advice()  # a model's regularisers count in the loss
        if advice and not self._is_advised:
            self._is_advised = True
            tqdm.write(f"epoch {epoch + 1}: {advice}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        self._bar.close()

    def _done(self) -> float:
        """The share of the run, by steps or by its deadline."""
        trainer = self.trainer
        done: float = trainer.history.step / trainer.schedule.total_steps
        return done if trainer.deadline is None else max(done, trainer.deadline.share)

    def _epoch_title(self) -> str:
        if self.trainer.deadline is not None:  # how many there will be is not known
            return f"epoch {len(self.trainer.history.epochs) + 1}"
        return f"epoch {len(self.trainer.history.epochs) + 1}/{self.trainer.schedule.epochs}"

    def _advice(self) -> str | None:
        """What to change if the loss in the second half of an epoch was no better than chance; None if it was."""
        guessing_loss, settings = self.trainer.data.guessing_loss, self.trainer.settings
        if guessing_loss is None or len(self._losses) < MIN_LOSSES:
            return None
        first, second = np.array_split(self._losses, 2)
        earlier, loss = float(first.mean()), float(second.mean())
        if loss <= guessing_loss:
            return None
        # How often a later loss is above an earlier one: the size of a loss that diverges says nothing on its noise.
        above = (second[:, None] > first).mean() + 0.5 * (second[:, None] == first).mean() - 0.5
        noise = np.sqrt((len(self._losses) + 1) / (12 * len(first) * len(second)))
        is_certain = abs(above) >= CERTAIN * noise and abs(loss - earlier) > MIN_CHANGE * earlier
        advice = "it does not change, so --learning_rate may be too low or too high: try ten times more, and less"
        if is_certain and above < 0:
            advice = "it is falling: train longer, or raise --learning_rate"
        elif is_certain or loss > DIVERGED * guessing_loss:
            can_warm_up = settings.optimizer == "sgd" and not settings.warmup
            warmup = ", or raise it gradually with --preset photos" if can_warm_up else ""
            advice = f"it {'is rising' if is_certain else 'has diverged'}: lower --learning_rate{warmup}"
        return f"the training loss is {loss:.2f}; class frequencies alone give {guessing_loss:.2f}; {advice}"


def progress_text(history: History) -> str:
    """Means of the last 20 steps, the latest validation, and the step time compared with the budget."""
    recent = history.results[-20:]
    step_ms = [result.step_ms for result in recent if result.step_ms is not None]
    means = {"loss": float(np.mean([result.loss for result in recent]))}
    means |= {name: float(np.mean([result.measures[name] for result in recent])) for name in recent[-1].measures}
    text = ", ".join(f"{name} {_shown(name, value)}" for name, value in means.items())
    for row in history.validated[-1:]:
        name = "accuracy" if "test_accuracy" in row else "loss"
        text += f"; validation {name} {_shown(name, row[f'test_{name}'])}"
    if step_ms:
        budget_ms = history.selection.budget_step_ms
        text += f", step {np.median(step_ms):.0f}{f' of {budget_ms:.0f}' if budget_ms else ''} ms"
    return text


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.3g}"
