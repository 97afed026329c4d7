"""Many boards with made-up speeds in one process, to plan a fleet: they really train, and their time is made up.

A board takes for a step what the timing table of this machine says, times how much slower it is. Messages take a given
time. The boards train one after the other. They share one network, whose weights each loads first, and the compiled
steps: boards that train the same tensors use the same one, so there can be a hundred of them. Flower has an engine for
simulations, too. It is not used: each of its processes would load TensorFlow, and its clients run as fast as this
machine, so their speeds could not be made up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.extensions.fleet.client import EPOCHS, Board, Made
from elastic_trainer.extensions.fleet.local import LocalLink
from elastic_trainer.extensions.fleet.parcel import Parcel
from elastic_trainer.extensions.fleet.roster import Clock
from elastic_trainer.training.state import TrainState
from elastic_trainer.training.step import TrainStep

MESSAGE_SECONDS = 5.0  # what a message and its answer take beside training


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
        ValueError: there are not enough photos.
    """
    if len(labels) < boards * fewest:
        raise ValueError(f"{len(labels)} photos are too few for {boards} boards of at least {fewest}")
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


class SharedTraining(TrainState):
    """What all boards of a simulation train with. It keeps each compiled step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._steps: dict[Any, TrainStep] = {}
        super().__init__(*args, **kwargs)

    def _traced(self, batch_size: int | None, mask: np.ndarray | None, parts: int | None = None) -> TrainStep:
        key = batch_size, None if mask is None else mask.tobytes(), parts
        if key in self._steps:
            self._steps[key].refresh()  # the weights have changed since
        else:
            self._steps[key] = super()._traced(batch_size, mask, parts)
        return self._steps[key]


class SimulatedBoard(Board):
    """A board whose steps take as long as its timing table says, times `slowdown`.

    Attributes:
        shared: what all boards of a simulation train with; empty until the first one has started.
        took: seconds of its latest round.
    """

    shared: list[SharedTraining]
    took = 0.0

    def _start(self, made: Made) -> None:
        super()._start(made)
        own = self._trainer.training
        if not self.shared:
            self.shared.append(
                SharedTraining(own.task, own.optimizer, own._batch_size, memory_mb=own.memory_mb, rows=own._rows)
            )
        [self._trainer.training] = self.shared

    def _run(self, seconds: float, rate: float, most: int = EPOCHS, spent: float = 0.0) -> int:
        """See `Board._run`; what this machine has spent is none of the board's time, and there is nothing to try."""
        if rate == 0:
            return 0
        trainer, first = self._trainer, self._trainer.history.step
        trainer.training.optimizer.learning_rate = rate
        self._budget.seconds = seconds
        self._scheme.start_round(first)
        trainer.run(first + 1)
        step_ms = trainer.history.selection.predicted_step_ms or 0.0
        steps = min(max(int(1e3 * seconds / step_ms), 1), most)
        if steps > 1:
            trainer.run(first + steps)
        self.took = steps * step_ms / 1e3
        return steps


def simulation(
    made: Made,
    parts: Sequence[np.ndarray],
    slower: Sequence[float],
    say: Callable[[str], object],
    kind: Callable[..., SimulatedBoard] = SimulatedBoard,
    message_seconds: float = MESSAGE_SECONDS,
) -> tuple[LocalLink, Clock]:
    """The link to simulated boards, and the clock of their time.

    Args:
        made: network, all photos, timing table and settings.
        parts: rows of the photos of each board.
        slower: how many times slower each board is.
        say: is given a line on each round of a board.
        kind: makes a board of its name, what it trains, how slow it is, and `say`.
        message_seconds: what a message and its answer take beside training.
    """
    time = [0.0]
    boards = {
        place + 1: kind(f"board-{place + 1}", _maker(made, rows, place), factor, say)
        for place, (rows, factor) in enumerate(zip(parts, slower, strict=True))
    }

    def takes(node: int, reply: Parcel) -> float:
        return message_seconds + (boards[node].took if reply.kind == "trained" else 0.0)

    def pause(seconds: float) -> None:
        time[0] += seconds

    shared: list[SharedTraining] = []
    for board in boards.values():
        board.shared = shared
    link = LocalLink({node: board.handle for node, board in boards.items()}, lambda: time[0], takes)
    return link, Clock(lambda: time[0], pause)


def _maker(made: Made, rows: np.ndarray, place: int) -> Callable[[Sequence[str], Sequence[str]], Made]:
    def make(words: Sequence[str], class_names: Sequence[str]) -> Made:
        data: ImageData = made.data.part(rows, made.data.seed + place)
        return made._replace(data=data)

    return make
