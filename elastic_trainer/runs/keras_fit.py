"""One fit of a Keras model under `ElasticTraining`: the phase it is in, its engine, and how long its steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from elastic_trainer.datasets.batches import UNKNOWN_STEPS, Batch, FitData
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.profiling.tables import estimated_table
from elastic_trainer.runs.engine import Engine
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.selection.elastic import ElasticScheme
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.selection.payoff import (
    ALONE,
    CLOSE,
    MARGIN,
    Decision,
    Payoff,
    Phase,
    StepTimes,
    chosen_interval,
    plain_step_ms,
)
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table import TimingTable, sharpened

CORRECTIONS = 2  # selections that follow the first one because steps took longer or shorter than asked


class Asked(NamedTuple):
    """What `ElasticTraining` was asked for; `decides`: when to train elastically, and whether, is left to it."""

    settings: Settings
    scheme: str
    table: TimingTable | None
    decides: bool
    verbose: int

    def say(self, text: str) -> None:
        """Print a line between Keras' lines."""
        if self.verbose:
            print(f"\nElasticTraining: {text}")


class Fit:
    """When the steps of a fit are elastic ones, see `Phase`.

    Attributes:
        phase: the present one.
        elastic: its elastic steps; None before its first step.
    """

    def __init__(
        self, model: keras.Model, params: dict[str, Any], asked: Asked, keras_function: Callable[[Any], dict[str, Any]]
    ) -> None:
        self.model, self.phase = model, Phase.WAITS if asked.decides else Phase.TRAINS
        self._params, self._asked, self._keras_function = params, asked, keras_function
        self.elastic: ElasticSteps | None = None  # before the first step, and …
        self._payoff: Payoff  # … this from then on
        self._times, self._said = StepTimes(), ""
        self._first_epoch: int | None = None
        self._epoch = self._epoch_steps = 0
        self._last_end_ms = self._tail_ms = 0.0  # when a call ended; from the last of an epoch to the end of its steps
        if asked.decides and asked.settings.rho == 1:
            self._follow(Decision(Phase.LEFT, f"rho 1 trains everything; {ALONE}"))

    @property
    def engine(self) -> Engine | None:
        """None before the first elastic step."""
        return None if self.elastic is None else self.elastic.engine

    @property
    def share(self) -> float | None:
        """Time of a step over that of plain `fit`; None: not known, or left alone."""
        if self.phase is Phase.LEFT or self.elastic is None or self.elastic.plain_ms is None:
            return None
        return self._times.share(self.elastic.plain_ms)

    def begin_epoch(self, epoch: int) -> None:
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        self._epoch, self._epoch_steps = epoch, 0
        self._last_end_ms, self._tail_ms = _now_ms() - self._tail_ms, 0.0
        self.mark_stale()  # callbacks such as SwapEMAWeights assign weights between epochs

    def end_steps(self) -> None:
        """The steps of an epoch are over; what Keras does next, such as validating, is not counted as theirs."""
        self._tail_ms = self._tail_ms or _now_ms() - self._last_end_ms

    def mark_stale(self) -> None:
        """Weights may have changed since the last elastic step."""
        if self.elastic is not None:
            self.elastic.is_stale = True

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        self.end_steps()
        epochs_left = self._params["epochs"] - epoch - 1
        if self.elastic is not None and self.elastic.engine is not None:
            self.elastic.end_epoch()
        elif self.phase is Phase.WAITS and self._epoch_steps and epochs_left:
            self._payoff.record_epoch(logs)
            self._follow(self._payoff.decide(epochs_left * self._epoch_steps))

    def end(self) -> None:
        """Say what came of it."""
        if self.phase is Phase.WAITS:
            self._asked.say("everything has trained to the end, as in plain fit")
        if self.share is not None:
            self._asked.say(f"steps took {self.share:.2f} of plain fit's time (asked: {self._asked.settings.rho:g})")

    def _follow(self, decision: Decision) -> None:
        """Do as decided from now on, and say why, once."""
        self.phase = decision.phase
        if decision.why and decision.why != self._said:
            self._said = decision.why
            self._asked.say(decision.why)

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train as many batches as Keras asks for at once."""
        if self.phase is Phase.LEFT:
            return self._keras_function(iterator)
        if self.elastic is None:
            task = _checked_task(self.model, iterator.element_spec, self._asked.settings.memory is not None)
            self._payoff = Payoff(self._asked.settings.rho, task)
            self.elastic = ElasticSteps(task, self._asked, self._params, self._first_epoch or 0, self._payoff)
        if self.phase is Phase.WAITS or (self.phase is Phase.COMPARES and self._times.wants_full):
            return self._train_everything(iterator)
        if self.engine is None and self.elastic.task.head.all():
            alone = "every tensor belongs to the head, which always trains"
            why = alone if len(self.elastic.task.head) else "no tensor is trainable"
            self._follow(Decision(Phase.LEFT, f"{why}; {ALONE}"))
            return self._keras_function(iterator)
        try:
            return self._train_elastic(self.elastic, iterator)
        except UserError as error:  # it names the callback's arguments, not flags of a command
            raise UserError(str(error).replace("--", "")) from error

    def _train_everything(self, iterator: Any) -> dict[str, Any]:
        """One call of Keras' own function, timed; once enough are, decide if the number of steps is known."""
        start, count, steps = _now_ms(), self.model.steps_per_execution, self._params.get("steps")
        logs = self._keras_function(iterator)
        self._last_end_ms = _now_ms()
        call_ms = self._last_end_ms - start
        self._epoch_steps += count
        self.mark_stale()  # folded kernels have trained
        if self.phase is Phase.COMPARES:
            self._times.full.append(call_ms / count)
        elif self._payoff.record_call(call_ms, count) and steps:
            self._follow(self._payoff.decide((self._params["epochs"] - self._epoch) * steps - self._epoch_steps))
        return logs

    def _train_elastic(self, elastic: ElasticSteps, iterator: Any) -> dict[str, Any]:
        logs, count, waiting_ms, is_timed, start = None, 0, 0.0, True, _now_ms()
        for _ in range(self.model.steps_per_execution):
            asked, values = _now_ms(), next(iterator, None)
            if values is None:
                break
            waiting_ms += _now_ms() - asked
            logs, is_warm = elastic.step(values)
            count, is_timed = count + 1, is_timed and is_warm
        if logs is None:
            raise StopIteration
        between_ms, self._last_end_ms = start - self._last_end_ms, _now_ms()
        if is_timed:
            step_ms = (self._last_end_ms - start) / count
            self._times.elastic.append((step_ms, waiting_ms / count, between_ms / count))
            if self.phase is Phase.COMPARES and self._times.is_done:
                self._follow(self._times.decide())
                if self.phase is Phase.TRAINS and elastic.correct(self._times):
                    self.phase, self._times = Phase.COMPARES, StepTimes()
        return logs


