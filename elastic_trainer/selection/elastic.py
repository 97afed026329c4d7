"""Elastic training: the paper's method. `ElasticScheme.select` is all of it on one page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from elastic_trainer.datasets.batches import Batch, ShuffledData, part_rows
from elastic_trainer.engine.memory import MemoryBudget, variables_mb
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import Task
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.budget import (
    CORRECTED_AFTER,
    GRADIENT_PASSES,
    Progress,
    RhoBudget,
    feature_misses,
    first_misses,
    gradient_pass_steps,
)
from elastic_trainer.selection.importance import ImportanceEvaluator, NoImportance
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.selection.select import Plan, Selection, keep_if_close, select_tensors
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table import TimingTable

# Copies of all weights while importance is measured, beside a step: sums of gradients, updates, what is restored.
MEASURED_WEIGHTS = 3


class ElasticScheme(Scheme):
    """The most important tensors that fit into the time budget, measured again every `settings.interval` epochs.

    A subclass may override `keep`, the rule by which the current selection stays, and `plan`, when selections are due.

    Args:
        task, data, settings: of the run.
        budget: what a selection may cost, see `make_budget`.
        importance: makes the Tensor Importance Evaluator, from the task and the batch size.
        select: the Tensor Selector, with the arguments of `select_tensors`.
    """

    def __init__(
        self,
        task: Task,
        data: ShuffledData,
        settings: Settings,
        budget: RhoBudget,
        importance: Callable[[Task, int | None], ImportanceEvaluator] = ImportanceEvaluator,
        select: Callable[..., Plan] = select_tensors,
    ) -> None:
        self.data, self.settings, self.budget, self._digest = data, settings, budget, budget.table.digest()
        self.head, self._weights_mb = task.head, variables_mb(task.model.trainable_variables)
        self._evaluator, self._select_tensors = importance(task, data.batch_size), select
        self._rows, self._has_new_table = part_rows(data.full_batch, settings.micro_batch), False
        if self._rows < data.full_batch:
            self._evaluator.set_micro_batch(self._rows)
        self._max_depth, self._measuring_mb, self._passes_fit = len(self.table.names), 0.0, True
        self.plan(Schedule.of(settings, data.steps_per_epoch))

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """The paper on one page: which tensors train from this step on, and the step that trains them.

        It looks for the mask M that maximises M·I subject to T_forward + M·t_dw + f(M)·t_dy <= ρ·T_full (section 3.3),
        where f(M) marks all tensors from the output down to the deepest selected one. The times t are those of the
        timing table (`timing.profiling`; section 5).
        """
        seconds = dict.fromkeys(("importance", "solve", "trace"), 0.0)
        with _timed(seconds, "importance"):
            # Importance (section 4): I_k = -Σ g_i·Δw_i over the weights i of tensor k, of the update Δw that the
            # optimizer would make, and the gradient g after it.
            batches = self.data.importance_batches(self.due[progress.step], self.settings.importance_batches)
            importance = self._evaluator.importance(state.optimizer, batches)
            # The budget (section 3.3): ρ·T_full. `RhoBudget.allow` corrects it by how slow the device is now, and by
            # how long the latest steps took.
            budget = self.budget.allow(self._with_speed(progress, batches[0]))
        while True:
            with _timed(seconds, "solve"):
                # The solver (section 6): `select_tensors` puts the problem to `selection_solver_DP.solve`.
                args = self.table, importance, self.head, budget.table_rho, self._misses(progress)
                plan = self._kept(self._select_tensors(*args, self._max_depth), progress)
            with _timed(seconds, "trace"):
                # The compiled step: it watches these tensors only, so TensorFlow leaves out every gradient operation
                # that none of them needs.
                state.adopt(plan.mask, plan.uses_features)
            if not plan.uses_features or state.features.split is not None:
                break
            # Beyond the paper: cached features were counted on, and are not possible.
            progress = progress._replace(features_possible=False, feature_steps=0)
        self.budget.adopt(plan)
        return self._selection(plan, progress, seconds, state)

    @property
    def table(self) -> TimingTable:
        """The timing table, as the budget knows it by now."""
        return self.budget.table

    def limit(self, memory: MemoryBudget, can_split: bool) -> None:
        found, size, depth = self.table.memory, self.data.full_batch, self.table.depth(self.head)
        if found is None:
            if memory.has_limit:
                raise UserError(
                    "--memory: the timing table does not contain what tensors cost in memory; profile again"
                )
            return
        needed_mb = found.needed_mb(size, self._rows)
        if not memory.fits(needed_mb[depth - 1]):

            def head_mb(batch_size: int, micro_batch: int) -> float:
                return float(found.needed_mb(batch_size, micro_batch)[depth - 1])

            raise memory.refuse("training the head alone", head_mb, size, self._rows, can_split)
        self._max_depth = max(memory.deepest(needed_mb), depth)
        if self._measures_speed or self._evaluator.reads_gradients:
            weights_mb = MEASURED_WEIGHTS * self._weights_mb
            self._limit_passes(memory, lambda rows: float(found.needed_mb(rows)[-1]) + weights_mb)

    def _limit_passes(self, memory: MemoryBudget, needed: Callable[[int], float]) -> None:
        """Take gradients of all tensors, which take `needed` MB on so many rows, in parts that fit, or none at all."""
        fitting = memory.fitting_size(needed, self._rows)
        rows = part_rows(self._rows, fitting) if fitting else 0
        if rows < self._rows:  # such a pass does not say how fast the device is
            self._passes_fit = self._measures_speed = False
            self.pass_steps = set()
            if not self._evaluator.reads_gradients:
                return
            if not rows:
                others = ["--train_type elastic_training_upper_part, which measures none"]
                what = "measuring importance, even with one image at a time,"
                raise memory.refuse(what, lambda *_: needed(1), self.data.full_batch, others=others)
            self._evaluator.set_micro_batch(rows)
        self._measuring_mb = needed(rows)

    def keep(self, best: Plan, current: np.ndarray, progress: Progress) -> Plan:
        """`best`, or the plan of bool [N] `current`, which trains now and fits into memory, if it is to stay.

        By default it stays if it is about as good, since another one has to be compiled.
        """
        misses, steps = 1.0, self._steps(progress)
        if progress.features_possible:
            misses = feature_misses(self.data, steps, progress.feature_steps)
        seconds = (progress.selection_seconds or 0.0) / self.budget.slowdown
        changing_ms = 1e3 * seconds / (progress.total_steps - progress.step)
        return keep_if_close(self.table, best, current, misses, changing_ms)

    def plan(self, schedule: Schedule) -> None:
        settings = self.settings
        steps = [0] if settings.interval is None else schedule.selection_steps(settings.interval)
        self.due: dict[int, int] = {step: index for index, step in enumerate(steps)}
        self._ends, all_ends = [*steps, schedule.total_steps], {*steps, schedule.total_steps}
        # Gradient passes must be compiled. That pays where a rho was asked for, and later selections use what they
        # measure.
        is_corrected = self.table.is_estimate and (settings.rho or 1) < 1
        is_used = len(steps) > 1 or self._evaluator.reads_gradients or is_corrected
        is_asked = settings.rho is not None and not settings.deterministic
        self._measures_speed = self._passes_fit and is_asked and is_used
        if self._measures_speed and is_corrected:
            for step in CORRECTED_AFTER:
                if 2 * step <= self._ends[1]:
                    self._select_before(step)
            all_ends |= {*self.due}
        self.pass_steps = gradient_pass_steps(sorted(all_ends)) if self._measures_speed else set[int]()

    def _select_before(self, step: int) -> None:
        """Select before `step`, too, with what is due for the steps until then."""
        if step < self._ends[-1]:
            self.due.setdefault(step, max(index for start, index in self.due.items() if start <= step))

    def follow(self, table: TimingTable, step: int) -> None:
        """Go by another table of the same network from `step` on, before which it selects."""
        self.budget.follow(table, self.head)
        self._digest = table.digest()
        self._select_before(step)

    def slowdown(self, batch: Batch) -> float:
        return self._evaluator.pass_ms(batch) / self.table.gradient_pass_ms

    def to_record(self) -> dict[str, Any]:
        return {"table": self._digest, "budget": self.budget.to_record()}

    def resume(self, record: dict[str, Any], selection: Selection | None, state: TrainState) -> None:
        if record["table"] != self._digest:
            print("the timing table has changed since the checkpoint: selections from now on follow the new one")
            self._has_new_table = True  # slowdowns until then were relative to the old one
        if selection is not None:
            self.budget.resume(record["budget"])

    def _steps(self, progress: Progress) -> int:
        """How many steps train what is selected now."""
        return self._ends[self.due[progress.step] + 1] - progress.step

    def _with_speed(self, progress: Progress, batch: Batch) -> Progress:
        """`progress` with gradient passes on `batch` if none were measured, or without any if speed is not measured."""
        if not self._measures_speed:
            return progress._replace(step_ms=())
        if progress.slowdowns and not self._has_new_table:
            return progress
        self._has_new_table = False
        return progress._replace(slowdowns=[self.slowdown(batch) for _ in range(GRADIENT_PASSES[0])])

    def _misses(self, progress: Progress) -> float:
        return feature_misses(self.data, self._steps(progress)) if progress.features_possible else 1.0

    def _kept(self, best: Plan, progress: Progress) -> Plan:
        """`best`, or the current selection by `keep`, unless it reaches too deep."""
        current = progress.mask
        if current is None or self.table.depth(current) > self._max_depth:
            return best
        return self.keep(best, current, progress)

    def _selection(self, plan: Plan, progress: Progress, seconds: dict[str, float], state: TrainState) -> Selection:
        """`plan` in wall time, which an estimated table and no gradient pass do not know."""
        budget, knows_time = self.budget, self._measures_speed or not self.table.is_estimate
        return Selection(
            plan.mask,
            plan.importance,
            predicted_step_ms=plan.step_ms * budget.slowdown * budget.correction if knows_time else None,
            budget_step_ms=budget.rho * self.table.full_step_ms * budget.slowdown if knows_time else None,
            uses_features=plan.uses_features,
            epoch=progress.step / progress.steps_per_epoch,
            rho=budget.rho,
            slowdown=budget.slowdown,
            correction=budget.correction,
            memory_mb=state.memory.needed_mb(self._measuring_mb) if self._measuring_mb else None,
            seconds=seconds,
        )


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add what this block takes to `seconds[part]`."""
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start


def make_budget(
    model: keras.Model, data: ShuffledData, settings: Settings, table: TimingTable, head: np.ndarray | None = None
) -> RhoBudget:
    """The time budget that `settings` ask for; `head` as of `smallest_rho`, by default that of the model.

    Raises `UserError` if even training the head alone exceeds it.
    """
    head = head_mask(model) if head is None else head
    return RhoBudget(table, head, settings.rho, first_misses(data, settings))


def elastic_scheme(
    context: SchemeContext,
    importance: Callable[[Task, int | None], ImportanceEvaluator] | None = ImportanceEvaluator,
    select: Callable[..., Plan] | None = None,
) -> Scheme:
    """Elastic training by an importance, or by none, see `ElasticScheme`."""
    task, data, settings, budget = context
    assert budget is not None, "elastic training needs a time budget"
    select = select or select_tensors
    if settings.has_fillers and importance is not None:
        select = partial(select, has_fillers=True)
    return ElasticScheme(task, data, settings, budget, importance or NoImportance, select)
