"""Listeners of a run: the hooks of `keras.callbacks.Callback`, two more around each selection, and one by the clock.

A Keras callback is a listener, too. It lacks these hooks and does not get the trainer.
"""

from __future__ import annotations

from typing import Any

import keras


class Listener(keras.callbacks.Callback):
    """Does nothing at any hook. When a hook is called, the trainer's history already contains the event.

    Attributes:
        trainer: the `Trainer` that it listens to.
    """

    trainer: Any  # a type would be an import in a circle

    def set_trainer(self, trainer: Any) -> None:
        """Called once, before `on_train_begin`."""
        self.trainer = trainer

    def on_tick(self) -> None:
        """After a step, at most ten times a second, and after the last step of an epoch."""

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """A selection is due before step `step`, counted from 0. The history does not contain it yet."""

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """From step `step` on, `trainer.history.selection` is trained."""


def logs_of(row: dict[str, Any]) -> dict[str, Any]:
    """The results in a row of metrics.csv, under Keras' names."""
    names = [name.removeprefix("test_") for name in row if name.startswith("test_")]
    tested = {f"val_{name}": row[f"test_{name}"] for name in names if row[f"test_{name}"] is not None}
    return {**{name: row[f"train_{name}"] for name in names}, **tested, "learning_rate": row["learning_rate"]}