class ElasticSteps:
    """What the elastic steps of a fit train: its engine, and what the fit shows of itself while it runs.

    Args:
        task: of the fit's model.
        asked: what `ElasticTraining` was asked for.
        params: those of Keras' callbacks.
        first_epoch: the number of the fit's first epoch.
        payoff: has timed full steps, if it is to decide.

    Attributes:
        engine: None before the first step.
        is_stale: whether weights may have changed since the last step.
        plain_ms: time of a step of plain fit, without the wait for its batch; None: not known.
    """

    def __init__(
        self, task: CompiledTask, asked: Asked, params: dict[str, Any], first_epoch: int, payoff: Payoff
    ) -> None:
        self.task, self.is_stale, self._asked, self._payoff, self._first_epoch = task, True, asked, payoff, first_epoch
        self.engine: Engine | None = None
        self.plain_ms: float | None = None
        self._epochs, self._steps = max(params["epochs"] - first_epoch, 1), params.get("steps") or UNKNOWN_STEPS
        self._recent: deque[Batch] = deque(maxlen=asked.settings.importance_batches)
        self._corrections = 0

    def step(self, values: Any) -> tuple[dict[str, float], bool]:
        """Train on the `values` of an iterator: what the step reports, and whether it neither compiled nor measured."""
        inputs, targets, weights = _parts(values)
        batch = Batch(lambda: inputs, targets, weights)
        if self.engine is None or self.engine.history.step in self.engine.scheme.due:
            self.task.check_variables()
        engine = self.engine = self.engine or self._begin(batch)
        self._recent.append(batch)
        if self.is_stale:
            self.is_stale = not engine.training.refresh()
        count, passes = len(engine.history.selections), engine.scheme.pass_steps
        with engine.history.clocks.running("training"):
            result = engine.step(batch)
        if len(engine.history.selections) > count:
            self._asked.say(engine.history.selection.text(self.task.variables.used))
        return result.measures, result.step_ms is not None and engine.history.step not in passes

    def _begin(self, batch: Batch) -> Engine:
        """The engine of a fit whose first elastic batch this is."""
        task, (settings, scheme, table, decides, _) = self.task, self._asked
        settings = replace(settings, num_epochs=self._epochs)
        data = FitData(self._steps, len(batch), self._recent)
        if not decides and settings.memory is None and settings.rho < 1:
            self.plain_ms = plain_step_ms(task, batch)
        if table is None:
            table = estimated_table(task, task.model.optimizer, len(batch), self._payoff.full_ms if decides else None)
            # An estimate is no reason to end a fit.
            settings = replace(settings, rho=max(settings.rho, smallest_rho(table, task.head)))
        engine = Engine(task, data, scheme, settings, table)
        engine.training.folds = settings.rho < 1  # else plain fit, bit for bit
        engine.plan(self._steps, self._first_epoch)
        if not decides and settings.rho < 1 and self._payoff.looks_random:
            told = self._payoff.evidence
            self._asked.say(f"lower layers that do not train may keep their random weights: only {told}")
        return engine

    def end_epoch(self) -> None:
        """Plan by what the epoch has shown, if it was not known: how many steps it has, and what a selection takes."""
        engine = self.engine
        if engine is None or not engine.history.results:
            return
        engine.history.record_epoch({}, is_running=True)
        scheme, steps, selection = engine.scheme, engine.schedule.steps_per_epoch, engine.history.selection
        chooses = SCHEMES[self._asked.scheme].importance is not None
        if chooses and isinstance(scheme, ElasticScheme) and scheme.settings.interval is None:
            epoch_ms = (selection.full_step_ms or 0.0) * engine.history.step
            selecting_ms = 1e3 * sum(selection.seconds.values())
            interval = chosen_interval(selecting_ms, epoch_ms, self._asked.settings.rho, Settings.interval)
            engine.settings = scheme.settings = replace(scheme.settings, interval=interval)
        elif steps != UNKNOWN_STEPS:
            return
        engine.plan(engine.history.step if steps == UNKNOWN_STEPS else steps, self._first_epoch)

    def correct(self, times: StepTimes) -> bool:
        """Correct the table by full and elastic steps in turn if these missed what was asked: it selects again then."""
        assert self.engine is not None and isinstance(self.engine.scheme, ElasticScheme)
        history, scheme, (full_ms, elastic_ms, waiting_ms) = self.engine.history, self.engine.scheme, times.medians()
        self.plain_ms, off = full_ms - waiting_ms, abs(elastic_ms / full_ms - self._asked.settings.rho)
        saved_ms = (self.engine.schedule.total_steps - history.step) * off * full_ms
        pays = saved_ms >= MARGIN * 1e3 * sum(history.selection.seconds.values())
        if off <= CLOSE or not pays or self._corrections == CORRECTIONS:
            return False
        self._corrections += 1
        table = scheme.budget.table.scaled(self.plain_ms / scheme.budget.table.full_step_ms)
        scheme.follow(sharpened(table, history.selection.mask, elastic_ms - waiting_ms), history.step)
        return True


