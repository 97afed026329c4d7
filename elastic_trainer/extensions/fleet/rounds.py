"""What a board trains in a round: the upper part of the network of which one pass over its photos fits the deadline.

The pilot of the fleet compared it with selections by importance and with windows (docs/log/fleet.md). Where all tensors
fit, the board trains them all, and passes over its photos as often as the time allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.runs.listener import Listener
from elastic_trainer.selection.importance import NoImportance
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import ElasticScheme, _Measured
from elastic_trainer.selection.select import Plan, plan_of, select_upper_part
from elastic_trainer.selection.time_budget import LATEST_STEPS, Allowance, Progress, TimeBudget
from elastic_trainer.settings import Settings
from elastic_trainer.task import Task
from elastic_trainer.timing.table import TimingTable

KEPT = 1.5  # times longer or shorter than a round, in which a pass with the present selection may be
FEWEST_STEPS, LATEST_ROUNDS = 3, 3  # by which a board knows how fast it is


class RoundOver(Exception):  # noqa: N818
    """The time of the round is over: another step would end after its deadline."""


class RoundBudget(TimeBudget):
    """Steps of which a pass over the photos fits into the time of a round.

    Args:
        table, head: as of `TimeBudget`.
        pass_steps: steps of a pass.
        slowdown: how many times slower the board pretends to be than it is.

    Attributes:
        seconds: of the round that starts.
    """

    def __init__(self, table: TimingTable, head: np.ndarray, pass_steps: int, slowdown: float = 1.0) -> None:
        super().__init__(table, head)
        self._pass_steps, self._slowdown, self.seconds = pass_steps, slowdown, inf
        self._ratios: list[float] = []  # of the latest rounds

    def allow(self, progress: Progress) -> Allowance:
        """See `TimeBudget.allow`: at least the head, at most all."""
        ratio = self._ratio * self._slowdown
        rho = 1e3 * self.seconds / (self._pass_steps * self.table.full_step_ms * ratio)
        rho = min(max(rho, self.smallest_rho), 1.0)
        return Allowance(rho, rho, self.table.full_step_ms * ratio, ratio, correction=1.0)

    def note(self, step_ms: Sequence[float]) -> None:
        """Learn from the latest measured steps how much longer they take than the table says."""
        latest = self._step_over_prediction(Progress(step_ms=step_ms))
        if len(latest) >= FEWEST_STEPS:
            self._ratios = [*self._ratios, statistics.median(latest)][-LATEST_ROUNDS:]

    @property
    def _ratio(self) -> float:
        return statistics.median(self._ratios) if self._ratios else 1.0

    def full_pass_ms(self, mask: np.ndarray) -> float:
        """What a pass that trains bool [N] `mask` takes here."""
        return self._pass_steps * self.table.predict_ms(mask) * self._ratio * self._slowdown


class RoundScheme(ElasticScheme):
    """Selects once in each round, by `RoundBudget`, within the memory that the settings allow.

    A selection stays as long as a pass with it takes about the time of a round, since another one has to be compiled,
    and how fast a busy board is changes from round to round. But all tensors train as soon as they fit.
    """

    def __init__(self, task: Task, data: ShuffledData, settings: Settings, budget: RoundBudget) -> None:
        super().__init__(task, data, settings, budget, NoImportance, select_upper_part)

    def _plan(self, measured: _Measured, progress: Progress) -> Plan:
        table, current = self._budget.table, measured.current
        plan = super()._plan(measured, progress)
        if current is None or (plan.mask.all() and not current.all()):
            return plan
        kept = plan_of(table, current, None, plan.budget_ms, 1.0)
        is_close = plan.budget_ms / KEPT <= kept.step_ms <= KEPT * plan.budget_ms
        fits_memory = self._room_mb == inf or table.predict_mb(current) <= self._room_mb
        return kept if is_close and fits_memory else plan

    def plan(self, schedule: Schedule) -> None:
        """See `Scheme.plan`."""
        self._steps_per_epoch, self._measures_speed, self._pass_steps = schedule.steps_per_epoch, False, set[int]()
        self.start_round(0)

    def start_round(self, step: int) -> None:
        """A round starts before step `step`."""
        self._selection_of_step, self._ends = {step: 0}, [step, step + self._steps_per_epoch]

    def next_selection(self, step: int, total_steps: int) -> int:
        """See `Scheme.next_selection`."""
        return step + self._steps_per_epoch


class RoundClock(Listener):
    """Ends a round by `RoundOver` where another step would end after its deadline; there is always one step.

    Args:
        slowdown: the board pretends to be so many times slower: it sleeps after each step.

    Attributes:
        end: of the round, by `time.perf_counter`.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        super().__init__()
        self._slowdown, self.end = slowdown, inf

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        history = self.trainer.history
        latest, usual = history.results[-1], history.intervals[-1].step_ms[-LATEST_STEPS:]
        if self._slowdown > 1 and latest.step_ms is not None:
            time.sleep((self._slowdown - 1) * latest.step_ms / 1e3)
        next_ms = statistics.median(usual) if usual else 0.0
        if time.perf_counter() + self._slowdown * next_ms / 1e3 > self.end:
            raise RoundOver
