"""The progress bar of a run, and advice if the loss does not fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from elastic_trainer.engine.state import StepResult
from elastic_trainer.runs.history import History, means_of, median_step_ms
from elastic_trainer.runs.listener import Listener

BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
RECENT = 20  # steps whose means are shown
MIN_CHANGE = 0.02  # between the mean losses of both halves of an epoch, for a loss that falls or rises
CHANCE = 0.06  # of a difference that is none, by the Mann-Whitney test
DIVERGED = 10  # times the loss of guessing, which no learning rate that is too low leads to
MIN_LOSSES = 6  # of an epoch; the first few say nothing about the learning rate


class ProgressBar(Listener):
    """Shows epoch, loss, measures, time left, and step time compared with the budget."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = tqdm(disable=True)  # nothing is shown until training starts
        self._results: list[StepResult] = []  # of the epoch
        self._is_advised = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._bar = tqdm(total=1.0, initial=self._done(), bar_format=BAR, dynamic_ncols=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._describe()

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._describe(", selecting")

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._describe()

    def on_tick(self) -> None:
        self._results = self.trainer.history.results
        if self._bar.update(max(self._done() - self._bar.n, 0.0)):  # redrawn at most ten times a second
            self._bar.set_postfix_str(progress_text(self.trainer.history), refresh=False)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._describe(", validating")

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._describe()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        trainer = self.trainer
        if self._is_advised or trainer.training.model.losses:  # a model's regularisers count in the loss
            return
        found = advice([result.loss for result in self._results], trainer.data.guessing_loss)
        if found:
            self._is_advised = True
            tqdm.write(f"epoch {epoch + 1}: {found}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        self._bar.close()

    def _done(self) -> float:
        """The share of the run, by steps or by its deadline."""
        trainer = self.trainer
        done: float = trainer.history.step / trainer.schedule.total_steps
        return done if trainer.deadline is None else max(done, trainer.deadline.share)

    def _describe(self, doing: str = "") -> None:
        """Show the epoch, of how many if that is known, and what is done besides training."""
        trainer = self.trainer
        count = f"/{trainer.schedule.epochs}" if trainer.deadline is None else ""
        self._bar.set_description(f"epoch {len(trainer.history.epochs) + 1}{count}{doing}", refresh=bool(doing))


def advice(losses: Sequence[float], guessing_loss: float | None) -> str | None:
    """What to change if the loss in the second half of an epoch was no better than chance; None if it was."""
    if guessing_loss is None or len(losses) < MIN_LOSSES:
        return None
    halves = np.array_split(losses, 2)
    earlier, loss = (float(half.mean()) for half in halves)
    if loss <= guessing_loss:
        return None
    from scipy.stats import mannwhitneyu  # the import takes a second

    # By ranks: the size of a loss that diverges says nothing on its noise.
    is_certain = abs(loss - earlier) > MIN_CHANGE * earlier and mannwhitneyu(*halves).pvalue < CHANCE
    what = "it does not change, so --learning_rate may be too low or too high: try ten times more, and less"
    if is_certain and loss < earlier:
        what = "it is falling: train longer, or raise --learning_rate"
    elif is_certain or loss > DIVERGED * guessing_loss:
        what = f"it {'is rising' if is_certain else 'has diverged'}: lower --learning_rate"
    return f"the training loss is {loss:.2f}; class frequencies alone give {guessing_loss:.2f}; {what}"


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
