"""The schemes: which tensors train, and when that changes (paper sections 3 and 4).

    FixedScheme     the same tensors from start to end
    ElasticScheme   what the Tensor Selector picks within the time budget, again every few epochs

PruneTrain's scheme is in extensions/pruning/. `registry.SCHEMES` names them all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, ShuffledData, part_rows
from elastic_trainer.memory.step_memory import MemoryPeaks
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.registry import IMPORTANCES, SCHEMES
from elastic_trainer.selection.budget import (
    GRADIENT_PASSES,
    Allowance,
    Progress,
    TimeBudget,
    feature_misses,
    gradient_pass_steps,
)
from elastic_trainer.selection.importance import ImportanceEvaluator, NoImportance
from elastic_trainer.selection.memory_budget import feature_batches, fitting_rows, selection_room_mb
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Plan, Selection, keep_if_close, plan_of, select_tensors, step_budget_ms
from elastic_trainer.settings import Settings
from elastic_trainer.task import Task
from elastic_trainer.training.state import TrainState


class SchemeContext(NamedTuple):
    """What a scheme is made from.

    Attributes:
        budget: of an elastic scheme (`make_budget`); None for the others.
    """

    task: Task
    data: ShuffledData
    settings: Settings
    budget: TimeBudget | None = None


class Scheme:
    """What a run trains: which tensors from which step on, in which network, with what added to the loss.

    The training loop asks. A scheme never steps, times, records or saves. Only `select` must be defined.

    Attributes:
        is_closed_form: its one step gives the head its closed form (`training.closed_form_head`).
        measuring_mb: memory that its selections take to measure, as far as that is known.
        peaks: measured memory of steps, which corrects what is predicted of others; None if there is none.
    """

    is_closed_form = False
    measuring_mb = 0.0
    peaks: MemoryPeaks | None = None

    def is_due(self, step: int) -> bool:
        """Whether to select before step `step`, counted from 0. Default: once, at the start."""
        return step == 0

    def plan(self, schedule: Schedule) -> None:
        """Follow another schedule from now on: an epoch turned out to have another number of steps."""

    def next_selection(self, step: int, total_steps: int) -> int:
        """The first step after `step` before which a selection is due, or `total_steps` if there is none."""
        return next((later for later in range(step + 1, total_steps) if self.is_due(later)), total_steps)

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """The selection that is valid from the next step on. It may first replace the network in `state`."""
        raise NotImplementedError

    def slowdown(self, step: int, batch: Batch) -> float | None:
        """The device's slowdown now, measured on the last batch after `step` steps, or None if not due."""
        return None

    def penalty(self, model: keras.Model) -> tf.Tensor | None:
        """What is added to the loss within the step, besides the model's own regularisers, or None."""
        return None

    def is_out_of_time(self, progress: Progress) -> bool:
        """Whether no time is left for another step and the validation after it."""
        return False

    def fitting_steps(self, progress: Progress) -> int | None:
        """How many steps the run can have in all, as it goes now; None if nothing limits them."""
        return None

    def take_less(self, excess_mb: float) -> bool:
        """Whether `select`, called again, can save so many MB of memory."""
        return False

    def to_record(self) -> dict[str, Any]:
        """What a checkpoint must keep of the scheme, besides the selection, in JSON's types."""
        return {}

    def resume(self, record: dict[str, Any], selection: Selection | None, state: TrainState) -> None:
        """Continue from what a checkpoint kept and its selection, if any; `state` gets the network of its weights."""


class FixedScheme(Scheme):
    """The same tensors from start to end.

    Args:
        mask: bool [N] over `model.trainable_variables`.
        is_closed_form: as in `Scheme`.
    """

    def __init__(self, mask: np.ndarray, is_closed_form: bool = False) -> None:
        self._mask, self.is_closed_form = mask, is_closed_form

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """See `Scheme.select`."""
        return Selection(self._mask)


class _Measured(NamedTuple):
    """What a selection before step `step` is solved for; measuring it took `seconds`.

    bool [N] `current` is the selection until then.
    """

    step: int
    current: np.ndarray | None
    importance: np.ndarray
    allowance: Allowance
    seconds: float


