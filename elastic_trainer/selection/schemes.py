"""The schemes: which tensors train, and when that changes (paper sections 3 and 4).

    FixedScheme        the same tensors from start to end
    ClosedFormScheme   the head, without gradients
    ElasticScheme      what the Tensor Selector picks within the time budget, again every few epochs (`elastic.py`)

PruneTrain's scheme is in pruning/. `elastic_trainer.selection.named.SCHEMES` names them all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, ShuffledData
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import Task
from elastic_trainer.selection.budget import Progress
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Selection
from elastic_trainer.settings import Settings
from elastic_trainer.system.memory_budget import MemoryBudget
from elastic_trainer.timing.table import TimingTable


class SchemeContext(NamedTuple):
    """What a scheme is made from."""

    task: Task
    data: ShuffledData
    settings: Settings
    table: TimingTable | None = None  # of an elastic scheme


class Scheme:
    """What a run trains: which tensors from which step on, in which network, with what added to the loss.

    The training loop asks. A scheme never steps, times, records or saves. Only `select` must be defined.
    """

    due: Collection[int] = (0,)  # steps, counted from 0, before which it selects
    pass_steps: Collection[int] = ()  # counted from 1, after which it asks for the device's slowdown

    def settings_for(self, settings: Settings) -> Settings:
        """The settings of a run under this scheme, given those that were asked for."""
        return settings

    def limit(self, memory: MemoryBudget, can_split: bool) -> None:
        """Stay within `memory` in all selections; `can_split`: a batch can be taken in (smaller) parts.

        Raises:
            UserError: the least that it can train takes more, or measuring what to train.
        """

    def plan(self, schedule: Schedule) -> None:
        """Follow another schedule from now on: an epoch turned out to have another number of steps."""

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """The selection that is valid from the next step on. It may first replace the network in `state`."""
        raise NotImplementedError

    def adopt(self, selection: Selection, state: TrainState, uses_features: bool) -> None:
        """Let `state` train `selection` from now on, if it does not yet."""
        state.adopt(selection.mask, uses_features)

    def slowdown(self, batch: Batch) -> float:
        """The device's slowdown now, measured on the last batch."""
        raise NotImplementedError

    def penalty(self, model: keras.Model) -> tf.Tensor | None:
        """What is added to the loss within the step, besides the model's own regularisers, or None."""
        return None

    def to_record(self) -> dict[str, Any]:
        """What a checkpoint must keep of the scheme, besides the selection, in JSON's types."""
        return {}

    def resume(self, record: dict[str, Any], selection: Selection | None, state: TrainState) -> None:
        """Continue from what a checkpoint kept and its selection, if any; `state` gets the network of its weights."""


class FixedScheme(Scheme):
    """The same tensors from start to end: bool [N] `mask` over `model.trainable_variables`."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def select(self, progress: Progress, state: TrainState) -> Selection:
        return Selection(self._mask)


class ClosedFormScheme(FixedScheme):
    """The head alone, in one step that solves for it by all training examples: see `engine.closed_form_head`."""

    def __init__(self, context: SchemeContext) -> None:
        super().__init__(context.task.head)
        self._data = context.data

    def settings_for(self, settings: Settings) -> Settings:
        return replace(settings, num_epochs=1, max_steps=1, average_head=False)

    def adopt(self, selection: Selection, state: TrainState, uses_features: bool) -> None:
        from elastic_trainer.engine.closed_form_head import ClosedFormStep

        state.train_by(ClosedFormStep(state.task, self._data))
