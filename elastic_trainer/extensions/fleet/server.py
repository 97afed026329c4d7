"""The server of a fleet: rounds with one deadline, and the average of what the boards changed in it.

Its rules are those of the pilot (docs/log/fleet.md): the head in closed form first, each board trains the upper part of
the network that fits the deadline, changes are averaged by local step, the rate starts low, and the best model is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.extensions.fleet.average import Reply, aggregate, why_unfit
from elastic_trainer.extensions.fleet.client import sent_names, trained_names
from elastic_trainer.extensions.fleet.first_round import first_head
from elastic_trainer.extensions.fleet.link import Link
from elastic_trainer.extensions.fleet.parcel import Parcel
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Answer, Clock, Roster
from elastic_trainer.extensions.fleet.settings import FleetSettings
from elastic_trainer.networks.tensors import last_layers
from elastic_trainer.runs.checkpoint import State
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.evaluation import Evaluation

if TYPE_CHECKING:
    import keras

# Of a round, over a mean board's photos: of the fastest with all tensors, and at least of the slowest with its head.
PASSES, HEAD_PASSES = 1.3, 1 / 3
GOODBYE_SECONDS = 20.0  # in which boards say that they know of the end
WARM_UP = 0.25  # of the rounds, in which the rate rises; the first round at the full rate spoils a pretrained network


def rate_of_round(number: int, rounds: int, highest: float) -> float:
    """The learning rate of round `number`, from 1 to `rounds`: it rises linearly, and falls to 0 by a cosine."""
    rise = max(round(WARM_UP * rounds), 1)
    return highest * min(number / (rise + 1), 1.0) * 0.5 * (1 + math.cos(math.pi * (number - 1) / rounds))


def usual_round_seconds(boards: Sequence[Mapping[str, Any]], passes: float = PASSES) -> float:
    """Deadline of a round, so that the fastest board can train everything, and the slowest its head.

    A pass is one over the mean number of photos, since a board may have very few. docs/log/fleet.md compares lengths.

    Args:
        boards: what each has said of itself: `images`, and what a pass over them takes in seconds with all tensors,
            `full_seconds`, and with the head alone, `head_seconds`.
        passes: of the fastest board with all tensors.
    """
    images = np.array([board["images"] for board in boards])
    full, head = (np.array([board[f"{kind}_seconds"] for board in boards]) / images for kind in ("full", "head"))
    return float(images.mean() * max(passes * full.min(), HEAD_PASSES * head.max()))


class FleetServer:
    """Runs the rounds.

    Args:
        link: to the boards.
        model: the network, with the weights that the fleet starts from. It has the newest ones after each round.
        settings: of the fleet.
        rate: the highest learning rate.
        hello: what boards need to build the same network: values of the "hello" message.
        records: of this run.
        data: whose test photos the models are tested on; None: the boards test them on theirs.
        say: is given a line on each event.
        check: is called between rounds; may raise an error to stop.
        clock: of the rounds.

    Attributes:
        normalised: whether changes are averaged by local step, see `aggregate`.
        seconds: of all rounds so far, testing not included.
    """

    normalised = True

    def __init__(
        self,
        link: Link,
        model: keras.Model,
        settings: FleetSettings,
        rate: float,
        hello: dict[str, Any],
        records: Records,
        data: ShuffledData | None = None,
        say: Callable[[str], object] = print,
        check: Callable[[], object] = lambda: None,
        clock: Clock = Clock(),  # noqa: B008 (it is frozen)
    ) -> None:
        self._model, self._settings, self._rate, self._data = model, settings, rate, data
        self._records, self._say, self._check, self._clock = records, say, check, clock
        self._evaluation = Evaluation(ImageClassification(model))
        self._sent, self._trained = sent_names(model), trained_names(model)
        self.weights = read_weights(self._model, self._sent)
        self._tested: dict[str, Any] = {}  # the row of the model that the boards test next
        self._steps, self.seconds = 0, 0.0
        self.roster = Roster(link, lambda: Parcel("hello", hello, self.weights), say, Clock(clock.now, self._pause))

    def run(self) -> None:
        """Run all rounds that are left. Raises `UserError` if nothing can be sent any more."""
        state = self._records.restore()
        if state is not None:
            self._resume(state)
        self.roster.wait_for(self._settings.boards)
        if not self._records.rounds:
            self._first_round()
        while len(self._records.rounds) <= self._settings.rounds:
            self._check()
            self._round(len(self._records.rounds))
        if self._data is None:
            self._record_tests(self.roster.ask(Parcel("test", {}, self.weights), self._settings.grace, "last test"))
            self._records.write()

    def say_goodbye(self, best: Path) -> None:
        """Give the boards the best model, in this file, and let them go."""
        if best.is_file():
            self._model.load_weights(best)
            self.weights = read_weights(self._model, self._sent)
        self.roster.ask(Parcel("end", {}, self.weights), min(self._settings.grace, GOODBYE_SECONDS), "the end")

    def _resume(self, state: State) -> None:
        self._assign(state.arrays)
        self._steps, self.seconds = state.record["steps"], state.record["seconds"]
        latest = self._records.rounds[-1]
        self._tested = latest if latest["test_accuracy"] is None else {}
        self._say(f"going on after round {len(self._records.rounds) - 1}")

    def _assign(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = {**self.weights, **weights}
        write_weights(self._model, weights)

    def _pause(self, seconds: float) -> None:
        self._check()
        self._clock.pause(seconds)

    def _first_round(self) -> None:
        """Round 0: the head of all photos, from sums of features."""
        start, [layer] = self._clock.now(), last_layers(self._model)[:1]
        head, answers = first_head(self._asked, self.weights, layer, self._say)
        if head is None:
            self._say("round 0: there are no sums of features; the fleet starts with the head that the network has")
        else:
            layer.kernel.assign(head.kernel)
            layer.bias.assign(head.bias)
            self.weights = read_weights(self._model, self._sent)
        self.seconds += self._clock.now() - start
        down, up = sum(one.sent for one in answers), sum(one.size for one in answers)
        boards = len({one.member.name for one in answers}) if head else 0
        self._end_round({"round_seconds": None, "learning_rate": 0.0}, down, up, boards, 0)

    def _asked(self, kind: str, arrays: dict[str, np.ndarray]) -> list[Answer]:
        """Answers to what takes a pass over the photos and no training."""
        if not self.roster.ready:
            return []
        seconds = 4 * max(member.about["head_seconds"] for member in self.roster.ready) + 3 * self._settings.grace
        return self.roster.ask(Parcel(kind, {"seconds": self.round_seconds()}, arrays), seconds, "round 0")

    def round_seconds(self) -> float:
        """Deadline of a round: given, or `usual_round_seconds`."""
        given = self._settings.round_seconds
        return usual_round_seconds([member.about for member in self.roster.ready]) if given is None else given

    def _round(self, number: int) -> None:
        self.roster.wait_for(1, is_free=True)
        seconds, rate = self.round_seconds(), rate_of_round(number, self._settings.rounds, self._rate)
        values = {"round": number, "seconds": seconds, "rate": rate, "changes": self._settings.changes}
        before = {name: self.weights[name] for name in self._trained}
        parcel = Parcel("train", {**values, "tests": self._data is None}, before)
        start, asked = self._clock.now(), {member.name for member in self.roster.ready if member.is_free}
        answers = self.roster.ask(parcel, seconds + self._settings.grace, f"round {number}")
        if self._data is None:
            self._record_tests(answers)
        accepted = accepted_replies(before, answers, lambda line: self._say(f"round {number}: {line}"))
        self._assign(aggregate(before, [reply for _, reply in accepted], self.normalised))
        self._steps += sum(reply.steps for _, reply in accepted)
        self.seconds += self._clock.now() - start
        for one, reply in accepted:
            places = [place for place, tensor in enumerate(self._trained) if tensor in reply.changes]
            self._records.add_board(number, one, reply, places, seconds)
        late = asked - {one.member.name for one in answers}
        down, up = sum(one.sent for one in answers), sum(one.size for one in answers)
        self._end_round({"round_seconds": seconds, "learning_rate": rate}, down, up, len(accepted), len(late))

    def _end_round(self, values: dict[str, Any], down: int, up: int, boards: int, late: int) -> None:
        """Test the model, keep it if it is the best, and write everything."""
        start = time.perf_counter()
        test = self._evaluation(self._data.test()) if self._data is not None else {"loss": None, "accuracy": None}
        done = {"step": self._steps, "train_seconds": self.seconds, "validation_seconds": time.perf_counter() - start}
        sizes = {"boards": boards, "late": late, "bytes_down": down, "bytes_up": up}
        row = self._records.add_round({**done, **values, **sizes}, test)
        if test["accuracy"] is not None:
            self._keep(row)
        self._tested = row
        self._records.save(self.weights, {"steps": self._steps, "seconds": self.seconds})

    def _keep(self, row: dict[str, Any]) -> None:
        is_best = self._records.keep(self._model, row["test_accuracy"])
        self._records.draw(row["epoch"], {f"fleet/{key}": value for key, value in row.items() if key != "epoch"})
        self._say(round_line(row, self._settings.rounds, is_best))

    def _record_tests(self, answers: Sequence[Answer]) -> None:
        """The latest model, as the boards have tested it, weighted by their photos."""
        found = mean_of_tests(answers)
        if found is not None and self._tested:
            self._tested.update(found)
            self._keep(self._tested)
            self._tested = {}


def read_weights(model: keras.Model, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The weights of a network with these names, as of `client.sent_names`."""
    return {name: model.variables[int(name.partition("/")[2])].numpy() for name in names}