def _checked_task(model: keras.Model, specs: Any, is_limited: bool) -> CompiledTask:
    """What a fit of `model` trains on batches of `specs`.

    Raises:
        UserError: as of `CompiledTask`; or they are not dense, or with a limit of memory, not of one shape.
    """
    parts = _parts(specs)
    for spec in tf.nest.flatten(parts):
        if spec is not None and (not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None):
            raise UserError(
                f"ElasticTraining needs dense tensors of a known rank, not {spec}; convert them in the data "
                "(to_tensor of a ragged one, tf.sparse.to_dense) before the model"
            )
        if is_limited and spec is not None and None in spec.shape[1:]:
            raise UserError(f"memory: needs examples of one shape, not {spec}; leave it out, or pad them")
    task = CompiledTask(model, *parts)
    task.allows_infinite_loss = True  # as `fit` does; keras.callbacks.TerminateOnNaN ends it
    return task


def _now_ms() -> float:
    return 1e3 * time.perf_counter()


def _parts(values: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of values or specs of an iterator of Keras; None for a missing part.

    Keras puts an empty `tf.experimental.Optional` there.
    """
    missing = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
    given = tf.nest.map_structure(lambda part: None if isinstance(part, missing) else part, values)
    return keras.utils.unpack_x_y_sample_weight(given)
