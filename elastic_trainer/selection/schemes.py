"""What a run trains, and when that changes."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.select import select_tensors
from elastic_trainer.selection.selection import Choice
from elastic_trainer.selection.time_budget import PASSES, DeadlineBudget, Progress, RhoBudget, TimeBudget, pass_steps
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.training.state import Network
from utils import UserError


class Scheme:
    """Which tensors train, and when that changes; for some also how, or in what network."""

    def due(self, step: int) -> bool:
        """Whether to choose before step `step`, counted from 0; by default once, at the begin."""
        return step == 0

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        """The choice that holds from the step on that comes."""
        raise NotImplementedError

    def slowdown(self, step: int, images: tf.Tensor, labels: tf.Tensor) -> float | None:
        """Asked after `step` steps, with the last one's batch: the device's slowdown now; None: not measured now."""
        return None

    def penalty(self, model: keras.Model) -> tf.Tensor | None:
        """What is added to the loss within the step, besides the model's own regularisers; None: nothing."""
        return None

    def reconfigured(self, progress: Progress, network: Network) -> Network | None:
        """Another network to go on with, asked for before each choice; None: the same."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of the scheme, fit for JSON, beside the choice."""
        return {}

    def resume(self, state: dict[str, Any], choice: Choice, network: Network) -> Network:
        """Go on from what a checkpoint kept; returns the network that its weights belong to."""
        return network

    def first_test_seconds(self) -> float:
        """What the first test may take, for runs with a deadline."""
        return 0.0


class FixedScheme(Scheme):
    """The same tensors from beginning to end."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        return Choice(self._mask)


class ElasticScheme(Scheme):
    """The most important tensors that fit into the time budget, measured anew every `settings.interval` epochs."""

    def __init__(
        self,
        model: keras.Model,
        data: ImageData,
        settings: Settings,
        budget: TimeBudget,
        importance: type[ImportanceEvaluator] = ImportanceEvaluator,
    ) -> None:
        self._data, self._settings, self._budget = data, settings, budget
        self._head = head_mask(model)
        self._evaluator = importance(model, data.batch_size)
        self._has_new_table = False
        selections = selection_steps(data, settings)
        self._steps = {step: index for index, step in enumerate(selections)}
        self._pass_steps = pass_steps([*selections, run_length(data, settings)[1]]) if settings.correct_budget else ()

    def due(self, step: int) -> bool:
        return step in self._steps

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        batches = self._data.importance_batches(self._steps[progress.step], self._settings.importance_batches)
        importance = self._evaluator(optimizer, batches)
        if not self._settings.correct_budget:
            progress = progress._replace(step_ms=())
        elif not progress.slowdowns or self._has_new_table:
            progress = progress._replace(slowdowns=[self._slowdown(*batches[0]) for _ in range(PASSES[0])])
            self._has_new_table = False
        allowance = self._budget.allow(progress)
        choice = select_tensors(
            self._budget.table, importance, self._head, allowance.table_share, self._settings.time_resolution
        )
        predicted_ms = self._budget.adopt(choice.mask)
        return replace(
            choice,
            epoch=progress.step / self._data.steps_per_epoch,
            predicted_step_ms=predicted_ms * allowance.slowdown * allowance.correction,
            budget_step_ms=allowance.rho * allowance.full_step_ms,
            rho=allowance.rho,
            slowdown=allowance.slowdown,
            correction=allowance.correction,
        )

    def slowdown(self, step: int, images: tf.Tensor, labels: tf.Tensor) -> float | None:
        return self._slowdown(images, labels) if step in self._pass_steps else None

    def _slowdown(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        return self._evaluator.pass_ms(images, labels) / self._budget.table.gradient_pass_ms

    def state(self) -> dict[str, Any]:
        return {"table": self._budget.table.digest()}

    def resume(self, state: dict[str, Any], choice: Choice, network: Network) -> Network:
        if state != self.state():
            print("the timing table was made anew since the checkpoint: selections from now on follow the new one")
            self._has_new_table = True  # and slowdowns until then were held against the old one
        self._budget.resume(choice.mask, choice.rho or 1.0, choice.correction or 1.0)
        return network

    def first_test_seconds(self) -> float:
        return self._budget.first_test_seconds()


def selection_steps(data: ImageData, settings: Settings) -> list[int]:
    """Steps, counted from 0, before which a selection is due: every `settings.interval` epochs.

    Raises:
        UserError: less than a step lies between two of them.
    """
    steps = settings.interval * data.steps_per_epoch
    if steps < 1:
        raise UserError(
            f"--interval {settings.interval:g}: is less than a step; an epoch has {data.steps_per_epoch} steps, so "
            f"give at least {math.ceil(1e4 / data.steps_per_epoch) / 1e4:g}"
        )
    total_steps = run_length(data, settings)[1]
    due = [math.ceil(index * steps - 1e-6) for index in range(math.ceil(total_steps / steps))]
    return [step for step in due if step < total_steps]


def make_budget(model: keras.Model, data: ImageData, settings: Settings, table: TimingTable) -> TimeBudget:
    """The time budget that `settings` ask for. Raises `UserError` where even training the head alone exceeds it."""
    head = head_mask(model)
    selections = selection_steps(data, settings)
    if settings.deadline is None:
        return RhoBudget(table, head, settings.rho)
    epochs, total_steps = run_length(data, settings)
    test_batches = math.ceil(data.test_count / data.batch_size)
    return DeadlineBudget(table, head, settings.deadline, total_steps, epochs, selections, test_batches)


def run_length(data: ImageData, settings: Settings) -> tuple[int, int]:
    """How many epochs, the last perhaps incomplete, and steps a run has."""
    total_steps = min(settings.num_epochs * data.steps_per_epoch, settings.max_steps or sys.maxsize)
    return math.ceil(total_steps / data.steps_per_epoch), total_steps
