"""The server of a fleet: rounds with one deadline, and the average of what the boards changed in it.

Its rules are those of the pilot (docs/log/fleet.md): the head in closed form first, each board trains the upper part of
the network that fits the deadline, changes are averaged by local step, and the rate starts low. After the last round,
the head is in closed form again, since each board has trained it for its own classes. The best model is kept.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.average import OwnAverage, mean_result
from elastic_trainer.extensions.fleet.board import sent_names, trained_names
from elastic_trainer.extensions.fleet.messages import (
    About,
    Parcel,
    Result,
    losses_of,
    result_of,
    sums_of,
    update_of,
    with_speed,
)
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Answer, Roster
from elastic_trainer.extensions.fleet.settings import PASSES, FleetSettings
from elastic_trainer.networks.tensors import last_layers
from elastic_trainer.runs.checkpoint import State
from elastic_trainer.settings import BEST_MODEL
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.evaluation import Evaluation
from elastic_trainer.training.feature_sums import NO_IMAGES, SCALES, SHRINKAGES, FeatureSums, Head, chosen

if TYPE_CHECKING:
    import keras

    from elastic_trainer.extensions.fleet.strategy import StrategyRounds

Parsed = TypeVar("Parsed")
HEAD_PASSES = 1 / 3  # at least in a round, of the slowest board with its head alone, over a mean board's photos
LEAST_IMAGES = 800  # of the fastest board in a round: shorter ones are worse, since momentum starts at 0 in each
MAX_EMPTY = 10  # rounds in a row of which nothing can be used
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


class FleetServer:
    """Runs the rounds.

    Args:
        roster: of the boards.
        model: the network, with the weights that the fleet starts from. It has the newest ones after each round.
        settings: of the fleet.
        rate: the highest learning rate.
        hello: what boards need to build the same network: values of the "hello" message.
        records: of this run.
        data: whose test photos the models are tested on; None: the boards test them on theirs.
        strategy: which boards train, and how their changes are averaged; None: `OwnAverage`.

    Attributes:
        weights: that boards get, by name.
        seconds: of all rounds so far, testing not included.
    """

    def __init__(
        self,
        roster: Roster,
        model: keras.Model,
        settings: FleetSettings,
        rate: float,
        hello: dict[str, Any],
        records: Records,
        data: ShuffledData | None = None,
        strategy: OwnAverage | StrategyRounds | None = None,
    ) -> None:
        self.records, self._roster, self._say = records, roster, roster.say
        self._model, self._settings, self._rate, self._data = model, settings, rate, data
        self._strategy = strategy or OwnAverage()
        self._evaluation = Evaluation(ImageClassification(model))
        self._trained = trained_names(model)
        self._read_weights()
        self._tests: dict[str, Result] = {}  # of the best model: of the server's photos, or of each board's
        self._steps, self.seconds, self._empty = 0, 0.0, 0
        roster.hello = lambda: Parcel("hello", hello, self.weights)

    def run(self) -> None:
        """Run all rounds that are left. Raises `UserError` if nothing can be sent any more."""
        state = self.records.restore()
        if state is not None:
            self._resume(state)
        if rounds := self.records.rounds:
            seconds = self._settings.grace + (rounds[-1]["round_seconds"] or 0.0)
            self._roster.wait_for(self._settings.boards, least=self._settings.min_boards, seconds=seconds)
        else:
            self._roster.wait_for(self._settings.boards)
        if not self.records.rounds:
            self._first_round()
        while len(self.records.rounds) <= self._settings.rounds:
            self._round(len(self.records.rounds))
        self._take_best()

    def say_goodbye(self) -> None:
        """Give the boards the best model, and let them go."""
        seconds = max(min(self._settings.grace, GOODBYE_SECONDS), self._start_seconds())
        self._roster.ask(Parcel("end", {}, self.weights), seconds, "the end")

    # --- weights ------------------------------------------------------------------------------------------------------

    def _read_weights(self) -> None:
        variables = self._model.variables
        self.weights = {name: variables[int(name.partition("/")[2])].numpy() for name in sent_names(self._model)}

    def _assign(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = {**self.weights, **weights}
        for name, weight in weights.items():
            self._model.variables[int(name.partition("/")[2])].assign(weight)

    def _resume(self, state: State) -> None:
        self._assign(state.arrays)
        self._steps, self.seconds = state.record["steps"], state.record["seconds"]
        self._tests = {name: Result(*test) for name, test in state.record["tests"].items()}
        self._say(f"going on after round {len(self.records.rounds) - 1}")

    # --- round 0 ------------------------------------------------------------------------------------------------------

    def _first_round(self) -> None:
        """Round 0: the head of all photos, from sums of features, which the boards send (Fed3R)."""
        start = self._roster.now()
        while (found := self._closed_form("round 0")) is None:
            self._nothing_came("round 0")
            self._roster.wait_for(1, is_free=True)
        (head, answers), self._empty = found, 0
        if head is None:
            self._say("round 0: there are no sums of features; the fleet starts with the head that the network has")
        else:
            self._set_head(head)
        self.seconds += self._roster.now() - start
        boards = len({one.member for one in answers}) if head else 0
        self._end_round({"round_seconds": None, "learning_rate": 0.0}, answers, boards, late=0)

    def _set_head(self, head: Head) -> None:
        [layer, *_] = last_layers(self._model)
        layer.kernel.assign(head.kernel)
        layer.bias.assign(head.bias)
        self._read_weights()

    def _last_head(self) -> list[Answer]:
        """Replace the head by that in closed form of the trained network, if there is one; the boards' answers.

        Classes of boards that are gone keep their outputs.
        """
        head, answers = self._closed_form("the last head") or (None, [])
        if head is not None:
            [layer, *_] = last_layers(self._model)
            pairs = zip(head, (layer.kernel, layer.bias), strict=True)
            self._set_head(Head(*(np.where(head.bias > NO_IMAGES, new, old.numpy()) for new, old in pairs)))
        return answers

    def _closed_form(self, what: str) -> tuple[Head | None, list[Answer]] | None:
        """The head of the photos of all boards, None if there are no sums of features; and the boards' answers.

        None if no board has answered.

        The boards send sums twice: of the photos that a head is fitted to first, and of all. Between them they say how
        well the heads of several shrinkages do on the photos that are held back.
        """
        [layer, *_] = last_layers(self._model)
        kernel = getattr(layer, "kernel", None)
        if kernel is None or len(kernel.shape) != 2:
            return None, []
        features, classes = kernel.shape

        def sums(answer: Answer) -> list[FeatureSums]:
            images = answer.about.images
            return [sums_of(answer.parcel, prefix, classes, features, images) for prefix in ("first_", "all_")]

        answers = self._asked("sums", self.weights, what)
        if not answers:
            return None
        found = [sums for _, sums in self._parsed(answers, sums, f"{what}: board {{}}: {{}}; it is left out")]
        if not found:
            return None, answers
        firsts, wholes = zip(*found, strict=True)
        first, shape = FeatureSums.together(firsts), (len(SHRINKAGES), len(SCALES))
        losses = [np.zeros(shape)]
        if first.counts.sum():
            heads = first.heads(SHRINKAGES)
            arrays = {
                "kernels": np.stack([one.kernel for one in heads]),
                "biases": np.stack([one.bias for one in heads]),
            }
            replies = self._asked("losses", arrays, what)
            losses += [one for one in (losses_of(reply.parcel, shape) for reply in replies) if one is not None]
            answers += replies
        head = FeatureSums.together(wholes).head(*chosen(np.sum(losses, axis=0)))
        return head if all(np.isfinite(part).all() for part in head) else None, answers

    def _asked(self, kind: str, arrays: dict[str, np.ndarray], what: str) -> list[Answer]:
        """Answers to what takes a pass over the photos and no training."""
        boards = self._roster.ready.values()
        if not boards:
            return []
        seconds = 4 * max(about.head_seconds for about in boards) + 3 * self.grace()
        return self._roster.ask(Parcel(kind, {"seconds": self.round_seconds()}, arrays), seconds, what)

    # --- the other rounds ---------------------------------------------------------------------------------------------

    def round_seconds(self) -> float:
        """Deadline of a round: given, or `usual_round_seconds`, then no shorter than what is not a step."""
        given = self._settings.round_seconds
        if given is not None:
            return given
        usual = usual_round_seconds(self._roster.ready.values(), self._settings.round_passes)
        return max(usual, self.other_seconds())

    def grace(self) -> float:
        """Seconds beyond a deadline."""
        return max(self._settings.grace, self._start_seconds())

    def _start_seconds(self) -> float:
        """In which each board starts, compiles and replies, where each message starts its process."""
        starts = [member.ready_seconds for member in self._roster.ready]
        return STARTS * max(starts, default=0.0) if self._settings.starts_boards else 0.0

    def other_seconds(self) -> float:
        """What the answers of the latest round took besides steps, the median of its boards; 0 before.

        On a slow board, taking weights and compiling may take longer than the messages. It is at least the grace for a
        board that was too late.
        """
        number, rounds = len(self.records.rounds) - 1, self.records.rounds
        late = [self.grace()] * (rounds[-1]["late"] if rounds else 0)
        rows = [row for row in self.records.boards if row["round"] == number]
        steps = [row["steps"] * (row["step_ms"] or row["predicted_step_ms"] or 0.0) / 1e3 for row in rows]
        taken = [row["answer_seconds"] - seconds for row, seconds in zip(rows, steps, strict=True)]
        return statistics.median([*taken, *late] or [0.0])

    def _round(self, number: int) -> None:
        self._roster.wait_for(1, is_free=True)
        seconds, rate = self.round_seconds(), rate_of_round(number, self._settings.rounds, self._rate)
        values = {"round": number, "seconds": seconds, "rate": rate, "changes": self._settings.changes}
        before = {name: self.weights[name] for name in self._trained}
        parcel = Parcel("train", values, before)
        free = [member.node for member in self._roster.ready if member.is_free]
        asked = self._strategy.choose(number, before, free)
        start = self._roster.now()
        grace = max(self.grace(), 2 * self.other_seconds()) * 2**self._empty  # all may be slower than thought
        answers = self._roster.ask(parcel, seconds + grace, f"round {number}", asked)
        accepted = self._parsed(
            answers,
            lambda answer: update_of(answer.parcel, answer.about.images, max_steps(answer.about, seconds), before),
            f"round {number}: the reply of board {{}} is dropped: {{}}",
        )
        updates = {answer.member.node: update for answer, update in accepted}
        after = self._strategy.average(number, before, updates) if updates else None
        if after is None:
            self._nothing_came(f"round {number}")
            return
        self._empty = 0
        self._assign(after)
        for answer, update in accepted:
            answer.member.about = with_speed(answer.about, update.reported)
        self._steps += sum(update.steps for update in updates.values())
        late = len(asked) - len(answers)
        if number == self._settings.rounds:
            answers += self._last_head()
        self.seconds += self._roster.now() - start
        for answer, update in accepted:
            places = [place for place, tensor in enumerate(self._trained) if tensor in update.changes]
            self.records.add_board(number, answer, update, places, seconds)
        self._end_round({"round_seconds": seconds, "learning_rate": rate}, answers, len(accepted), late)

    def _nothing_came(self, what: str) -> None:
        """Nothing of a round can be used, so it is repeated. Raises `UserError` after `MAX_EMPTY` times in a row."""
        self._empty += 1
        if self._empty == MAX_EMPTY:
            raise UserError(f"{what}: nothing of what the boards sent could be used, {MAX_EMPTY} times in a row")
        self._say(f"{what}: nothing that the boards sent can be used; it is repeated")

    def _parsed(
        self, answers: Sequence[Answer], parse: Callable[[Answer], Parsed], text: str
    ) -> list[tuple[Answer, Parsed]]:
        """The answers that `parse` can read, and what it reads; a line of this `text` on each other one."""
        found = []
        for answer in answers:
            try:
                found.append((answer, parse(answer)))
            except ValueError as error:
                self._say(text.format(answer.member.name, error))
        return found

    def _end_round(self, values: dict[str, Any], answers: Sequence[Answer], boards: int, late: int) -> None:
        """Test the model, keep it if it is the best, and write everything."""
        start, tests = time.perf_counter(), self._tested()
        done = {"step": self._steps, "train_seconds": self.seconds, "validation_seconds": time.perf_counter() - start}
        sizes = {
            "bytes_down": sum(one.sent.size for one in answers),
            "bytes_up": sum(one.parcel.size for one in answers),
        }
        row = self.records.add_round({**done, **values, "boards": boards, "late": late, **sizes})
        if (test := mean_result([*tests.values()])) is not None:
            is_kept = not self.is_worse(tests)
            self.records.add_test(row, test, self._model, is_kept)
            self._say(round_line(row, self._settings.rounds))
            if is_kept:
                self._tests = tests
        self.records.save(self.weights, {"steps": self._steps, "seconds": self.seconds, "tests": self._tests})

    def _tested(self) -> dict[str, Result]:
        """The tests of the model: on the server's photos, else on those of each board, if there are any."""
        if self._data is not None:
            return {"": Result(**self._evaluation(self._data.test()), images=self._data.test_count)}
        if not any(about.test_images for about in self._roster.ready.values()):
            return {}

        def tested(answer: Answer) -> Result:
            return result_of(answer.parcel, answer.about.test_images)

        answers = self._asked("test", self.weights, "test")
        found = self._parsed(answers, tested, "the test of board {} is dropped: {}")
        return {answer.about.name: result for answer, result in found}

    def is_worse(self, tests: Mapping[str, Result]) -> bool:
        """Whether a model is less accurate than the best, on the photos of the boards that have tested both."""
        both = tests.keys() & self._tests.keys()
        now, best = (mean_result([found[name] for name in both]) for found in (tests, self._tests))
        return now is not None and best is not None and now["accuracy"] < best["accuracy"]

    def _take_best(self) -> None:
        """Go back to the best model, if one was tested."""
        best = self.records.folder / BEST_MODEL
        if self._tests and best.is_file():
            self._model.load_weights(best)
            self._read_weights()


def round_line(row: dict[str, Any], rounds: int) -> str:
    """What a person wants to know of a round, given its row of metrics.csv."""
    deadline = row["round_seconds"]
    return (
        f"round {row['epoch']} of {rounds}: accuracy {row['test_accuracy']:.1%}"
        f"{', the best so far' if row['kept'] else ''}; {row['boards']} boards, "
        f"{'closed-form head' if deadline is None else f'deadline {deadline:.1f} s'}, {row['train_seconds']:.1f} s "
        f"in all, {(row['bytes_down'] + row['bytes_up']) / 1e6:.1f} MB"
    )
