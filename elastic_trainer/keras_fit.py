"""One fit of a Keras model under `ElasticTraining`: the phase it is in, its engine, and how long its steps take."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from elastic_trainer.datasets.batches import UNKNOWN_STEPS, Batch, FitData
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.runs.engine import Engine
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.selection.elastic import ElasticScheme
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.selection.payoff import CLOSE, MARGIN, Comparison, Payoff, chosen_interval, plain_step_ms
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.estimate import estimated_table, sharpened
from elastic_trainer.timing.table import TimingTable

CORRECTIONS = 2  # selections that follow the first one because steps took longer or shorter than asked
NOTHING = "no tensor is trainable"
LATEST_CALLS = 100  # elastic ones, by which the share of plain fit's time is judged


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
    """See the module's header. Phases as of `Phase`.

    Attributes:
        engine: None before the first elastic step.
        is_stale: whether weights may have changed since the last step.
    """

    def __init__(
        self, model: keras.Model, params: dict[str, Any], asked: Asked, keras_function: Callable[[Any], dict[str, Any]]
    ) -> None:
        self.model, self.is_stale, self.phase = model, True, Phase.WAITS if asked.decides else Phase.TRAINS
        self._params, self._asked, self._keras_function = params, asked, keras_function
        self.engine: Engine | None = None
        self._task: CompiledTask | None = None  # before the first step, and …
        self._payoff: Payoff  # … this from then on
        self._comparison = Comparison()
        self._first_epoch: int | None = None
        self._epoch = self._epoch_steps = self._corrections = 0
        self._recent: deque[Batch] = deque(maxlen=asked.settings.importance_batches)
        self._full_ms: float | None = None  # of a step of plain fit; if it decides, with the wait for its batch
        self._last_end_ms = 0.0  # of a call, or of what came before the epoch
        self._tail_ms: float | None = None  # from the last call of an epoch to the end of its steps
        # Of elastic steps: ms with the wait for the batch, of that wait, and between two calls.
        self._times: deque[tuple[float, float, float]] = deque(maxlen=LATEST_CALLS)
        if asked.decides and asked.settings.rho == 1:
            self._leave("rho 1 trains everything")

    @property
    def share(self) -> float | None:
        """Time of a step over that of plain `fit`; None: not known, or left alone."""
        if self.phase is Phase.LEFT or self._full_ms is None or not self._times:
            return None
        steps_ms, waits_ms, betweens_ms = zip(*self._times, strict=True)
        elastic_ms, waiting_ms = statistics.median(steps_ms), statistics.median(waits_ms)
        between_ms = statistics.fmean(betweens_ms)  # rare and long at the start of an epoch
        full_ms = self._full_ms + (0.0 if self._asked.decides else waiting_ms)
        return (elastic_ms + between_ms) / (full_ms + between_ms)

    def begin_epoch(self, epoch: int) -> None:
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        self._epoch, self._epoch_steps = epoch, 0
        if self.engine is not None:
            self._last_end_ms, self._tail_ms = _now_ms() - (self._tail_ms or 0.0), None
        self.is_stale = True  # callbacks such as SwapEMAWeights assign weights between epochs

    def end_steps(self) -> None:
        """The steps of an epoch are over; what Keras does next, such as validating, is not counted as theirs."""
        if self._tail_ms is None and self.engine is not None:
            self._tail_ms = _now_ms() - self._last_end_ms

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        self.end_steps()
        engine = self.engine
        if engine is not None and engine.history.results:
            engine.history.record_epoch({}, is_running=True)
            steps, is_chosen = engine.schedule.steps_per_epoch, self._choose_interval(engine)
            if steps == UNKNOWN_STEPS or is_chosen:
                engine.plan(engine.history.step if steps == UNKNOWN_STEPS else steps, self._first_epoch or 0)
        elif self.phase is Phase.WAITS and self._epoch_steps and epoch + 1 < self._params["epochs"]:
            self._payoff.record_epoch(logs)
            self._decide((self._params["epochs"] - epoch - 1) * self._epoch_steps)
            why = self._payoff.waits_for()
            if self.phase is Phase.WAITS and why is not None:
                self._asked.say(why)

    def end(self) -> None:
        """Say what came of it."""
        if self.phase is Phase.WAITS:
            self._asked.say("everything has trained to the end, as in plain fit")
        if self.share is not None:
            self._asked.say(f"steps took {self.share:.2f} of plain fit's time (asked: {self._asked.settings.rho:g})")

    def _leave(self, why: str) -> None:
        """Leave the rest of `fit` to Keras, and say why."""
        self.phase = Phase.LEFT
        self._asked.say(f"{why}; fit goes on as without ElasticTraining")

    # --- steps ------------------------------------------------------------------------------------------------------

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train as many batches as Keras asks for at once."""
        if self.phase is Phase.LEFT:
            return self._keras_function(iterator)
        if self._task is None:
            self._task = self._checked_task(_parts(iterator.element_spec))
            self._payoff = Payoff.of(self._asked.settings.rho, self.model)
        if self.phase is Phase.WAITS or (self.phase is Phase.COMPARES and self._comparison.wants_full):
            return self._train_everything(self._task, iterator)
        if self.engine is None and self._task.head.all():
            self._leave("every tensor belongs to the head, which always trains" if len(self._task.head) else NOTHING)
            return self._keras_function(iterator)
        try:
            return self._train_elastic(self._task, iterator)
        except UserError as error:  # it names the callback's arguments, not flags of a command
            raise UserError(str(error).replace("--", "")) from error

    def _train_everything(self, task: CompiledTask, iterator: Any) -> dict[str, Any]:
        """One call of Keras' own function, timed; before it, decide if steps suffice for that."""
        start, count = _now_ms(), self.model.steps_per_execution
        logs = self._keras_function(iterator)
        call_ms = _now_ms() - start
        self.is_stale = True  # folded kernels have trained
        self._epoch_steps += count
        if self.phase is Phase.COMPARES:
            self._comparison.record_full(call_ms / count)
            return logs
        is_timed_now, steps = self._payoff.record_call(call_ms, count), self._params.get("steps")
        if is_timed_now and not self._payoff.has_compiled:
            start = _now_ms()
            _ = task.variables  # traces the forward pass
            self._payoff.tracing_ms = _now_ms() - start
        if is_timed_now and steps:
            self._decide((self._params["epochs"] - self._epoch) * steps - self._epoch_steps)
        return logs

    def _train_elastic(self, task: CompiledTask, iterator: Any) -> dict[str, Any]:
        logs, count, waiting_ms, is_timed, start = None, 0, 0.0, True, _now_ms()
        for _ in range(self.model.steps_per_execution):
            asked = _now_ms()
            try:
                values = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            waiting_ms += _now_ms() - asked
            logs, is_warm = self._step(task, values)
            count, is_timed = count + 1, is_timed and is_warm
        assert logs is not None, "steps_per_execution is at least 1"
        end = _now_ms()
        if is_timed:
            self._times.append(((end - start) / count, waiting_ms / count, (start - self._last_end_ms) / count))
            if self.phase is Phase.COMPARES:
                self._comparison.record_elastic(*self._times[-1][:2])
                if self._comparison.is_done:
                    self._correct()
        self._last_end_ms = end
        return logs

    def _step(self, task: CompiledTask, values: Any) -> tuple[dict[str, float], bool]:
        """One elastic step: what it reports, and whether nothing was compiled or measured in it."""
        inputs, targets, weights = _parts(values)
        batch = Batch(lambda: inputs, targets, weights)
        if self.engine is None or self.engine.history.step in self.engine.scheme.due:
            task.check_variables()
        engine = self.engine or self._begin(task, batch)
        self._recent.append(batch)
        if self.is_stale:
            self.is_stale = not engine.training.refresh()
        count, passes = len(engine.history.selections), engine.scheme.pass_steps
        with engine.history.clocks.running("training"):
            result = engine.step(batch)
        if len(engine.history.selections) > count:
            self._asked.say(engine.history.selection.text(task.variables.used))
        return result.measures, result.step_ms is not None and engine.history.step not in passes

    def _checked_task(self, specs: Any) -> CompiledTask:
        """What this fit trains on batches of `specs`.

        Raises:
            UserError: as of `CompiledTask`; or they are not dense, or with a limit of memory, not of one shape.
        """
        for spec in tf.nest.flatten(specs):
            if spec is not None and (not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None):
                raise UserError(
                    f"ElasticTraining needs dense tensors of a known rank, not {spec}; convert them in the data "
                    "(to_tensor of a ragged one, tf.sparse.to_dense) before the model"
                )
            if self._asked.settings.memory is not None and spec is not None and None in spec.shape[1:]:
                raise UserError(f"memory: needs examples of one shape, not {spec}; leave it out, or pad them")
        task = CompiledTask(self.model, *specs)
        task.allows_infinite_loss = True  # as `fit` does; keras.callbacks.TerminateOnNaN ends it
        return task

    def _begin(self, task: CompiledTask, batch: Batch) -> Engine:
        """The engine of this fit, whose first elastic batch this is."""
        settings, scheme, table, decides, _ = self._asked
        epochs = max(self._params["epochs"] - (self._first_epoch or 0), 1)
        data = FitData(self._params.get("steps") or UNKNOWN_STEPS, len(batch), self._recent)
        settings = replace(settings, num_epochs=epochs)
        if decides:
            self._full_ms = self._payoff.full_ms
        elif settings.memory is None and settings.rho < 1:
            self._full_ms = plain_step_ms(task, batch)
        if table is None:
            table = estimated_table(task, self.model.optimizer, len(batch), self._full_ms if decides else None)
            # An estimate is no reason to end a fit.
            settings = replace(settings, rho=max(settings.rho, smallest_rho(table, task.head)))
        self.engine = engine = Engine(task, data, scheme, settings, table)
        engine.training.folds = settings.rho < 1  # else plain fit, bit for bit
        engine.plan(data.steps_per_epoch, self._first_epoch or 0)
        if not decides and settings.rho < 1 and self._payoff.looks_random:
            told = self._payoff.evidence
            self._asked.say(f"lower layers that do not train may keep their random weights: only {told}")
        return engine

    def _choose_interval(self, engine: Engine) -> bool:
        """Whether it was left to be chosen, and now is, by what the first selection took."""
        scheme, selection, asked = engine.scheme, engine.history.selection, self._asked
        measures = SCHEMES[asked.scheme].importance is not None
        if not measures or not isinstance(scheme, ElasticScheme) or scheme.settings.interval is not None:
            return False
        epoch_ms = (selection.full_step_ms or 0.0) * engine.history.step
        selecting_ms = 1e3 * sum(selection.seconds.values())
        interval = chosen_interval(selecting_ms, epoch_ms, asked.settings.rho, Settings.interval)
        engine.settings = scheme.settings = replace(scheme.settings, interval=interval)
        return True

    # --- deciding by itself -----------------------------------------------------------------------------------------

    def _decide(self, steps_left: int) -> None:
        """Go on with the upper part, or leave `fit` alone, or neither for now."""
        decision = self._payoff.decide(steps_left)
        if decision is not None and decision.goes:
            self._asked.say(f"{decision.why}; its upper part trains from now on")
            self.phase, self._comparison = Phase.COMPARES, Comparison()
        elif decision is not None:
            self._leave(decision.why)

    def _correct(self) -> None:
        """Correct the table by the times of full and elastic steps in turn, and select by it if they were off."""
        assert self.engine is not None and isinstance(self.engine.scheme, ElasticScheme)
        (full_ms, elastic_ms, waiting_ms), scheme = self._comparison.times_ms, self.engine.scheme
        self._full_ms, self.phase = full_ms, Phase.TRAINS
        if elastic_ms >= (1 - CLOSE) * full_ms:
            waiting = f", {waiting_ms:.3g} ms of them waiting for data" if waiting_ms > CLOSE * full_ms else ""
            self._leave(f"elastic steps take {elastic_ms:.3g} ms, full ones {full_ms:.3g} ms{waiting}")
            return
        selection, off = self.engine.history.selection, abs(elastic_ms / full_ms - self._asked.settings.rho)
        steps_left = self.engine.schedule.total_steps - self.engine.history.step
        pays = steps_left * off * full_ms >= MARGIN * 1e3 * sum(selection.seconds.values())
        if off <= CLOSE or self._corrections == CORRECTIONS or not pays:
            return
        table = scheme.table.scaled((full_ms - waiting_ms) / scheme.table.full_step_ms)
        self._corrections += 1
        scheme.follow(sharpened(table, selection.mask, elastic_ms - waiting_ms), self.engine.history.step)
        self._times.clear()
        self.phase, self._comparison = Phase.COMPARES, Comparison()


def _now_ms() -> float:
    return 1e3 * time.perf_counter()


def _parts(values: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of values or specs of an iterator of Keras; None for a missing part.

    Keras puts an empty `tf.experimental.Optional` there.
    """
    missing = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
    given = tf.nest.map_structure(lambda part: None if isinstance(part, missing) else part, values)
    return keras.utils.unpack_x_y_sample_weight(given)
