"""One fit of a Keras model under `ElasticTraining`: the phase it is in, its engine, and how long its steps take."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

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
from elastic_trainer.timing.table import sharpened

CORRECTIONS = 2  # selections that follow the first one because steps took longer or shorter than asked


class Fit:
    """When the steps of a fit are elastic ones, see `Phase`. It is made at the first step.

    Args:
        callback: the `ElasticTraining` of the fit.
        specs: of what the iterator gives that Keras passes to a train function.
        epoch: the number of the fit's first epoch.

    Attributes:
        phase: the present one.
        task, payoff: of the model.
        elastic: its elastic steps; None before the first of them.
        epochs, steps: how many epochs it has, and how many steps an epoch.
    """

    def __init__(self, callback: Any, specs: Any, epoch: int) -> None:  # a type would be an import in a circle
        self.callback, self.phase = callback, Phase.WAITS if callback.decides else Phase.TRAINS
        self.task = _checked_task(callback.model, specs, callback.settings.memory is not None)
        self.payoff, self._times, self._said = Payoff(callback.settings.rho, self.task), StepTimes(), ""
        self.elastic: ElasticSteps | None = None
        self.first_epoch, self._last_epoch = epoch, callback.params["epochs"]
        self.epochs, self.steps = max(self._last_epoch - epoch, 1), callback.params.get("steps") or UNKNOWN_STEPS
        self._last_end_ms = self._tail_ms = 0.0  # when a call ended; from the last of an epoch to the end of its steps
        self.begin_epoch(epoch)

    @property
    def share(self) -> float | None:
        """Time of a step over that of plain `fit`; None: not known, or left alone."""
        if self.phase is Phase.LEFT or self.elastic is None or self.elastic.plain_ms is None:
            return None
        return self._times.share(self.elastic.plain_ms)

    def begin_epoch(self, epoch: int) -> None:
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
        epochs_left = self._last_epoch - epoch - 1
        if self.elastic is not None:
            self.elastic.end_epoch()
        elif self.phase is Phase.WAITS and self._epoch_steps and epochs_left:
            self.payoff.record_epoch(logs)
            self._follow(self.payoff.decide(epochs_left * self._epoch_steps))

    def end(self) -> None:
        """Say what came of it."""
        if self.phase is Phase.WAITS:
            self.callback.say("everything has trained to the end, as in plain fit")
        share, rho = self.share, self.callback.settings.rho
        if share is not None:
            self.callback.say(f"steps took {share:.2f} of plain fit's time (asked: {rho:g})")

    def _follow(self, decision: Decision) -> None:
        """Do as decided from now on, and say why, once."""
        self.phase = decision.phase
        if decision.why and decision.why != self._said:
            self._said = decision.why
            self.callback.say(decision.why)

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train as many batches as Keras asks for at once."""
        if self.phase in (Phase.TRAINS, Phase.COMPARES) and self.elastic is None and self.task.head.all():
            alone = "every tensor belongs to the head, which always trains"
            why = alone if len(self.task.head) else "no tensor is trainable"
            self._follow(Decision(Phase.LEFT, f"{why}; {ALONE}"))
        if self.phase is Phase.LEFT:
            return self.callback.keras_function(iterator)
        if self.phase is Phase.WAITS or (self.phase is Phase.COMPARES and self._times.wants_full):
            return self._train_everything(iterator)
        try:
            return self._train_elastic(iterator)
        except UserError as error:  # it names the callback's arguments, not flags of a command
            raise UserError(str(error).replace("--", "")) from error

    def _train_everything(self, iterator: Any) -> dict[str, Any]:
        """One call of Keras' own function, timed; once enough are, decide if the number of steps is known."""
        start, count = _now_ms(), self.task.model.steps_per_execution
        logs = self.callback.keras_function(iterator)
        self._last_end_ms = _now_ms()
        call_ms = self._last_end_ms - start
        self._epoch_steps += count
        self.mark_stale()  # folded kernels have trained
        if self.phase is Phase.COMPARES:
            self._times.full.append(call_ms / count)
        elif self.payoff.record_call(call_ms, count) and self.steps != UNKNOWN_STEPS:
            self._follow(self.payoff.decide((self._last_epoch - self._epoch) * self.steps - self._epoch_steps))
        return logs

    def _train_elastic(self, iterator: Any) -> dict[str, Any]:
        logs, count, waiting_ms, is_timed, start = None, 0, 0.0, True, _now_ms()
        for _ in range(self.task.model.steps_per_execution):
            asked, values = _now_ms(), next(iterator, None)
            if values is None:
                break
            waiting_ms += _now_ms() - asked
            batch = _batch_of(values)
            self.elastic = self.elastic or ElasticSteps(self, batch)
            logs, is_warm = self.elastic.step(batch)
            count, is_timed = count + 1, is_timed and is_warm
        if logs is None or self.elastic is None:
            raise StopIteration
        between_ms, self._last_end_ms = start - self._last_end_ms, _now_ms()
        if is_timed:
            step_ms = (self._last_end_ms - start) / count
            self._times.elastic.append((step_ms, waiting_ms / count, between_ms / count))
            if self.phase is Phase.COMPARES and self._times.is_done:
                self._follow(self._times.decide())
                if self.phase is Phase.TRAINS and self.elastic.correct(self._times):
                    self.phase, self._times = Phase.COMPARES, StepTimes()
        return logs


