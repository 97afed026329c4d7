"""Elastic training: the paper's method. `ElasticScheme.select` is all of it on one page."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from elastic_trainer.datasets.batches import Batch
from elastic_trainer.engine.memory import variables_mb
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
    smallest_rho,
)
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.selection.select import Selection, deepest_within, select_tensors
from elastic_trainer.system.memory_budget import MemoryBudget, part_rows
from elastic_trainer.timing.table import StepPrediction, TimingTable

# Copies of all weights while importance is measured, beside a step: sums of gradients, updates, what is restored.
MEASURED_WEIGHTS = 3
UNMEASURED = "--train_type elastic_training_upper_part, which measures none"


class ElasticScheme(Scheme):
    """The most important tensors that fit into the time budget, measured again every `settings.interval` epochs.

    Args:
        context: with a timing table.
        importance: makes the Tensor Importance Evaluator, from the task and the batch size; None: none is measured.
        select: the Tensor Selector, with the arguments of `select_tensors`.

    Attributes:
        budget: what a selection may cost, with the timing table.

    Raises:
        UserError: even training the head alone takes more than `settings.rho`.
    """

    def __init__(
        self,
        context: SchemeContext,
        importance: Callable[[Task, int | None], ImportanceEvaluator] | None = ImportanceEvaluator,
        select: Callable[..., np.ndarray] = select_tensors,
    ) -> None:
        task, data, settings, table = context
        assert table is not None, "elastic training needs a timing table"
        self.budget = RhoBudget(table, task.head, settings.rho, first_misses(data, settings))
        self.data, self.settings, self.head, self._digest = data, settings, task.head, table.digest()
        self._weights_mb, self._measuring_mb = variables_mb(task.model.trainable_variables), 0.0
        # Without importance, its gradient passes still measure the device's speed.
        self._evaluator = (importance or ImportanceEvaluator)(task, data.batch_size)
        self._measures = importance is not None
        self._reads_gradients = self._measures and self._evaluator.reads_gradients
        fillers = {"has_fillers": True} if settings.has_fillers and self._measures else {}
        self._select_tensors, self._max_depth = partial(select, **fillers), len(table.names)
        self._rows, self._passes_fit = part_rows(data.full_batch, settings.micro_batch), True
        if self._rows < data.full_batch:
            self._evaluator.rows = self._rows
        self.plan(Schedule.of(settings, data.steps_per_epoch))

    def select(self, progress: Progress, state: TrainState) -> Selection:
        """The paper on one page: which tensors train from this step on, and the step that trains them.

        It looks for the mask M that maximises M·I subject to T_forward + M·t_dw + f(M)·t_dy <= ρ·T_full (section 3.3),
        where f(M) marks all tensors from the output down to the deepest selected one. The times t are those of the
        timing table (`profiling.profile`; section 5).
        """
        seconds = dict.fromkeys(("importance", "solve", "trace"), 0.0)
        if self.settings.deterministic:
            progress = progress._replace(selection_seconds=None)  # by a clock, which must not decide
        with _timed(seconds, "importance"):
            # Importance (section 4): I_k = -Σ g_i·Δw_i over the weights i of tensor k, of the update Δw that the
            # optimizer would make, and the gradient g after it.
            index = bisect_right(self._ends, progress.step) - 1
            batches = self.data.importance_batches(index, self.settings.importance_batches)
            importance = self._evaluator.importance(state.optimizer, batches) if self._measures else None
            # The budget (section 3.3): ρ·T_full. `RhoBudget.allow` corrects it by how slow the device is now, and by
            # how long the latest steps took.
            budget = self.budget.allow(self._with_speed(progress, batches[0]))
        # Beyond the paper: cached features, if they turn out to be possible.
        for caches in (True, False) if progress.features_possible else (False,):
            progress = progress._replace(features_possible=caches)
            with _timed(seconds, "solve"):
                # The solver (section 6): `select_tensors` puts the problem to `selection_solver_DP.solve`.
                table, rho, misses = budget.table, budget.table_rho, self._misses(progress)
                best = self._select_tensors(table, importance, self.head, rho, misses, self._max_depth)
                mask, prediction = self._kept(best, misses, progress)
            with _timed(seconds, "trace"):
                # The compiled step: it watches these tensors only, so TensorFlow leaves out every gradient operation
                # that none of them needs.
                state.adopt(mask, prediction.uses_features)
            if not prediction.uses_features or state.features.split is not None:
                break
        knows_time = self._measures_speed or not table.is_estimate
        selection = budget.adopt(mask, prediction, importance, knows_time)
        selection.epoch, selection.seconds = progress.step / progress.steps_per_epoch, seconds
        selection.memory_mb = state.memory.needed_mb(self._measuring_mb) if self._measuring_mb else None
        return selection

    def _misses(self, progress: Progress, cached_steps: int = 0) -> float:
        """`misses` of the steps up to the next selection by `interval`, after `cached_steps` on the same features."""
        end = self._ends[bisect_right(self._ends, progress.step)]
        if not progress.features_possible:
            return 1.0
        return feature_misses(self.data, end - progress.step, progress.step, cached_steps)

    def _kept(self, best: np.ndarray, misses: float, progress: Progress) -> tuple[np.ndarray, StepPrediction]:
        """What trains now, if it is to stay, else the mask `best`; and what its steps take.

        The same tensors keep their features. Where no importance counts, others stay that are about as good.
        """
        table, current, found = self.budget.table, progress.mask, self.budget.table.predict(best, misses)
        if current is None or table.depth(current) > self._max_depth:
            return best, found
        present = table.predict(current, self._misses(progress, progress.feature_steps))
        is_free = not (self._measures or best.all())
        stays = (best == current).all() or (is_free and self.budget.is_close(found, present, misses, progress))
        return (current, present) if stays else (best, found)

    def limit(self, memory: MemoryBudget, can_split: bool) -> None:
        needed, size, rows = self.budget.table.memory, self.data.full_batch, self._rows
        if needed is None:
            return

        def pass_mb(rows: int) -> float:
            return float(needed.needed_mb(rows)[-1]) + MEASURED_WEIGHTS * self._weights_mb

        self._max_depth = deepest_within(memory, self.budget.table, self.head, size, rows, can_split)
        # Gradients of all tensors are taken in parts that fit, or not at all. Parts do not say how fast the device is.
        fitting = memory.fitting_size(pass_mb, rows)
        if fitting != rows:
            self._passes_fit, self._measures_speed, self.pass_steps = False, False, ()
            if self._reads_gradients and fitting is None:
                what = "measuring importance, even with one image at a time,"
                raise memory.refuse(what, lambda *_: pass_mb(1), size, others=[UNMEASURED])
            rows = part_rows(rows, fitting)
            self._evaluator.rows = rows
        if self._reads_gradients or self._measures_speed:
            self._measuring_mb = pass_mb(rows)

    def plan(self, schedule: Schedule) -> None:
        settings, starts = self.settings, schedule.selection_steps(self.settings.interval)
        # Gradient passes must be compiled, which pays where a rho was asked for and a later selection uses them.
        is_corrected = self.budget.table.is_estimate and (settings.rho or 1) < 1
        is_used = len(starts) > 1 or self._reads_gradients or is_corrected
        is_asked = settings.rho is not None and not settings.deterministic
        self._measures_speed = self._passes_fit and is_asked and is_used
        self._ends = [*starts, schedule.total_steps]
        corrected = CORRECTED_AFTER if self._measures_speed and is_corrected else ()
        self.due = {*starts, *(step for step in corrected if 2 * step <= self._ends[1])}
        self.pass_steps = gradient_pass_steps(sorted({*self.due, schedule.total_steps})) if self._measures_speed else ()

    def follow(self, table: TimingTable, step: int) -> None:
        """Go by another table of the same network from `step` on, before which it selects."""
        self.budget = RhoBudget(table, self.head, max(self.settings.rho, smallest_rho(table, self.head)))
        self.due = {*self.due, step}

    def slowdown(self, batch: Batch) -> float:
        return self._evaluator.pass_ms(batch) / self.budget.table.gradient_pass_ms

    def to_record(self) -> dict[str, Any]:
        return {"table": self._digest, "budget": self.budget.to_record()}

    def resume(self, record: dict[str, Any], selection: Selection | None, state: TrainState) -> None:
        if record["table"] != self._digest:  # what was measured since is relative to the old one
            print("the timing table has changed since the checkpoint: selections from now on follow the new one")
        elif selection is not None:
            self.budget.resume(record["budget"])

    def _with_speed(self, progress: Progress, batch: Batch) -> Progress:
        """`progress` with gradient passes on `batch` if none were measured by this table, or without any speed."""
        if not self._measures_speed:
            return progress._replace(step_ms=())
        if progress.slowdowns and not self.budget.is_new:
            return progress
        return progress._replace(slowdowns=[self.slowdown(batch) for _ in range(GRADIENT_PASSES[0])])


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add what this block takes to `seconds[part]`."""
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start