def write_weights(model: keras.Model, weights: dict[str, np.ndarray]) -> None:
    """Give a network weights by such names."""
    for name, weight in weights.items():
        model.variables[int(name.partition("/")[2])].assign(weight)


def accepted_replies(
    weights: dict[str, np.ndarray], answers: Sequence[Answer], say: Callable[[str], object]
) -> list[tuple[Answer, Reply]]:
    """The answers whose replies can be averaged into `weights`, and these; a line on each other one."""
    accepted = []
    for answer in answers:
        try:
            changes = {name: change.astype(np.float32) for name, change in answer.parcel.arrays.items()}
            reply = Reply(changes, answer.member.about["images"], int(answer.parcel.values["steps"]))
            why = why_unfit(weights, reply)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"it cannot be read ({error})"
        if why is None:
            accepted.append((answer, reply))
        else:
            say(f"the reply of board {answer.member.name} is dropped: {why}")
    return accepted


def mean_of_tests(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Loss and accuracy, as of metrics.csv, over the test photos of all boards; None if no board has tested."""
    found = []
    for answer in answers:
        try:
            test, count = answer.parcel.values["test"], int(answer.parcel.values["test_images"])
            values = [float(test["loss"]), float(test["accuracy"])]
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if count > 0 and np.isfinite(values).all() and 0 <= values[1] <= 1:
            found.append((values, min(count, answer.member.about.get("test_images", 0))))
    if not any(count for _, count in found):
        return None
    loss, accuracy = np.average([values for values, _ in found], axis=0, weights=[count for _, count in found])
    return {"test_loss": float(loss), "test_accuracy": float(accuracy)}


def round_line(row: dict[str, Any], rounds: int, is_best: bool) -> str:
    """What a person wants to know of a round, given its row of metrics.csv."""
    deadline = row["round_seconds"]
    return (
        f"round {row['epoch']} of {rounds}: accuracy {row['test_accuracy']:.1%}"
        f"{', the best so far' if is_best else ''}; {row['boards']} boards, "
        f"{'closed-form head' if deadline is None else f'deadline {deadline:.1f} s'}, {row['train_seconds']:.1f} s "
        f"in all, {(row['bytes_down'] + row['bytes_up']) / 1e6:.1f} MB"
    )
