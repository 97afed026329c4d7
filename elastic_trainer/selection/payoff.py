"""When a fit that trains everything should go on with the upper part of its network, by its own steps and losses.

Under the upper part, lower layers stay as they are. That does no harm where they were trained before (`vectors_moved`),
or once training everything lowers the loss no more (`has_settled`). And it must pay: a new step has to be compiled,
which takes about as long as the first call of the full one.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.networks.tensors import restored
from elastic_trainer.timing.wall_time import median_ms

LATEST_STEPS = 50  # full ones, by which the time of one is judged
TIMED_STEPS = 10  # full ones, without the first call, before anything is decided
COMPILED = 5  # times a step: a call that takes longer has compiled
COMPILING = 10  # times tracing the forward pass: compiling a step (4 to 15 were seen)
MARGIN = 2  # times what changing to the upper part takes, that it must save
SETTLED = 0.01  # of what the loss has fallen by so far
SELECTING = 0.1  # of what elastic steps save, for selections by importance
PAIRS, CLOSE = 8, 0.05  # of full and elastic steps; of a full step, by which a selection may miss what was asked


class Decision(NamedTuple):
    """What to do from now on, `goes` to the upper part or leave `fit` alone, and why, in words."""

    goes: bool
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
    """Decides for one fit, see the module's header.

    Args:
        rho: asked share of a full step's time.
        vectors: the vectors among the weights that train.
        is_new: whether the optimizer has made no step; else weights may have moved in a fit before this one.

    Attributes:
        evidence: in words, for or against weights that were trained before.
        tracing_ms: what tracing the forward pass took, where no call has compiled (`has_compiled`).
    """

    def __init__(self, rho: float, vectors: Iterable[np.ndarray], is_new: bool) -> None:
        self._rho, self._is_new, (moved, count) = rho, is_new, vectors_moved(vectors)
        self.looks_random = self._is_new and count > 0 and 2 * moved <= count
        self._is_pretrained = self._is_new and 2 * moved > count
        self.evidence = f"{moved} of {count} biases and scales have left the constants where they start"
        self.tracing_ms = 0.0
        self._first_call_ms: float | None = None
        self._step_ms, self._calls = deque[float](maxlen=LATEST_STEPS), 0
        self._has_said = False
        self._losses: dict[str, list[float]] = {"val_loss": [], "loss": []}

    @classmethod
    def of(cls, rho: float, model: keras.Model) -> Payoff:
        """That of a fit of a compiled model that starts now."""
        vectors = [each.numpy() for each in model.trainable_variables if len(each.shape) == 1]
        return cls(rho, vectors, int(model.optimizer.iterations.numpy()) == 0)

    def record_call(self, call_ms: float, steps: int = 1) -> bool:
        """Note that a call trained `steps` full steps. Whether this is the first time that enough of them are timed."""
        if self._first_call_ms is None:
            self._first_call_ms = call_ms
            return False
        self._step_ms.append(call_ms / steps)
        self._calls += 1
        return self._calls == TIMED_STEPS

    def record_epoch(self, logs: dict[str, Any]) -> None:
        """Note what Keras reports of an epoch, of its validation if there was one."""
        for name, losses in self._losses.items():
            if name in logs:
                losses.append(float(logs[name]))

    @property
    def full_ms(self) -> float:
        """Wall time of a full step."""
        return statistics.median(self._step_ms)

    @property
    def switching_ms(self) -> float:
        """What changing to the upper part takes: about as much as compiling the full step did, or by the tracing."""
        return max((self._first_call_ms or 0.0) - self.full_ms, COMPILING * self.tracing_ms, 0.0)

    @property
    def has_compiled(self) -> bool:
        """Whether the first call did; else an earlier fit has."""
        return (self._first_call_ms or 0.0) > COMPILED * self.full_ms

    def decide(self, steps_left: int) -> Decision | None:
        """What to do in the `steps_left` of the fit; None: train everything for longer."""
        if self._calls < TIMED_STEPS:
            return None
        left_ms = steps_left * self.full_ms
        if (1 - self._rho) * left_ms < MARGIN * self.switching_ms:
            cost = f"{self.switching_ms / 1e3:.0f} s of measuring and compiling"
            return Decision(False, f"{left_ms / 1e3:.0f} s of steps are too few to win back about {cost}")
        if self._is_pretrained:
            return Decision(True, f"the network is pretrained ({self.evidence})")
        name, losses = next((name, losses) for name, losses in self._losses.items() if losses or name == "loss")
        if has_settled(losses):
            half = len(losses) // 2
            gain = f"the latest {half} of {len(losses)} hardly lowered {name}"
            return Decision(True, f"everything has trained for {len(losses)} epochs, and {gain}")
        return None

    def waits_for(self) -> str | None:
        """Why everything trains for now, in words; None if that was said before, or is not known yet."""
        if self._is_pretrained or self._calls < TIMED_STEPS or self._has_said:
            return None
        self._has_said = True
        why = f"since only {self.evidence}" if self._is_new else "since its optimizer has trained it before"
        return f"everything trains until the loss settles, {why}"


class Comparison:
    """Full and elastic steps in turn, whose times say what the table should have said. `pairs` are still to come."""

    def __init__(self, pairs: int = PAIRS) -> None:
        self._pairs = pairs
        self._full_ms: list[float] = []
        self._elastic_ms: list[float] = []
        self._waiting_ms: list[float] = []

    @property
    def is_done(self) -> bool:
        return min(len(self._full_ms), len(self._elastic_ms)) >= self._pairs

    @property
    def wants_full(self) -> bool:
        """Whether the next step is to train everything."""
        return len(self._full_ms) < len(self._elastic_ms)

    def record_full(self, step_ms: float) -> None:
        """Note the time of a full step, with the wait for its batch."""
        self._full_ms.append(step_ms)

    def record_elastic(self, step_ms: float, waiting_ms: float) -> None:
        """Note the time of an elastic step, with how long its batch took to come."""
        self._elastic_ms.append(step_ms)
        self._waiting_ms.append(waiting_ms)

    @property
    def times_ms(self) -> tuple[float, float, float]:
        """Of a full and of an elastic step, with the wait for their batches, and of that wait."""
        full_ms, elastic_ms, waiting_ms = map(statistics.median, (self._full_ms, self._elastic_ms, self._waiting_ms))
        return full_ms, elastic_ms, min(waiting_ms, full_ms, elastic_ms)


def chosen_interval(selection_ms: float, epoch_ms: float, rho: float, fewest: float) -> float:
    """Epochs between two selections, at least `fewest`, such that they take at most `SELECTING` of what steps save."""
    saved_ms = SELECTING * (1 - rho) * epoch_ms
    return max(float(np.ceil(selection_ms / saved_ms)), fewest) if saved_ms > 0 else fewest


def plain_step_ms(task: CompiledTask, batch: Batch) -> float:
    """Wall time in ms of a step of plain `fit` on a batch that is there; the model and its optimizer do not change."""
    model = task.model
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    changed = [*model.trainable_variables, *model.optimizer.variables]
    with restored(changed, task.variables.written):
        return median_ms(_plain_step(model, batch)) / model.steps_per_execution


def _plain_step(model: keras.Model, batch: Batch) -> Callable[[], object]:
    """A call of what `model.fit` calls to train on a batch."""
    values = _as_tuples(keras.utils.pack_x_y_sample_weight(batch.inputs, batch.targets, batch.weights))
    iterator = iter(tf.data.Dataset.from_tensors(values).repeat())
    current = model.train_function
    model.make_train_function(force=True)
    plain, model.train_function = model.train_function, current
    plain(iterator)  # the first call compiles
    return lambda: next(iter(plain(iterator).values())).numpy()  # waits for the device


def _as_tuples(values: Any) -> Any:
    """`values` with tuples for lists, as Keras makes them: tf.data takes a list for one array."""
    if isinstance(values, list | tuple):
        return tuple(map(_as_tuples, values))
    return {key: _as_tuples(value) for key, value in values.items()} if isinstance(values, dict) else values
