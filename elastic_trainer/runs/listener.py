"""Listeners of a run: the hooks of `keras.callbacks.Callback`, and two more around each selection.

A Keras callback is a listener, too. It lacks the hooks of selections and does not get the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from elastic_trainer.trainer import Trainer


class Listener(keras.callbacks.Callback):
    """Does nothing at any hook. When a hook is called, the trainer's history already contains the event.

    Attributes:
        trainer: the trainer that it listens to.
    """

    trainer: Trainer

    def set_trainer(self, trainer: Trainer) -> None:
        """Called once, before `on_train_begin`."""
        self.trainer = trainer

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """A selection is due before step `step`, counted from 0. The history does not contain it yet."""

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """From step `step` on, `trainer.history.selection` is trained."""


class Listeners:
    """All listeners of a run, in the order in which they are called."""

    def __init__(self, listeners: Iterable[Any]) -> None:
        self._listeners = [*listeners]

    def begin(self, trainer: Trainer) -> None:
        """Pass the trainer and the model to the listeners, and call `on_train_begin`."""
        model, steps = trainer.training.model, trainer.data.steps_per_epoch
        has_callbacks = not all(isinstance(listener, Listener) for listener in self._listeners)
        if has_callbacks and getattr(model, "optimizer", None) is None:
            model.optimizer = trainer.training.optimizer  # Keras callbacks use it
        self.notify("set_params", {"epochs": trainer.schedule.epochs, "steps": steps, "verbose": 0})
        self.notify("set_model", model)
        self.notify("set_trainer", trainer)
        self.notify("on_train_begin")

    def notify(self, hook: str, *values: Any) -> None:
        """Call a hook of every listener that has it."""
        for listener in self._listeners:
            method = getattr(listener, hook, None)
            if method is not None:
                method(*values)
