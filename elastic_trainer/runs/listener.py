"""What watches a run: the hooks of `keras.callbacks.Callback`, and two more around each selection.

A callback of Keras is a listener, too. It lacks the hooks of selections and does not get the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from elastic_trainer.trainer import Trainer


class Listener(keras.callbacks.Callback):
    """Does nothing at any hook. A hook is given to it after the trainer's history has what it is about.

    Attributes:
        trainer: that it listens to.
    """

    trainer: Trainer

    def set_trainer(self, trainer: Trainer) -> None:
        """Called once, before `on_train_begin`."""
        self.trainer = trainer

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """A selection is due before step `step`, counted from 0. The history ends with the interval before it."""

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        """`trainer.history.selection` trains from step `step` on."""


class Listeners:
    """All listeners of a run, in the order in which they are called."""

    def __init__(self, listeners: Iterable[Any]) -> None:
        self._listeners = [*listeners]

    def begin(self, trainer: Trainer) -> None:
        """Tell them what they listen to, and that it starts."""
        model, steps = trainer.training.model, trainer.data.steps_per_epoch
        has_callbacks = not all(isinstance(listener, Listener) for listener in self._listeners)
        if has_callbacks and getattr(model, "optimizer", None) is None:
            model.optimizer = trainer.training.optimizer  # Keras' callbacks look for it
        self.notify("set_params", {"epochs": trainer.schedule.epochs, "steps": steps, "verbose": 0})
        self.notify("set_model", model)
        self.notify("set_trainer", trainer)
        self.notify("on_train_begin")

    def notify(self, hook: str, *values: Any) -> None:
        """Call a hook of each listener that has it."""
        for listener in self._listeners:
            method = getattr(listener, hook, None)
            if method is not None:
                method(*values)
