"""A board's rounds: what it trains in the time of one, and when that is over.

It trains the upper part of the network of which one pass over its photos fits the deadline. The pilot of the fleet
compared it with selections by importance and with windows (docs/log/fleet.md). Where all tensors fit, the board trains
them all, and passes over its photos as often as the time allows.
"""

from __future__ import annotations

import statistics
import time
from math import inf
from typing import Any, NamedTuple

import keras
import numpy as np

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.memory.budget import MemoryBudget
from elastic_trainer.runs.listener import Listener
from elastic_trainer.selection.budget import LATEST_STEPS, Allowance, Progress, TimeBudget
from elastic_trainer.selection.elastic import ElasticScheme
from elastic_trainer.selection.importance import NoImportance
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Plan, Selection, plan_of, select_upper_part
from elastic_trainer.settings import Settings
from elastic_trainer.task import Task
from elastic_trainer.timing.table import TimingTable

RESERVE = 0.03  # of a round, for its last step and the reply
KEPT = 1.5  # times longer or shorter than a round, in which a pass with the present selection may be
MIN_STEPS, LATEST_ROUNDS = 3, 3  # by which a board knows how fast it is


class BoardSetup(NamedTuple):
    """What a board trains: a network, its photos, its timing table, settings of training, and its memory."""

    model: keras.Model
    data: ImageData
    table: TimingTable
    settings: Settings
    memory: MemoryBudget | None = None


class RoundOver(Exception):  # noqa: N818
    """The time of the round is over: another step would end after its deadline."""


class RoundClock(Listener):
    """How fast a board is, and when its round is over.

    It ends a round by `RoundOver` where another step would end after its deadline; there is always one step.

    Args:
        slowdown: the board pretends to be this many times slower: it sleeps after each step.

    Attributes:
        ratios: of measured times to the table's, in the latest rounds.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        super().__init__()
        self.slowdown, self._start, self._seconds, self._limit = slowdown, 0.0, inf, inf
        self.ratios: list[float] = []

    def start(self, seconds: float, is_limit: bool = True) -> None:
        """A round of this many seconds starts. Without `is_limit` only what is selected fits into it."""
        self._start, self._seconds, self._limit = time.perf_counter(), seconds, inf
        if is_limit:
            self._limit = (1 - RESERVE) * seconds

    @property
    def spent(self) -> float:
        """Seconds since the round started."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds of the round that are left."""
        return self._seconds - self.spent

    def note(self, selection: Selection) -> None:
        """Learn from the measured steps of a round how much longer they take than the table says."""
        if len(selection.step_ms) >= MIN_STEPS and selection.predicted_step_ms is not None:
            table_ms = selection.predicted_step_ms / (selection.slowdown or 1.0)
            ratio = statistics.median(selection.step_ms[-LATEST_STEPS:]) / table_ms
            self.ratios = [*self.ratios, ratio][-LATEST_ROUNDS:]

    @property
    def slower(self) -> float:
        """How many times longer steps take than the table says."""
        return self.slowdown * statistics.median(self.ratios or [1.0])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        history = self.trainer.history
        latest, usual = history.results[-1], history.selection.step_ms[-LATEST_STEPS:]
        if self.slowdown > 1 and latest.step_ms is not None:
            time.sleep((self.slowdown - 1) * latest.step_ms / 1e3)
        self._end_before(self.slowdown * statistics.median(usual or [0.0]) / 1e3)

    def _end_before(self, seconds: float) -> None:
        """Raise `RoundOver` if a step of this many seconds would end too late."""
        if self.spent + seconds > self._limit:
            raise RoundOver


class RoundBudget(TimeBudget):
    """Of a selection: that a pass over the board's photos fits what is left of the round."""

    def __init__(self, table: TimingTable, head: np.ndarray, clock: RoundClock, steps: int) -> None:
        super().__init__(table, head)
        self._clock, self._steps = clock, steps

    def allow(self, progress: Progress) -> Allowance:
        slower = self._clock.slower
        rho = 1e3 * self._clock.left / (self._steps * self.table.full_step_ms * slower)
        return Allowance(min(max(rho, self.smallest_rho), 1.0), slower)


class RoundScheme(ElasticScheme):
    """Selects once in each round, by the time that is left of it, within the memory that the settings allow.

    A selection stays as long as a pass with it takes about the time of a round, since another one has to be compiled,
    and how fast a busy board is changes from round to round. But all tensors train as soon as they fit.

    Args:
        task: what the board trains.
        setup: of the board.
        clock: of its rounds.
    """

    def __init__(self, task: Task, setup: BoardSetup, clock: RoundClock) -> None:
        self._clock = clock
        budget = RoundBudget(setup.table, task.head, clock, setup.data.steps_per_epoch)
        super().__init__(task, setup.data, setup.settings, budget, NoImportance, select_upper_part)

    def plan(self, schedule: Schedule) -> None:
        """The server, and no schedule, says when a round starts."""
        self.due, self.pass_steps, self._measures_speed = {}, set(), False

    def start_round(self, step: int) -> None:
        """A round starts before this step."""
        self.due = {step: 0}

    def keep(self, best: Plan, current: np.ndarray, progress: Progress, allowance: Allowance) -> Plan:
        if best.mask.all() and not current.all():
            return best
        kept = plan_of(self.table, current, None, best.budget_ms, 1.0)
        return kept if best.budget_ms / KEPT <= kept.step_ms <= KEPT * best.budget_ms else best

    def pass_seconds(self, mask: np.ndarray) -> float:
        """What a pass over the board's photos takes that trains bool [N] `mask`."""
        return self.data.steps_per_epoch * self.table.predict_ms(mask) * self._clock.slower / 1e3
