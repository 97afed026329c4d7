"""A board of a fleet: it answers what the server asks, by what it learns from its own photos, which stay on it."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.first_round import both_sums, losses_of
from elastic_trainer.extensions.fleet.parcel import Parcel
from elastic_trainer.extensions.fleet.rounds import RoundBudget, RoundClock, RoundOver, RoundScheme
from elastic_trainer.files import atomic_path
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.runs.checkpoint import State
from elastic_trainer.runs.config import is_same_network, network_record
from elastic_trainer.settings import Settings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.trainer import Trainer
from elastic_trainer.training.closed_form_head import head_features, held_back
from elastic_trainer.training.optimizers import optimizer_of

if TYPE_CHECKING:
    import keras

RESERVE = 0.03  # of a round, for its last step and the reply
TRIED_STEPS = 6  # before the first round
EPOCHS = 1_000_000  # of a board's training, which ends with the fleet
NO_CLOSED_FORM = "the network does not end in a dense layer that returns the logits, so its head has no closed form"


class Made(NamedTuple):
    """What a board trains: a network, its photos, its timing table, settings of training, and MB that measuring took
    and training takes again."""

    model: keras.Model
    data: ImageData
    table: TimingTable
    settings: Settings
    freed_mb: float = 0.0


def sent_names(model: keras.Model) -> list[str]:
    """The names, as in `Trainer.state`, of the variables that server and boards send: all that are not counts."""
    return [f"model/{k}" for k, variable in enumerate(model.variables) if "float" in str(variable.dtype)]


def trained_names(model: keras.Model) -> list[str]:
    """Those of `model.trainable_variables`, in their order."""
    places = {id(variable): k for k, variable in enumerate(model.variables)}
    return [f"model/{places[id(variable)]}" for variable in model.trainable_variables]


class Board:
    """One board. `handle` answers the messages of a server.

    A subclass may select by another `scheme`.

    Args:
        name: in the server's messages and records.
        make: from the server's words of a command line, and its class names, what this board trains.
        slowdown: pretend to be so many times slower.
        say: prints a line.
    """

    scheme = RoundScheme

    def __init__(
        self,
        name: str,
        make: Callable[[Sequence[str], Sequence[str]], Made],
        slowdown: float = 1.0,
        say: Callable[[str], object] = print,
    ) -> None:
        self._name, self._make, self._slowdown, self._say = name, make, slowdown, say
        self._made_for: Any = None
        self._held: tuple[np.ndarray, np.ndarray] | None = None
        self._seconds: float | None = None  # of the latest round

    def handle(self, parcel: Parcel) -> Parcel:
        """The reply to a message. Raises `UserError` for what the server should know."""
        answers = {
            "hello": self._hello,
            "sums": self._sums,
            "losses": self._losses,
            "train": self._train,
            "test": self._test,
            "end": lambda parcel: Parcel("bye"),
        }
        if parcel.kind not in answers:
            raise UserError(f"this board does not know '{parcel.kind}'; use the server's version of the program")
        if parcel.kind not in ("hello", "end") and self._made_for is None:
            raise UserError("this board has started again and does not know the network yet")
        return answers[parcel.kind](parcel)

    def get_ready(self) -> None:
        """Compile what the next round will train, if that is something else: while messages are on their way."""
        if self._made_for is not None and self._seconds is not None:
            self._run(self._seconds, 0.0, 1)

    def save_model(self, arrays: Mapping[str, np.ndarray], path: Path) -> bool:
        """Save the network with the server's weights, if it sent some; whether it did."""
        from elastic_trainer.networks.saved_model import save_model

        if self._made_for is None or not arrays:
            return False
        self._load(arrays)
        with atomic_path(path) as temporary:
            save_model(self._model, temporary)
        return True

    def _hello(self, parcel: Parcel) -> Parcel:
        """Get ready for the server's network; what a pass over the photos takes here."""
        wanted = (parcel.values["words"], parcel.values["class_names"])
        if self._made_for != wanted:
            self._made_for = None
            self._start(self._make(*wanted))
            self._made_for = wanted
        sent = {name: array.shape for name, array in parcel.arrays.items()}
        arrays = self._trainer.state().arrays
        if sent != {name: arrays[name].shape for name in sent_names(self._model)}:
            self._made_for = None
            raise UserError("the server's network has other tensors than this board's; use the same version of both")
        network = parcel.values.get("network")  # of the user's own code, of which each board has a copy
        if network and is_same_network(network_record(self._model), network, ["inference", "training"]) is False:
            self._made_for = None
            raise UserError("the server's network computes something else than this board's; use the same file on both")
        self._load(parcel.arrays)
        data, masks = self._trainer.data, {"full": all_mask(self._model), "head": self._head}
        counts = {"images": data.train_count, "test_images": data.test_count}
        takes = {f"{name}_seconds": self._budget.full_pass_ms(mask) / 1e3 for name, mask in masks.items()}
        return Parcel("ready", {"name": self._name, **counts, **takes})

    def _start(self, made: Made) -> None:
        self._model, self._head = made.model, head_mask(made.model)
        self._budget = RoundBudget(made.table, self._head, made.data.steps_per_epoch, self._slowdown)
        self._clock = RoundClock(self._slowdown)
        self._trainer, self._scheme = round_trainer(made, self.scheme, self._budget, self._clock)

    def _load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the server's weights. Momentum, which is of earlier ones, starts at 0."""
        now = self._trainer.state().arrays
        ours = [name for name in now if name.startswith("optimizer/") and now[name].dtype.kind == "f"]
        slots = {name: np.zeros_like(now[name]) for name in ours}
        known = {name: array for name, array in arrays.items() if name in now}
        self._trainer.load(State({**known, **slots}, {}))

    def _sums(self, parcel: Parcel) -> Parcel:
        """Sums of features of the photos: of those that a head is fitted to first, and of all."""
        self._load(parcel.arrays)
        found = head_features(self._trainer.task, self._trainer.data)
        if found is None:
            return Parcel("sums", {"none": NO_CLOSED_FORM})
        layer, features, labels = found
        is_held = held_back(labels)
        self._held = features[is_held], labels[is_held]
        return Parcel("sums", {}, both_sums(features, labels, is_held, layer.units))

    def _losses(self, parcel: Parcel) -> Parcel:
        """The losses of the server's heads on the photos that none of them was fitted to."""
        if self._held is None:
            raise UserError("this board has started again and has no features")
        losses = losses_of(parcel.arrays, *self._held)
        self._held = None
        self._run(parcel.values["seconds"], 0.0, TRIED_STEPS)  # how fast is this board really?
        self._run(parcel.values["seconds"], 0.0, 1)
        return Parcel("losses", {}, {"losses": losses})

    def _test(self, parcel: Parcel) -> Parcel:
        """Loss and accuracy of the server's model on this board's test photos."""
        self._load(parcel.arrays)
        return Parcel("tested", {"test": self._trainer.evaluate(), "test_images": self._trainer.data.test_count})

    def _run(self, seconds: float, rate: float, most: int = EPOCHS, spent: float = 0.0) -> int:
        """Train for so many seconds, in at most so many steps, what fits into that time; returns how many there were.

        Of the time, `spent` seconds have passed. At rate 0 no weight changes, but the step is compiled and measured.
        """
        trainer, seconds = self._trainer, seconds - spent
        first, end = trainer.history.step, time.perf_counter() + (1 - RESERVE) * seconds
        trainer.training.optimizer.learning_rate = rate
        self._clock.end = end if most == EPOCHS else math.inf
        self._budget.seconds = seconds
        self._scheme.start_round(first)
        with contextlib.suppress(RoundOver):
            trainer.run(first + most)
        self._budget.note(trainer.history.intervals[-1].step_ms)
        return trainer.history.step - first

    def _train(self, parcel: Parcel) -> Parcel:
        """A round, from the server's weights up to its deadline; the changes of the tensors that trained."""
        start, trainer, values = time.perf_counter(), self._trainer, parcel.values
        self._load(parcel.arrays)
        tested = {"test": trainer.evaluate(), "test_images": trainer.data.test_count} if values["tests"] else {}
        self._seconds = values["seconds"]
        steps = self._run(values["seconds"], values["rate"], spent=time.perf_counter() - start)
        changes = self._changes(parcel.arrays, values["changes"])
        seconds = time.perf_counter() - start
        trained = f"{steps} steps of {len(changes)} of {len(self._head)} tensors"
        self._say(f"round {values['round']}: {trained} in {seconds:.1f} s of {values['seconds']:.1f} s")
        results = results_of_round(trainer, steps, self._slowdown)
        return Parcel("trained", {**tested, **results, "seconds": seconds}, changes)

    def _changes(self, before: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
        """What the latest round has changed of the weights `before` it: the tensors that trained, of this type."""
        after, mask = self._trainer.state().arrays, self._trainer.history.selection.mask
        names = [name for name, trains in zip(trained_names(self._model), mask, strict=True) if trains]
        return {name: (after[name].astype(np.float32) - before[name]).astype(kind) for name in names}


def round_trainer(
    made: Made, kind: type[RoundScheme], budget: RoundBudget, clock: RoundClock
) -> tuple[Trainer, RoundScheme]:
    """The trainer of a board, whose rate is set in each round, and its scheme, which is of this `kind`."""
    task, data = ImageClassification(made.model), made.data
    settings = replace(
        made.settings,
        num_epochs=EPOCHS,
        max_steps=None,
        validation_share=0.0,
        feature_cache="off",
        warmup=0.0,
        average_head=False,
    )
    scheme = kind(task, data, settings, budget)
    usual = optimizer_of(settings, 1, made.model)
    optimizer = type(usual).from_config({**usual.get_config(), "learning_rate": 0.0})
    trainer = Trainer(task, data, scheme, settings, [clock], optimizer=optimizer, freed_mb=made.freed_mb)
    return trainer, scheme


def results_of_round(trainer: Trainer, steps: int, slowdown: float) -> dict[str, Any]:
    """What a board says of its latest round of so many steps, beside its changes."""
    latest, results = trainer.history.intervals[-1], trainer.history.results[-steps:]
    return {
        "images": trainer.data.train_count,
        "steps": steps,
        "predicted_step_ms": latest.selection.predicted_step_ms,
        "step_ms": slowdown * statistics.median(latest.step_ms) if latest.step_ms else None,
        "loss": float(np.mean([result.loss for result in results])) if results else None,
    }
