"""The server of a fleet: rounds with one deadline, and the average of what the boards changed in it.

Its rules are those of the pilot (docs/log/fleet.md): the head in closed form first, each board trains the upper part of
the network that fits the deadline, changes are averaged by local step, and the rate starts low. After the last round,
the head is in closed form again, since each board has trained it for its own classes. The best model is kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.average import OwnAverage, mean_result
from elastic_trainer.extensions.fleet.board import sent_names, trained_names
from elastic_trainer.extensions.fleet.closed_form import ClosedForm
from elastic_trainer.extensions.fleet.messages import Parcel, Result, result_of, update_of, with_speed
from elastic_trainer.extensions.fleet.pace import Pace, max_steps, rate_of_round
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Answer, Roster
from elastic_trainer.extensions.fleet.settings import FleetSettings
from elastic_trainer.runs.checkpoint import State
from elastic_trainer.settings import BEST_MODEL
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.evaluation import Evaluation
from elastic_trainer.training.feature_sums import Head

if TYPE_CHECKING:
    import keras

    from elastic_trainer.extensions.fleet.strategy import StrategyRounds

MAX_EMPTY = 10  # rounds in a row of which nothing can be used


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
        pace: how long boards have.
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
        self.pace = Pace(settings, roster, records)
        self._closed_form = ClosedForm(model, roster, self.pace)
        self._read_weights()
        self._tests: dict[str, Result] = {}  # of the best model: of the server's photos, or of each board's
        self._steps, self.seconds, self._empty = 0, 0.0, 0
        roster.hello = lambda: Parcel("hello", hello, self.weights)

    def run(self) -> None:
        """Run all rounds that are left. Raises `UserError` if nothing can be sent any more."""
        state = self.records.restore()
        if state is not None:
            self._resume(state)
        if self.records.rounds:
            least, seconds = self._settings.min_boards, self.pace.return_seconds()
            self._roster.wait_for(self._settings.boards, least=least, seconds=seconds)
        else:
            self._roster.wait_for(self._settings.boards)
            self._first_round()
        while len(self.records.rounds) <= self._settings.rounds:
            self._round(len(self.records.rounds))
        self._take_best()

    def say_goodbye(self) -> None:
        """Give the boards the best model, and let them go."""
        self._roster.ask(Parcel("end", {}, self.weights), self.pace.goodbye_seconds(), "the end")

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
        while (found := self._closed_form.fit(self.weights, "round 0")) is None:
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

    def _set_head(self, head: Head, keeps: bool = False) -> None:
        self._closed_form.assign(head, keeps)
        self._read_weights()

    # --- the other rounds ---------------------------------------------------------------------------------------------

    def _round(self, number: int) -> None:
        self._roster.wait_for(1, is_free=True)
        seconds, rate = self.pace.round_seconds(), rate_of_round(number, self._settings.rounds, self._rate)
        values = {"round": number, "seconds": seconds, "rate": rate, "changes": self._settings.changes}
        before = {name: self.weights[name] for name in self._trained}
        parcel = Parcel("train", values, before)
        free = [member.node for member in self._roster.ready if member.is_free]
        asked = self._strategy.choose(number, before, free)
        start = self._roster.now()
        answers = self._roster.ask(parcel, self.pace.answer_seconds(seconds, self._empty), f"round {number}", asked)
        accepted = self._roster.parsed(
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
            head, more = self._closed_form.fit(self.weights, "the last head") or (None, [])
            answers += more
            if head is not None:
                self._set_head(head, keeps=True)
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

        answers = self._roster.ask(Parcel("test", {}, self.weights), self.pace.pass_seconds(), "test")
        found = self._roster.parsed(answers, tested, "the test of board {} is dropped: {}")
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
