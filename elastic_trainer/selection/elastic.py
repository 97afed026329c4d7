"""Elastic training: the paper's method. `ElasticScheme.select` is all of it on one page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elastic_trainer.datasets.batches import Batch, part_rows
from elastic_trainer.engine.memory import MemoryBudget, variables_mb
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import Task
from elastic_trainer.selection.budget import (
    CORRECTED_AFTER,
    GRADIENT_PASSES,
    Progress,
    RhoBudget,
    feature_misses,
    first_misses,
    gradient_pass_steps,
)
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.schedule import Schedule, Turns
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.selection.select import Plan, Selection, keep_if_close, select_tensors
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table import TimingTable

# Copies of all weights while importance is measured, beside a step: sums of gradients, updates, what is restored.
MEASURED_WEIGHTS = 3


class ElasticScheme(Scheme):
    """The most important tensors that fit into the time budget, measured again every `settings.interval` epochs.

    A subclass may override `keep`, the rule by which the current selection stays, and `plan`, when selections are due.

    Args:
        context: with a timing table.
        importance: makes the Tensor Importance Evaluator, from the task and the batch size.
        select: the Tensor Selector, with the arguments of `select_tensors`.

    Attributes:
        budget: what a selection may cost.

    Raises:
        UserError: even training the head alone takes more than `settings.rho`.
    """

    def __init__(
        self,
        context: SchemeContext,
        importance: Callable[[Task, int | None], ImportanceEvaluator] = ImportanceEvaluator,
        select: Callable[..., Plan] = select_tensors,
    ) -> None:
        task, data, settings, table = context
        assert table is not None, "elastic training needs a timing table"
        self.budget = RhoBudget(table, task.head, settings.rho, first_misses(data, settings))
        self.data, self.settings, self.head, self._digest = data, settings, task.head, table.digest()
        self._weights_mb = variables_mb(task.model.trainable_variables)
        self._evaluator, self._select_tensors = importance(task, data.batch_size), select
        self._rows, self._has_new_table = part_rows(data.full_batch, settings.micro_batch), False
        if self._rows < data.full_batch:
            self._evaluator.set_micro_batch(self._rows)
        self._max_depth, self._measuring_mb = len(self.table.names), 0.0
        self._passes_fit = self._measures_speed = True
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
            batches = self.data.importance_batches(self._turns.due[progress.step], self.settings.importance_batches)
            importance = self._evaluator.importance(state.optimizer, batches)
            # The budget (section 3.3): ρ·T_full. `RhoBudget.allow` corrects it by how slow the device is now, and by
            # how long the latest steps took.
            budget = self.budget.allow(self._with_speed(progress, batches[0]))
        while True:
            with _timed(seconds, "solve"):
                # The solver (section 6): `select_tensors` puts the problem to `selection_solver_DP.solve`.
                steps = self._turns.steps(progress.step)
                misses = feature_misses(self.data, steps) if progress.features_possible else 1.0
                best = self._select_tensors(
                    self.table, importance, self.head, budget.table_rho, misses, self._max_depth
                )
                plan = self.keep(best, progress)
            with _timed(seconds, "trace"):
                # The compiled step: it watches these tensors only, so TensorFlow leaves out every gradient operation
                # that none of them needs.
                state.adopt(plan.mask, plan.uses_features)
            if not plan.uses_features or state.features.split is not None:
                break
            # Beyond the paper: cached features were counted on, and are not possible.
            progress = progress._replace(features_possible=False, feature_steps=0)
        selection = self.budget.adopt(plan, self._measures_speed or not self.table.is_estimate)
        selection.epoch, selection.seconds = progress.step / progress.steps_per_epoch, seconds
        if self._measuring_mb:
            selection.memory_mb = state.memory.needed_mb(self._measuring_mb)
        return selection

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

        def head_mb(batch_size: int, micro_batch: int) -> float:
            return float(found.needed_mb(batch_size, micro_batch)[depth - 1])

        def pass_mb(rows: int) -> float:
            return float(found.needed_mb(rows)[-1]) + MEASURED_WEIGHTS * self._weights_mb

        if not memory.fits(head_mb(size, self._rows)):
            raise memory.refuse("training the head alone", head_mb, size, self._rows, can_split)
        self._max_depth = max(memory.deepest(found.needed_mb(size, self._rows)), depth)
        reads_gradients = self._evaluator.reads_gradients
        if not (self._measures_speed or reads_gradients):
            return
        # Gradients of all tensors are taken in parts that fit, or not at all.
        fitting = memory.fitting_size(pass_mb, self._rows)
        rows = part_rows(self._rows, fitting) if fitting else 0
        if rows < self._rows:  # such a pass does not say how fast the device is
            self._passes_fit = self._measures_speed = False
            self.pass_steps = set()
            if not reads_gradients:
                return
            if not rows:
                others = ["--train_type elastic_training_upper_part, which measures none"]
                what = "measuring importance, even with one image at a time,"
                raise memory.refuse(what, lambda *_: pass_mb(1), size, others=others)
            self._evaluator.set_micro_batch(rows)
        self._measuring_mb = pass_mb(rows)

    def keep(self, best: Plan, progress: Progress) -> Plan:
        """`best`, or the plan of what trains now, if it is to stay: it is about as good, and fits into memory.

        Another one has to be compiled.
        """
        current = progress.mask
        if current is None or self.table.depth(current) > self._max_depth:
            return best
        misses, steps = 1.0, self._turns.steps(progress.step)
        if progress.features_possible:
            misses = feature_misses(self.data, steps, progress.feature_steps)
        seconds = (progress.selection_seconds or 0.0) / self.budget.slowdown
        changing_ms = 1e3 * seconds / (progress.total_steps - progress.step)
        return keep_if_close(self.table, best, current, misses, changing_ms)

    def plan(self, schedule: Schedule) -> None:
        settings = self.settings
        self._turns = Turns(schedule, settings.interval)
        # Gradient passes must be compiled. That pays where a rho was asked for, and later selections use what they
        # measure.
        is_corrected = self.table.is_estimate and (settings.rho or 1) < 1
        is_used = len(self._turns.due) > 1 or self._evaluator.reads_gradients or is_corrected
        is_asked = settings.rho is not None and not settings.deterministic
        self._measures_speed = self._passes_fit and is_asked and is_used
        if self._measures_speed and is_corrected:
            for step in CORRECTED_AFTER:
                if 2 * step <= self._turns.steps(0):
                    self._turns.add(step)
        self.due = self._turns.due
        ends = sorted({*self.due, schedule.total_steps})
        self.pass_steps = gradient_pass_steps(ends) if self._measures_speed else set[int]()

    def follow(self, table: TimingTable, step: int) -> None:
        """Go by another table of the same network from `step` on, before which it selects."""
        self.budget.follow(table, self.head)
        self._digest = table.digest()
        self._turns.add(step)

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

    def _with_speed(self, progress: Progress, batch: Batch) -> Progress:
        """`progress` with gradient passes on `batch` if none were measured, or without any if speed is not measured."""
        if not self._measures_speed:
            return progress._replace(step_ms=())
        if progress.slowdowns and not self._has_new_table:
            return progress
        self._has_new_table = False
        return progress._replace(slowdowns=[self.slowdown(batch) for _ in range(GRADIENT_PASSES[0])])


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add what this block takes to `seconds[part]`."""
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start
