"""What watches a run: the hooks of `keras.callbacks.Callback`, and two more around each selection.

A callback of Keras is a listener, too. It lacks the hooks of selections and does not get the trainer.
"""

from __future__ import annotations

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
