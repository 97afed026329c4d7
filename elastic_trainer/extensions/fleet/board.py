"""A board of a fleet: it answers what the server asks, by what it learns from its own photos, which stay on it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.messages import SPEED, About, Parcel, sums_arrays
from elastic_trainer.extensions.fleet.rounds import BoardSetup, RoundClock, RoundOver, RoundScheme
from elastic_trainer.files import atomic_path
from elastic_trainer.networks.tensors import all_mask
from elastic_trainer.runs.checkpoint import State
from elastic_trainer.runs.config import is_same_network, network_record
from elastic_trainer.task import ImageClassification
from elastic_trainer.trainer import Trainer
from elastic_trainer.training.closed_form_head import head_features
from elastic_trainer.training.feature_sums import FeatureSums, Head, held_back, held_losses
from elastic_trainer.training.optimizers import optimizer_of

if TYPE_CHECKING:
    import keras

PROBE_STEPS = 6  # before the first round
HELD = "held_features", "held_labels"
ABSENT = -1e4  # added to the logits of a class
EPOCHS = 1_000_000  # of a board's training, which ends with the fleet
NO_CLOSED_FORM = "the network does not end in a dense layer that returns the logits, so its head has no closed form"


def sent_names(model: keras.Model) -> list[str]:
    """The names, as in `Trainer.state`, of the variables that server and boards send: all that are not counts."""
    return [f"model/{k}" for k, variable in enumerate(model.variables) if "float" in str(variable.dtype)]


def trained_names(model: keras.Model) -> list[str]:
    """Those of `model.trainable_variables`, in their order."""
    places = {id(variable): k for k, variable in enumerate(model.variables)}
    return [f"model/{places[id(variable)]}" for variable in model.trainable_variables]


class OwnClasses(ImageClassification):
    """A board's loss: classes of which it has no photos are left out of it (FedRS, Li and Zhan, KDD 2021).

    Else each board that lacks a class would teach the fleet that there is none.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._added = tf.Variable(tf.zeros(model.output_shape[-1]), trainable=False)  # to logits in training

    def follow(self, labels: np.ndarray) -> None:
        """Leave out of the loss the classes that are not among the `labels`, int [photos]."""
        counts = np.bincount(labels, minlength=self._added.shape[0])
        self._added.assign(np.where(counts > 0, 0.0, ABSENT).astype(np.float32))

    def loss(self, inputs: Any, targets: Any, weights: Any, outputs: Any, training: bool) -> tf.Tensor:
        logits = tf.cast(outputs, tf.float32)
        return super().loss(inputs, targets, weights, logits + self._added if training else logits, training)


