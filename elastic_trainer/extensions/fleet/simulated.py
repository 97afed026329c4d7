"""In-process boards with chosen speeds, to plan a fleet: training is real, time is simulated.

A board takes for a step what the timing table of this machine says, times how much slower it is. Messages take a given
time. The boards train one after the other. They share one network, whose weights each loads first, and the compiled
steps: boards that train the same tensors use the same one, so there can be a hundred of them. Flower's own engine runs
the same boards on several cores, or machines (`flower_app`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.board import Board
from elastic_trainer.extensions.fleet.messages import Parcel, failed
from elastic_trainer.extensions.fleet.rounds import BoardSetup, RoundClock
from elastic_trainer.selection.select import Selection
from elastic_trainer.training.state import TrainState
from elastic_trainer.training.step import TrainStep

MESSAGE_SECONDS = 1.0  # what a message and its answer take


def slowdowns(boards: int, slowest: float) -> np.ndarray:
    """How many times slower each board is: from 1 to `slowest`, in equal ratios."""
    return np.geomspace(1.0, slowest, boards) if boards > 1 else np.ones(1)


def split(labels: np.ndarray, boards: int, concentration: float | None, fewest: int, seed: int) -> list[np.ndarray]:
    """The photos of each board, as int arrays of rows.

    Args:
        labels: int [photos].
        boards: how many.
        concentration: of the Dirichlet distribution by which the photos of each class are divided: the smaller, the
            more uneven; None: evenly.
        fewest: photos of a board; those that would get fewer take from the one that has most.
        seed: of the split.

    Raises:
        UserError: there are not enough photos.
    """
    if len(labels) < boards * fewest:
        raise UserError(
            f"--clients {boards}: {len(labels)} photos are too few for {boards} boards of at least {fewest}; give "
            "fewer, or a smaller --batch_size"
        )
    rng, parts = np.random.default_rng(seed), [list[int]() for _ in range(boards)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = np.full(boards, 1 / boards) if concentration is None else rng.dirichlet([concentration] * boards)
        ends = np.round(np.cumsum(shares) * len(rows)).astype(int)
        for part, own in zip(parts, np.split(rows, ends[:-1]), strict=True):
            part.extend(own.tolist())
    while len(smallest := min(parts, key=len)) < fewest:
        smallest.append(max(parts, key=len).pop())
    return [np.array(sorted(part)) for part in parts]


class LocalLink:
    """A `Link` to boards in this process, which answer when they are asked. Time passes in its pauses alone.

    Args:
        boards: what each makes of a message, by its number.
        takes: seconds until a reply has come, by board and reply; at once if left out.
    """

    def __init__(
        self,
        boards: dict[int, Callable[[Parcel], Parcel]],
        takes: Callable[[int, Parcel], float] = lambda node, reply: 0.0,
    ) -> None:
        self.boards, self._takes = boards, takes
        self._replies: dict[str, tuple[float, Parcel]] = {}
        self._count, self._seconds = 0, 0.0

    def now(self) -> float:
        return self._seconds

    def pause(self, seconds: float) -> None:
        self._seconds += seconds

    def nodes(self) -> dict[int, tuple[str, str]]:
        return dict.fromkeys(self.boards, ("", ""))

    def send(self, node: int, parcel: Parcel, seconds: float) -> str:
        self._count += 1
        number = str(self._count)
        try:
            reply = self.boards[node](Parcel.from_bytes(parcel.to_bytes()))
        except UserError as error:
            reply = failed(str(error))
        self._replies[number] = self._seconds + self._takes(node, reply), Parcel.from_bytes(reply.to_bytes())
        return number

    def receive(self, messages: Collection[str]) -> dict[str, Parcel]:
        due = [number for number in messages if number in self._replies and self._replies[number][0] <= self._seconds]
        return {number: self._replies.pop(number)[1] for number in due}


class SimulatedClock(RoundClock):
    """Each step takes as long as predicted; nothing else takes time."""

    def start(self, seconds: float, is_limit: bool = True) -> None:
        self._seconds, self._limit, self._spent, self._steps = seconds, seconds * (1 + 1e-9), 0.0, 0

    @property
    def spent(self) -> float:
        return self._spent

    def note(self, selection: Selection) -> None:
        """What this machine takes is of no use."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        seconds = (self.trainer.history.selection.predicted_step_ms or 0.0) / 1e3
        self._steps += 1
        self._spent = self._steps * seconds
        self._end_before(seconds)


class SimulatedBoard(Board):
    """A board that trains with what `shared` contains: that of the first of all boards."""

    def __init__(
        self, name: str, make: Callable[..., BoardSetup], clock: RoundClock, say: Any, shared: list[TrainState]
    ) -> None:
        super().__init__(name, make, clock, say)
        self._shared = shared

    def _start(self, setup: BoardSetup) -> None:
        super()._start(setup)
        if not self._shared:
            self._shared.append(self.trainer.training)
            keep_steps(self.trainer.training)
        [self.trainer.training] = self._shared

    def _probe(self, seconds: float, steps: int) -> None:
        """There is no real speed."""


def keep_steps(training: TrainState) -> None:
    """Let it keep the compiled steps, and use them again."""
    make, kept = training.make_step, dict[Any, TrainStep]()

    def make_step(batch_size: int | None, mask: np.ndarray | None, parts: int | None = None) -> TrainStep:
        key = batch_size, None if mask is None else mask.tobytes(), parts
        if key in kept:
            kept[key].refresh()  # the weights have changed since
        else:
            kept[key] = make(batch_size, mask, parts)
        return kept[key]

    training.make_step = make_step


def simulation(
    setup: BoardSetup,
    parts: Sequence[np.ndarray],
    slower: Sequence[float],
    say: Callable[[str], object],
    kind: type[SimulatedBoard] = SimulatedBoard,
    message_seconds: float = MESSAGE_SECONDS,
    shared: list[TrainState] | None = None,
) -> LocalLink:
    """The link to simulated boards.

    Args:
        setup: network, all photos, timing table and settings.
        parts: rows of the photos of each board.
        slower: how many times slower each board is.
        say: is given a line on each round of a board.
        kind: of board.
        message_seconds: what a message and its answer take.
        shared: compiled steps of an earlier simulation with the same `setup`, or an empty list, which gets them.
    """
    boards, shared = dict[int, SimulatedBoard](), [] if shared is None else shared

    def takes(node: int, reply: Parcel) -> float:
        return message_seconds + (boards[node].clock.spent if reply.kind == "trained" else 0.0)

    for node, (rows, factor) in enumerate(zip(parts, slower, strict=True), 1):
        own = with_part(setup, rows, node)
        boards[node] = kind(f"board-{node}", lambda *_, own=own: own, SimulatedClock(factor), say, shared)
    return LocalLink({node: board.handle for node, board in boards.items()}, takes)


def with_part(setup: BoardSetup, rows: np.ndarray, node: int) -> BoardSetup:
    """What a board trains that has the photos `rows`, int [n]; `node` is its number, from 1."""
    return setup._replace(data=setup.data.part(rows, setup.data.seed + node - 1))
