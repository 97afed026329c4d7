"""How long a fleet waits, and its rate: all times in seconds, by what boards say and what the latest rounds took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection

import numpy as np

from elastic_trainer.extensions.fleet.messages import About
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Roster
from elastic_trainer.extensions.fleet.settings import PASSES, FleetSettings

HEAD_PASSES = 1 / 3  # at least in a round, of the slowest board with its head alone, over a mean board's photos
LEAST_IMAGES = 800  # of the fastest board in a round: shorter ones are worse, since momentum starts at 0 in each
STARTS = 2.0  # of a board, in which one starts, compiles and replies
GOODBYE_SECONDS = 20.0  # in which boards say that they know of the end
WARM_UP = 0.25  # of the rounds, in which the rate rises; the first round at the full rate spoils a pretrained network


def rate_of_round(number: int, rounds: int, highest: float) -> float:
    """The learning rate of round `number`, from 1 to `rounds`: it rises linearly, and falls to 0 by a cosine."""
    rise = max(round(WARM_UP * rounds), 1)
    return highest * min(number / (rise + 1), 1.0) * 0.5 * (1 + math.cos(math.pi * (number - 1) / rounds))


def usual_round_seconds(boards: Collection[About], passes: float = PASSES) -> float:
    """Deadline of a round, so that the fastest board can train everything, and the slowest its head.

    A pass is one over the mean number of photos, since a board may have very few; the fastest board trains on
    `LEAST_IMAGES` at least. docs/log/fleet.md compares lengths.

    Args:
        boards: what each has said of itself.
        passes: of the fastest board with all tensors.
    """
    fastest = min(board.full_seconds / board.images for board in boards)
    slowest = max(board.head_seconds / board.images for board in boards)
    images = float(np.mean([board.images for board in boards]))
    return max(max(passes * images, LEAST_IMAGES) * fastest, HEAD_PASSES * images * slowest)


def max_steps(about: About, seconds: float) -> int:
    """How many steps a board can do in a round at most: one a photo, head alone, twice as fast as it said."""
    return math.ceil(2 * about.images * (1 + seconds / about.head_seconds))


class Pace:
    """How long a fleet gives its boards.

    Args:
        settings: of the fleet.
        roster: of its boards.
        records: of its rounds.
    """

    def __init__(self, settings: FleetSettings, roster: Roster, records: Records) -> None:
        self._settings, self._roster, self._records = settings, roster, records

    def round_seconds(self) -> float:
        """Deadline of a round: given, or `usual_round_seconds`, then no shorter than what is not a step."""
        if self._settings.round_seconds is not None:
            return self._settings.round_seconds
        usual = usual_round_seconds(self._roster.ready.values(), self._settings.round_passes)
        return max(usual, self.other_seconds())

    def grace(self) -> float:
        """Beyond a deadline, for an answer."""
        return max(self._settings.grace, self._start_seconds())

    def answer_seconds(self, round_seconds: float, empty: int) -> float:
        """For the answers to a round, after so many `empty` ones in a row: all boards may be slower than thought."""
        return round_seconds + max(self.grace(), 2 * self.other_seconds()) * 2**empty

    def pass_seconds(self) -> float:
        """For answers that take a pass over the photos, and no training."""
        return 4 * max((about.head_seconds for about in self._roster.ready.values()), default=0.0) + 3 * self.grace()

    def return_seconds(self) -> float:
        """For boards to come back after `--resume`."""
        return self._settings.grace + (self._records.rounds[-1]["round_seconds"] or 0.0)

    def goodbye_seconds(self) -> float:
        """For boards to say that they know of the end."""
        return max(min(self._settings.grace, GOODBYE_SECONDS), self._start_seconds())

    def _start_seconds(self) -> float:
        """In which each board starts, compiles and replies, where each message starts its process."""
        starts = [member.ready_seconds for member in self._roster.ready]
        return STARTS * max(starts, default=0.0) if self._settings.starts_boards else 0.0

    def other_seconds(self) -> float:
        """What the answers of the latest round took besides steps, the median of its boards; 0 before.

        On a slow board, taking weights and compiling may take longer than the messages. It is at least the grace for a
        board that was too late.
        """
        number, rounds = len(self._records.rounds) - 1, self._records.rounds
        late = [self.grace()] * (rounds[-1]["late"] if rounds else 0)
        rows = [row for row in self._records.boards if row["round"] == number]
        steps = [row["steps"] * (row["step_ms"] or row["predicted_step_ms"] or 0.0) / 1e3 for row in rows]
        taken = [row["answer_seconds"] - seconds for row, seconds in zip(rows, steps, strict=True)]
        return statistics.median([*taken, *late] or [0.0])