class Board:
    """One board. `handle` answers the messages of a server (`messages`).

    Args:
        name: in the server's messages and records.
        make: from the server's words of a command line, and its class names, what this board trains.
        clock: of its rounds.
        say: prints a line.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Sequence[str], Sequence[str]], BoardSetup],
        clock: RoundClock,
        say: Callable[[str], object] = print,
    ) -> None:
        self.name, self.clock = name, clock
        self._make, self._say = make, say
        self._ready_for: Any = None  # words and class names of the server
        self._held: tuple[np.ndarray, np.ndarray] | None = None  # features and labels that no head is fitted to
        self._round_seconds: float | None = None  # of the latest round
        self._fixed: dict[str, np.ndarray] = {}  # of the server's arrays, those that never train

    def handle(self, parcel: Parcel) -> Parcel:
        """The reply to a message. Raises `UserError` for what the server should know."""
        answers = {
            "hello": self._hello,
            "sums": self._sums,
            "losses": self._losses,
            "train": self._train,
            "test": lambda parcel: Parcel("tested", self._tested(parcel.arrays)),
            "end": lambda parcel: Parcel("bye"),
        }
        if parcel.kind not in answers:
            raise UserError(f"this board does not know '{parcel.kind}'; use the server's version of the program")
        if parcel.kind not in ("hello", "end") and self._ready_for is None:
            raise UserError("this board has started again and does not know the network yet")
        return answers[parcel.kind](parcel)

    def kept(self) -> Parcel:
        """What another process needs to go on as this board (`go_on`)."""
        values = {"asked": self._ready_for, "seconds": self._round_seconds, "ratios": self.clock.ratios}
        held = {} if self._held is None else dict(zip(HELD, self._held, strict=True))
        return Parcel("board", values, {**held, **self._fixed})

    def go_on(self, kept: Parcel) -> None:
        """Go on as the board that kept this, which has heard of a server's network."""
        arrays = dict(kept.arrays)
        if HELD[0] in arrays:
            self._held = arrays.pop(HELD[0]), arrays.pop(HELD[1])
        self._fixed, self.clock.ratios = arrays, kept.values["ratios"]
        if kept.values["asked"] is not None:
            words, class_names = kept.values["asked"]
            self._start(self._make(words, class_names))
            self._load(arrays)
            self._ready_for, self._round_seconds = (words, class_names), kept.values["seconds"]

    def get_ready(self, seconds: float | None = None) -> None:
        """Compile what a round of so many `seconds` trains, or one like the latest, if that is not compiled yet."""
        seconds = seconds or self._round_seconds
        if self._ready_for is not None and seconds is not None:
            self._probe(seconds, 1)

    def save_model(self, arrays: Mapping[str, np.ndarray], path: Path) -> bool:
        """Save the network with the server's weights, if it sent some; whether it did."""
        from elastic_trainer.networks.saved_model import save_model

        if self._ready_for is None or not arrays:
            return False
        self._load(arrays)
        with atomic_path(path) as temporary:
            save_model(self.trainer.task.model, temporary)
        return True

    # --- answers ------------------------------------------------------------------------------------------------------

    def _hello(self, parcel: Parcel) -> Parcel:
        """Get ready for the server's network; what a pass over the photos takes here."""
        wanted = (parcel.values["words"], parcel.values["class_names"])
        if self._ready_for != wanted:
            self._ready_for = None
            self._start(self._make(*wanted))
        self._ready_for = None  # until its network is known to be the server's
        model, data = self.trainer.task.model, self.trainer.data
        own = {name: model.variables[int(name.partition("/")[2])].shape for name in sent_names(model)}
        if own != {name: array.shape for name, array in parcel.arrays.items()}:
            raise UserError("the server's network has other tensors than this board's; use the same version of both")
        network = parcel.values.get("network")  # of the user's own code, of which each board has a copy
        if network and is_same_network(network_record(model), network, ["inference", "training"]) is False:
            raise UserError("the server's network computes something else than this board's; use the same file on both")
        self._load(parcel.arrays)
        self._ready_for, trained = wanted, {*trained_names(model)}
        self._fixed = {name: array for name, array in parcel.arrays.items() if name not in trained}
        return Parcel("ready", About(self.name, data.train_count, data.test_count, **self._speed())._asdict())

    def _speed(self) -> dict[str, float]:
        """What a pass over the photos takes here, by the latest rounds."""
        masks = all_mask(self.trainer.task.model), self._scheme.head
        return dict(zip(SPEED, map(self._scheme.pass_seconds, masks), strict=True))

    def _start(self, setup: BoardSetup) -> None:
        self.trainer, self._scheme = round_trainer(setup, self.clock)
        self._labels = setup.data.training_labels

    def _load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the server's weights. Momentum, which is of earlier ones, starts at 0."""
        now = self.trainer.state().arrays
        ours = [name for name in now if name.startswith("optimizer/") and now[name].dtype.kind == "f"]
        slots = {name: np.zeros_like(now[name]) for name in ours}
        known = {name: array for name, array in arrays.items() if name in now}
        self.trainer.load(State({**known, **slots}, {}))

    def _sums(self, parcel: Parcel) -> Parcel:
        """Sums of features of the photos: of those that a head is fitted to first, and of all."""
        self._load(parcel.arrays)
        found = head_features(self.trainer.task, self.trainer.data)
        if found is None:
            return Parcel("sums", {"none": NO_CLOSED_FORM})
        layer, features, labels = found
        is_held = held_back(labels)
        self._held = features[is_held], labels[is_held]
        first = FeatureSums.of(features[~is_held], labels[~is_held], layer.units)
        whole = FeatureSums.of(features, labels, layer.units)
        return Parcel("sums", {}, {**sums_arrays("first_", first), **sums_arrays("all_", whole)})

    def _losses(self, parcel: Parcel) -> Parcel:
        """The losses of the server's heads on the photos that none of them was fitted to."""
        if self._held is None:
            raise UserError("this board has started again and has no features")
        (features, labels), self._held = self._held, None
        heads = [Head(*pair) for pair in zip(parcel.arrays["kernels"], parcel.arrays["biases"], strict=True)]
        if self._round_seconds is None:
            self._probe(parcel.values["seconds"], PROBE_STEPS)
            self._probe(parcel.values["seconds"], 1)
        return Parcel("losses", {}, {"losses": held_losses(heads, features, labels)} if len(labels) else {})

    def _tested(self, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Loss and accuracy of the server's model on this board's test photos."""
        self._load(weights)
        return {"test": self.trainer.evaluate(), "test_images": self.trainer.data.test_count}

    def _train(self, parcel: Parcel) -> Parcel:
        """A round, from the server's weights up to its deadline; the changes of the tensors that trained."""
        values, before, clock, trainer = parcel.values, parcel.arrays, self.clock, self.trainer
        self._round_seconds = values["seconds"]
        clock.start(values["seconds"])
        self._load(before)
        steps = self.train_steps(values["rate"])
        after, selection = trainer.state().arrays, trainer.history.selection
        tensors = trained_names(trainer.task.model)
        changes = {
            name: (after[name].astype(np.float32) - before[name]).astype(values["changes"])
            for name, trains in zip(tensors, selection.mask, strict=True)
            if trains
        }
        self._say(
            f"round {values['round']}: {steps} steps of {len(changes)} of {len(tensors)} tensors in "
            f"{clock.spent:.1f} s of {values['seconds']:.1f} s"
        )
        losses = [result.loss for result in trainer.history.results[-steps:]]
        results = {
            "steps": steps,
            "seconds": clock.spent,
            "predicted_step_ms": selection.predicted_step_ms,
            "step_ms": clock.slowdown * statistics.median(selection.step_ms) if selection.step_ms else None,
            "loss": float(np.mean(losses)) if losses else None,
            **self._speed(),
        }
        return Parcel("trained", results, changes)

    def train_steps(self, rate: float, max_steps: int = EPOCHS) -> int:
        """Train at this rate until the clock ends the round, at most `max_steps`; returns how many steps there were."""
        trainer, first = self.trainer, self.trainer.history.step
        trainer.training.optimizer.learning_rate = rate
        task = trainer.training.task
        assert isinstance(task, OwnClasses), "it is that of `round_trainer`"
        task.follow(self._labels)  # simulated boards share it
        self._scheme.start_round(first)
        with contextlib.suppress(RoundOver):
            trainer.run(first + max_steps)
        self.clock.note(trainer.history.selection)
        return trainer.history.step - first

    def _probe(self, seconds: float, steps: int) -> None:
        """Compile the step of a round that lasts so long, and measure the real speed; no weight changes."""
        self.clock.start(seconds, is_limit=False)
        self.train_steps(0.0, steps)


def round_trainer(setup: BoardSetup, clock: RoundClock) -> tuple[Trainer, RoundScheme]:
    """The trainer of a board, and its scheme. The rate is set in each round."""
    settings = replace(
        setup.settings,
        num_epochs=EPOCHS,
        max_steps=None,
        validation_share=0.0,
        feature_cache="off",
        warmup=0.0,
        average_head=False,
        importance_batches=1,
    )
    usual = optimizer_of(settings, 1, setup.model)
    optimizer = type(usual).from_config({**usual.get_config(), "learning_rate": 0.0})
    task = OwnClasses(setup.model)
    scheme = RoundScheme(task, setup._replace(settings=settings), clock)
    return Trainer(task, setup.data, scheme, settings, [clock], optimizer=optimizer, memory=setup.memory), scheme
