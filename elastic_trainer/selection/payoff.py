"""When a fit that trains everything should go on with the upper part of its network, by its own steps and losses.

Under the upper part, lower layers stay as they are. That does no harm where they were trained before (`vectors_moved`),
or once training everything lowers the loss no more (`has_settled`). And it must pay: a new step has to be compiled,
which takes about as long as the first call of the full one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.networks.tensors import restored
from elastic_trainer.timing.wall_time import median_ms

LATEST_STEPS = 50  # full ones, by which the time of one is judged
LATEST_CALLS = 100  # elastic ones, the same
TIMED_STEPS = 10  # full ones, without the first call, before anything is decided
COMPILED = 5  # times a step: a call that takes longer has compiled
COMPILING = 10  # times tracing the forward pass: compiling a step (4 to 15 were seen)
MARGIN = 2  # times what changing to the upper part takes, that it must save
SETTLED = 0.01  # of what the loss has fallen by so far
SELECTING = 0.1  # of what elastic steps save, for selections by importance
PAIRS, CLOSE = 8, 0.05  # of full and elastic steps; of a full step, by which a selection may miss what was asked


ALONE = "fit goes on as without ElasticTraining"


class Phase(Enum):
    """What the steps of a fit train, and what follows.

    | phase    | steps                               | until                               | then                      |
    |----------|-------------------------------------|-------------------------------------|---------------------------|
    | WAITS    | Keras' own, which are timed         | the upper part pays, or nothing can | COMPARES, LEFT            |
    | COMPARES | elastic ones and Keras' own in turn | enough of both are timed            | TRAINS, LEFT, or once more|
    |          |                                     |                                     | for another selection     |
    | TRAINS   | elastic ones                        | the end of the fit                  |                           |
    | LEFT     | Keras' own                          | the end of the fit                  |                           |

    A fit that decides by itself starts with WAITS, at rho 1 with LEFT, any other one with TRAINS.
    """

    WAITS, COMPARES, TRAINS, LEFT = range(4)


class Decision(NamedTuple):
    """The phase of a fit from now on, and why, in words; "": nothing is known yet."""

    phase: Phase
    why: str


def vectors_moved(vectors: Iterable[np.ndarray]) -> tuple[int, int]:
    """How many of the biases, scales and other vectors of a network have been trained, and how many there are.

    They start as zeros and ones, or as another constant, whatever the network is, and no training leaves them there.
    """
    vectors = [vector for vector in vectors if vector.size > 1]
    return sum(not np.isin(array, (0, 1)).all() and np.ptp(array) > 0 for array in vectors), len(vectors)


def has_settled(losses: Sequence[float]) -> bool:
    """Whether the later half of epochs, at least three, lowered the best loss by next to nothing of its fall so far."""
    half = len(losses) // 2
    if half < 3:
        return False
    before, later = min(losses[:-half]), min(losses[-half:])
    fallen = losses[0] - min(before, later)
    return fallen > 0 and before - later <= SETTLED * fallen


class Payoff:
    """Decides while everything trains, see the module's header.

    Args:
        rho: asked share of a full step's time.
        task: of a compiled model. Where its optimizer has made a step, weights may have moved in a fit before this one.
    """

    def __init__(self, rho: float, task: CompiledTask) -> None:
        vectors = [each.numpy() for each in task.model.trainable_variables if len(each.shape) == 1]
        self._rho, self._task, (self._moved, self._count) = rho, task, vectors_moved(vectors)
        self._is_new = int(task.model.optimizer.iterations.numpy()) == 0
        self._first_call_ms, self._step_ms = 0.0, deque[float](maxlen=LATEST_STEPS)
        self._losses: dict[str, list[float]] = {"val_loss": [], "loss": []}

    def record_call(self, call_ms: float, steps: int = 1) -> bool:
        """Note that a call trained `steps` full steps. Whether this is the first time that enough of them are timed."""
        if not self._first_call_ms:
            self._first_call_ms = call_ms
            return False
        self._step_ms.append(call_ms / steps)
        return len(self._step_ms) == TIMED_STEPS

    def record_epoch(self, logs: dict[str, Any]) -> None:
        """Note what Keras reports of an epoch, of its validation if there was one."""
        for name, losses in self._losses.items():
            if name in logs:
                losses.append(float(logs[name]))

    @property
    def evidence(self) -> str:
        """In words, by what weights are said to be trained or not."""
        if not self._count:
            return "it has no biases or scales that could show training"
        only = "only " if 2 * self._moved <= self._count else ""
        return f"{only}{self._moved} of {self._count} biases and scales have left the constants where they start"

    @property
    def looks_random(self) -> bool:
        """Whether most weights of a new network are as they were made."""
        return self._is_new and self._count > 0 and 2 * self._moved <= self._count

    @property
    def full_ms(self) -> float:
        """Wall time of a full step."""
        return statistics.median(self._step_ms)

    @cached_property
    def switching_ms(self) -> float:
        """What changing to the upper part takes: about as much as compiling the full step did.

        If an earlier fit has compiled that, tracing the forward pass says it.
        """
        if self._first_call_ms > COMPILED * self.full_ms:
            return self._first_call_ms - self.full_ms
        start = time.perf_counter()
        _ = self._task.variables  # traces it
        return COMPILING * 1e3 * (time.perf_counter() - start)

    def decide(self, steps_left: int) -> Decision:
        """What to do in the `steps_left` of the fit."""
        if len(self._step_ms) < TIMED_STEPS:
            return Decision(Phase.WAITS, "")
        saved_ms = (1 - self._rho) * steps_left * self.full_ms  # at most
        if saved_ms < MARGIN * self.switching_ms:
            cost = f"the {self.switching_ms / 1e3:.2g} s that measuring and compiling take"
            why = f"elastic steps could save {saved_ms / 1e3:.2g} s, less than twice {cost}"
            return Decision(Phase.LEFT, f"{why}; {ALONE}")
        follows = "its upper part trains from now on"
        if self._is_new and 2 * self._moved > self._count:
            return Decision(Phase.COMPARES, f"the network is pretrained ({self.evidence}); {follows}")
        name = "val_loss" if self._losses["val_loss"] else "loss"
        losses = self._losses[name]
        if has_settled(losses):
            gain = f"the latest {len(losses) // 2} of {len(losses)} hardly lowered {name}"
            why = f"everything has trained for {len(losses)} epochs, and {gain}"
            return Decision(Phase.COMPARES, f"{why}; {follows}")
        since = f"since {self.evidence}" if self._is_new else "since its optimizer has trained it before"
        return Decision(Phase.WAITS, f"everything trains until the loss settles, {since}")


class StepTimes:
    """Times of elastic steps, and of full ones in turn with them, in ms. They say what the table should have said.

    Args:
        pairs: how many of both make a comparison.

    Attributes:
        full: of each full step, with the wait for its batch.
        elastic: of each elastic step: with the wait for its batch, of that wait, and of what passed before.
    """

    def __init__(self, pairs: int = PAIRS) -> None:
        self._pairs, self.full = pairs, list[float]()
        self.elastic = deque[tuple[float, float, float]](maxlen=LATEST_CALLS)

    @property
    def is_done(self) -> bool:
        """Whether enough of both are timed."""
        return min(len(self.full), len(self.elastic)) >= self._pairs

    @property
    def wants_full(self) -> bool:
        """Whether the next step is to train everything."""
        return len(self.full) < len(self.elastic)

    def medians(self) -> tuple[float, float, float]:
        """Of a full and of an elastic step, with the wait for their batches, and of that wait."""
        elastic_ms, waiting_ms, _ = np.median(self.elastic, axis=0).tolist()
        full_ms = statistics.median(self.full)
        return full_ms, elastic_ms, min(waiting_ms, full_ms, elastic_ms)

    def decide(self) -> Decision:
        """Whether elastic steps are shorter than full ones; else they are not worth it."""
        full_ms, elastic_ms, waiting_ms = self.medians()
        if elastic_ms < (1 - CLOSE) * full_ms:
            return Decision(Phase.TRAINS, "")
        waiting = f", {waiting_ms:.3g} ms of them waiting for data" if waiting_ms > CLOSE * full_ms else ""
        return Decision(
            Phase.LEFT, f"elastic steps take {elastic_ms:.3g} ms, full ones {full_ms:.3g} ms{waiting}; {ALONE}"
        )

    def share(self, plain_ms: float) -> float | None:
        """Time of an elastic step over that of plain `fit`, whose steps take `plain_ms` and the same wait, with what
        passes between steps; None: there is no elastic step."""
        if not self.elastic:
            return None
        elastic_ms, waiting_ms, _ = np.median(self.elastic, axis=0).tolist()
        between_ms = statistics.fmean(ms for _, _, ms in self.elastic)  # rare and long at the start of an epoch
        return float((elastic_ms + between_ms) / (plain_ms + waiting_ms + between_ms))


def chosen_interval(selection_ms: float, epoch_ms: float, rho: float, fewest: float) -> float:
    """Epochs between two selections, at least `fewest`, such that they take at most `SELECTING` of what steps save."""
    saved_ms = SELECTING * (1 - rho) * epoch_ms
    return max(float(np.ceil(selection_ms / saved_ms)), fewest) if saved_ms > 0 else fewest


def plain_step_ms(task: CompiledTask, batch: Batch) -> float:
    """Wall time in ms of a step of plain `fit`, without what `next` takes to get a batch that is there.

    The model and its optimizer do not change.
    """
    model, current = task.model, task.model.train_function
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model.make_train_function(force=True)
    plain, model.train_function = model.train_function, current
    values = keras.utils.pack_x_y_sample_weight(batch.inputs, batch.targets, batch.weights)
    # As Keras makes them: tf.data takes a list for one array.
    iterator = iter(tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(values)).repeat())

    def step() -> object:
        return next(iter(plain(iterator).values())).numpy()  # waits for the device

    with restored([*model.trainable_variables, *model.optimizer.variables], task.variables.written):
        step()  # compiles
        return median_ms(step) / model.steps_per_execution - median_ms(lambda: next(iterator))