class ElasticSteps:
    """The elastic steps of a `fit` whose first elastic batch is `batch`, and what the fit shows of itself meanwhile.

    Attributes:
        engine: trains them.
        is_stale: whether weights may have changed since the last step.
        plain_ms: time of a step of plain fit, without the wait for its batch; None: not known.
    """

    def __init__(self, fit: Fit, batch: Batch) -> None:
        self._fit, self.is_stale, self._corrections = fit, True, 0
        self.plain_ms: float | None = None
        self._callback, task, payoff = fit.callback, fit.task, fit.payoff
        table, decides = fit.callback.table, fit.callback.decides
        task.check_variables()
        settings = replace(fit.callback.settings, num_epochs=fit.epochs)
        self._recent: deque[Batch] = deque(maxlen=settings.importance_batches)
        if not decides and settings.memory is None and settings.rho < 1:
            self.plain_ms = plain_step_ms(task, batch)
        if table is None:
            table = estimated_table(task, task.model.optimizer, len(batch), payoff.full_ms if decides else None)
            # An estimate is no reason to end a fit.
            settings = replace(settings, rho=max(settings.rho, smallest_rho(table, task.head)))
            if settings.rho > fit.callback.settings.rho:
                fit.callback.say(f"rho is {settings.rho:.2f}: by an estimate, training the head alone takes that")
        self.engine = Engine(task, FitData(fit.steps, len(batch), self._recent), fit.callback.scheme, settings, table)
        self.engine.training.folds = settings.rho < 1  # else plain fit, bit for bit
        self.engine.plan(fit.steps, fit.first_epoch)
        if not decides and settings.rho < 1 and payoff.looks_random:
            fit.callback.say(f"lower layers that do not train may keep their random weights: {payoff.evidence}")

    def step(self, batch: Batch) -> tuple[dict[str, float], bool]:
        """Train on `batch`: what the step reports, and whether it neither compiled nor measured."""
        engine = self.engine
        if engine.history.step in engine.scheme.due:
            self._fit.task.check_variables()
        self._recent.append(batch)
        if self.is_stale:
            self.is_stale = not engine.training.refresh()
        count, passes = len(engine.history.selections), engine.scheme.pass_steps
        with engine.history.clocks.running("training"):
            result = engine.step(batch)
        if len(engine.history.selections) > count:
            self._callback.say(engine.history.selection.text(self._fit.task.variables.used))
        return result.measures, result.step_ms is not None and engine.history.step not in passes

    def end_epoch(self) -> None:
        """Plan by what the epoch has shown, if it was not known: how many steps it has, and what a selection takes."""
        engine, asked = self.engine, self._callback
        if not engine.history.results:
            return
        engine.history.record_epoch({}, is_running=True)
        scheme, steps, selection = engine.scheme, engine.schedule.steps_per_epoch, engine.history.selection
        chooses = SCHEMES[asked.scheme].importance is not None
        if chooses and isinstance(scheme, ElasticScheme) and scheme.settings.interval is None:
            epoch_ms = (selection.full_step_ms or 0.0) * engine.history.step
            selecting_ms = 1e3 * sum(selection.seconds.values())
            interval = chosen_interval(selecting_ms, epoch_ms, asked.settings.rho, Settings.interval)
            engine.settings = scheme.settings = replace(scheme.settings, interval=interval)
        elif steps != UNKNOWN_STEPS:
            return
        engine.plan(engine.history.step if steps == UNKNOWN_STEPS else steps, self._fit.first_epoch)

    def correct(self, times: StepTimes) -> bool:
        """Correct the table by full and elastic steps in turn if these missed what was asked: it selects again then."""
        assert isinstance(self.engine.scheme, ElasticScheme)
        history, scheme, (full_ms, elastic_ms, waiting_ms) = self.engine.history, self.engine.scheme, times.medians()
        self.plain_ms, off = full_ms - waiting_ms, abs(elastic_ms / full_ms - self._callback.settings.rho)
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


def _batch_of(values: Any) -> Batch:
    inputs, targets, weights = _parts(values)
    return Batch(lambda: inputs, targets, weights)


def _now_ms() -> float:
    return 1e3 * time.perf_counter()


def _parts(values: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of values or specs of an iterator of Keras; None for a missing part.

    Keras puts an empty `tf.experimental.Optional` there.
    """
    missing = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
    given = tf.nest.map_structure(lambda part: None if isinstance(part, missing) else part, values)
    return keras.utils.unpack_x_y_sample_weight(given)