class ElasticScheme(Scheme):
    """The most important tensors that fit into the time budget, measured again every `settings.interval` epochs.

    Args:
        task: what is trained.
        data: gives the batches that importance is measured on.
        settings: of the run.
        budget: what a selection may cost, see `make_budget`.
        importance: makes the Tensor Importance Evaluator, from the network and the batch size.
        select: the Tensor Selector, with the arguments of `select_tensors`.
    """

    def __init__(
        self,
        task: Task,
        data: ShuffledData,
        settings: Settings,
        budget: TimeBudget,
        importance: Callable[[Task, int | None], ImportanceEvaluator] = ImportanceEvaluator,
        select: Callable[..., Plan] = select_tensors,
    ) -> None:
        self._data, self._settings, self._budget = data, settings, budget
        self._head, self.peaks = head_mask(task.model), budget.table.peaks
        self._evaluator, self._select_tensors = importance(task, data.batch_size), select
        if (rows := part_rows(data.full_batch, settings.micro_batch)) < data.full_batch:
            self._evaluator.limit_rows(rows)
        self._rows, self._has_new_table = rows, False
        self._room_mb, self._is_limited, self._trains_head_alone, self._passes_fit = math.inf, False, False, True
        self._measured: _Measured | None = None
        self.plan(Schedule.of(settings, data.steps_per_epoch))

    def plan(self, schedule: Schedule) -> None:
        """See `Scheme.plan`."""
        selections = schedule.selection_steps(self._settings.interval)
        self._steps_per_epoch = schedule.steps_per_epoch
        self._selection_of_step = {step: index for index, step in enumerate(selections)}
        self._ends = [*selections, schedule.total_steps]
        # Gradient passes must be compiled. That pays where later selections use what they measure.
        self._measures_speed = (
            self._passes_fit
            and self._settings.correct_budget
            and (len(selections) > 1 or self._evaluator.reads_gradients)
        )
        self._pass_steps = gradient_pass_steps(self._ends) if self._measures_speed else set[int]()

    def is_due(self, step: int) -> bool:
        """See `Scheme.is_due`."""
        return step in self._selection_of_step

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """Measure importance and speed, correct the budget, and solve.

        Called again before the same step, since features turned out not to be possible, it only solves again: the
        latest steps count once, and none were trained on the selection before.
        """
        if self._measured is None or self._measured.step != progress.step:
            self._measured = self._measure(progress, state)
        allowance, start = self._measured.allowance, time.perf_counter()
        plan = self._plan(self._measured, progress)
        self._budget.adopt(plan)
        return Selection(
            plan.mask,
            plan.importance,
            predicted_step_ms=plan.step_ms * allowance.slowdown * allowance.correction,
            budget_step_ms=allowance.rho * allowance.full_step_ms,
            uses_features=plan.uses_features,
            epoch=progress.step / self._steps_per_epoch,
            rho=allowance.rho,
            slowdown=allowance.slowdown,
            correction=allowance.correction,
            seconds={"importance": self._measured.seconds, "solve": time.perf_counter() - start},
        )

    def _measure(self, progress: Progress, state: TrainState) -> _Measured:
        start = time.perf_counter()
        self._limit_memory(state)
        index, count = self._selection_of_step[progress.step], self._settings.importance_batches
        batches = self._data.importance_batches(index, count)
        importance = self._evaluator(state.optimizer, batches)
        if not self._measures_speed:
            progress = progress._replace(step_ms=())
        elif not progress.slowdowns or self._has_new_table:
            slowdowns = [self._measured_slowdown(batches[0]) for _ in range(GRADIENT_PASSES[0])]
            progress = progress._replace(slowdowns=slowdowns)
            self._has_new_table = False
        allowance = self._budget.allow(progress)
        return _Measured(progress.step, self._budget.mask, importance, allowance, time.perf_counter() - start)

    def _limit_memory(self, state: TrainState) -> None:
        """Keep selections, and the gradients of all tensors, within the memory that the process may take; once.

        Raises:
            UserError: training the head alone takes more, or measuring importance on one example at a time.
        """
        table, memory, size = self._budget.table, state.memory, self._rows * state.parts
        if self._is_limited or memory.total_mb == math.inf or not (memory.has_limit or table.memory):
            return
        self._is_limited = True
        self._room_mb = selection_room_mb(memory, table, self._head, self._rows, state.parts, state.can_split)
        if not (self._measures_speed or self._evaluator.reads_gradients) or table.memory is None:
            return
        rows, self.measuring_mb = fitting_rows(table, self._rows, self._room_mb)
        if rows == self._rows and self.measuring_mb <= self._room_mb:
            return
        self._evaluator.limit_rows(rows)  # a pass over all tensors that measures the device's speed does not fit
        self._passes_fit = self._measures_speed = False
        self._pass_steps = set()
        if not self._evaluator.reads_gradients:
            self.measuring_mb = 0.0
        elif self.measuring_mb > self._room_mb:
            others = ["--train_type elastic_training_upper_part, which measures none"]
            what = "measuring importance, even with one image at a time,"
            raise memory.refuse(what, lambda *_: self.measuring_mb, size, others=others)

    def take_less(self, excess_mb: float) -> bool:
        """See `Scheme.take_less`."""
        table, mask = self._budget.table, self._budget.mask
        if table.memory is None or mask is None or (mask == self._head).all():
            return False
        now_mb, head_mb = min(self._room_mb, table.predict_mb(mask)), table.predict_mb(self._head)
        self._room_mb = now_mb - min(excess_mb, (now_mb - head_mb) / 2)  # the costs of single tensors may be off
        self._trains_head_alone = self._room_mb < head_mb + 1
        return True

    def _plan(self, measured: _Measured, progress: Progress) -> Plan:
        """What to train until the next selection is due."""
        table, resolution, misses = self._budget.table, self._settings.time_resolution, 1.0
        steps = self._ends[self._selection_of_step[progress.step] + 1] - progress.step
        if progress.features_possible:
            misses = feature_misses(self._data, steps)
        table_rho = measured.allowance.table_rho
        if self._trains_head_alone:
            return plan_of(table, self._head, None, step_budget_ms(table, table_rho, 1.0), 1.0)
        limits = {}
        if self._room_mb < math.inf:
            limits = {"room_mb": self._room_mb, "kept_batches": feature_batches(self._data, self._settings)}
        plan = self._select_tensors(table, measured.importance, self._head, table_rho, resolution, misses, **limits)
        if measured.current is None:
            return plan
        if progress.feature_steps:
            misses = feature_misses(self._data, steps, progress.feature_steps)
        seconds = (progress.selection_seconds or 0.0) / measured.allowance.slowdown
        changing_ms = 1e3 * seconds / (progress.total_steps - progress.step)
        if self._room_mb < math.inf and table.predict_mb(measured.current) > self._room_mb:
            return plan  # never more
        return keep_if_close(table, plan, measured.current, misses, changing_ms)

    def slowdown(self, step: int, batch: Batch) -> float | None:
        """See `Scheme.slowdown`."""
        return self._measured_slowdown(batch) if step in self._pass_steps else None

    def _measured_slowdown(self, batch: Batch) -> float:
        return self._evaluator.pass_ms(batch) / self._budget.table.gradient_pass_ms

    def is_out_of_time(self, progress: Progress) -> bool:
        """See `Scheme.is_out_of_time`."""
        return self._budget.is_out_of_time(progress, self.is_due(progress.step))

    def fitting_steps(self, progress: Progress) -> int | None:
        """See `Scheme.fitting_steps`."""
        return self._budget.fitting_steps(progress)

    def to_record(self) -> dict[str, Any]:
        """See `Scheme.to_record`."""
        return {"table": self._budget.table.digest(), "budget": self._budget.to_record()}

    def resume(self, record: dict[str, Any], selection: Selection | None, state: TrainState) -> None:
        """See `Scheme.resume`."""
        self._limit_memory(state)
        if record["table"] != self._budget.table.digest():
            print("the timing table has changed since the checkpoint: selections from now on follow the new one")
            self._has_new_table = True  # slowdowns until then were relative to the old one
        if selection is not None:
            self._budget.resume(record["budget"], selection.mask)


def trainable_mask(train_type: str, model: keras.Model, trained_layers: int) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: all that a scheme may ever train."""
    scheme = SCHEMES[train_type]
    if scheme.mask is None:
        return all_mask(model)
    return scheme.mask(model, trained_layers) if "trained_layers" in scheme.uses else scheme.mask(model)


def fixed_scheme(context: SchemeContext, train_type: str) -> Scheme:
    """The scheme that trains all of its `trainable_mask` from start to end."""
    mask = trainable_mask(train_type, context.task.model, context.settings.trained_layers)
    return FixedScheme(mask, SCHEMES[train_type].is_closed_form)


def elastic_scheme(
    context: SchemeContext, importance: str | None = "gain", select: Callable[..., Plan] = select_tensors
) -> Scheme:
    """Elastic training by an importance of `registry.IMPORTANCES`, or by none, see `ElasticScheme`."""
    task, data, settings, budget = context
    assert budget is not None, "elastic training needs a time budget"
    evaluator = NoImportance if importance is None else IMPORTANCES[importance].make
    return ElasticScheme(task, data, settings, budget, evaluator, select)
