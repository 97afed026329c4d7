"""A board's rounds: what it trains in the time of one, and when that is over.

It trains the upper part of the network of which one pass over its photos fits the deadline. The pilot of the fleet
compared it with selections by importance and with windows (docs/log/fleet.md). Where all tensors fit, the board trains
them all, and passes over its photos as often as the time allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import keras
import numpy as np

from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.memory.budget import MemoryBudget
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.listener import Listener
from elastic_trainer.selection.budget import LATEST_STEPS, Progress, smallest_rho
from elastic_trainer.selection.memory_budget import selection_room_mb
from elastic_trainer.selection.schemes import Scheme
from elastic_trainer.selection.select import Plan, Selection, plan_of, select_upper_part
from elastic_trainer.settings import Settings
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.training.state import TrainState

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

    def note(self, step_ms: Sequence[float], table_ms: float) -> None:
        """Learn from the measured steps of a round how much longer they take than the table says."""
        if len(step_ms) >= MIN_STEPS:
            ratio = statistics.median(step_ms[-LATEST_STEPS:]) / table_ms
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


class RoundScheme(Scheme):
    """Selects once in each round, by the time that is left of it, within the memory that the settings allow.

    A selection stays as long as a pass with it takes about the time of a round, since another one has to be compiled,
    and how fast a busy board is changes from round to round. But all tensors train as soon as they fit.

    Args:
        setup: of the board.
        clock: of its rounds.

    Attributes:
        step_ms: of the latest selection, by the table.
    """

    def __init__(self, setup: BoardSetup, clock: RoundClock) -> None:
        self.setup, self.table = setup, setup.table
        self.head = head_mask(setup.model)
        self._clock = clock
        self._mask: np.ndarray | None = None
        self.step_ms, self._room_mb = 0.0, inf

    def start_round(self, step: int) -> None:
        """A round starts before this step."""
        self.due = (step,)

    def select(self, progress: Progress, state: TrainState) -> Selection:
        full_ms = self.table.full_step_ms * self._clock.slower
        rho = 1e3 * self._clock.left / (self.setup.data.steps_per_epoch * full_ms)
        rho = min(max(rho, smallest_rho(self.table, self.head)), 1.0)
        self._limit_memory(state)
        while True:
            plan = self.choose(rho, state)
            self._mask, self.step_ms = plan.mask, plan.step_ms
            state.adopt(plan.mask, plan.uses_features)
            if not self._shrink(state.excess_mb):
                break
        return Selection(
            plan.mask,
            predicted_step_ms=plan.step_ms * self._clock.slower,
            budget_step_ms=rho * full_ms,
            epoch=progress.step / progress.steps_per_epoch,
            rho=rho,
            slowdown=self._clock.slower,
            correction=1.0,
        )

    def choose(self, rho: float, state: TrainState) -> Plan:
        """What to train in steps that take at most `rho` of a full one."""
        plan = select_upper_part(self.table, np.zeros(len(self.head)), self.head, rho, room_mb=self._room_mb)
        if self._mask is None or (plan.mask.all() and not self._mask.all()):
            return plan
        kept = plan_of(self.table, self._mask, None, plan.budget_ms, 1.0)
        is_close = plan.budget_ms / KEPT <= kept.step_ms <= KEPT * plan.budget_ms
        fits_memory = self._room_mb == inf or self.table.predict_mb(self._mask) <= self._room_mb
        return kept if is_close and fits_memory else plan

    def _limit_memory(self, state: TrainState) -> None:
        """Keep selections within the memory that the process may take, from the first one on."""
        if self._room_mb == inf:
            rows = part_rows(self.setup.data.full_batch, self.setup.settings.micro_batch)
            self._room_mb = selection_room_mb(state.memory, self.table, self.head, rows, state.parts, state.can_split)

    def _shrink(self, excess_mb: float) -> bool:
        """Whether another selection can take less memory than the latest, which takes too much; then it must."""
        if excess_mb <= 0 or self.table.memory is None or self._mask is None or (self._mask == self.head).all():
            return False
        now_mb, head_mb = min(self._room_mb, self.table.predict_mb(self._mask)), self.table.predict_mb(self.head)
        self._room_mb = now_mb - min(excess_mb, (now_mb - head_mb) / 2)  # the costs of single tensors may be off
        return True

    def pass_seconds(self, mask: np.ndarray) -> float:
        """What a pass over the board's photos takes that trains bool [N] `mask`."""
        return self.setup.data.steps_per_epoch * self.table.predict_ms(mask) * self._clock.slower / 1e3
