"""The one training loop: select, train, validate, again and again (paper sections 3 and 4).

It needs no run folder and no command line. What writes tables, curves and checkpoints, or shows progress, listens:
`runs.listener.Listener`, or any `keras.callbacks.Callback`.

    trainer = Trainer(model, data, "elastic_training", Settings(num_epochs=12, rho=0.5), table=table)
    trainer.run(until_step=100)          # some steps, …
    state = trainer.state()              # … then hand over, …
    other.load(state); other.run()       # … and go on elsewhere
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import keras

from elastic_trainer.datasets.batches import MAX_ROWS, Batch, ShuffledData, part_rows
from elastic_trainer.engine.features import FeatureCache
from elastic_trainer.engine.memory import MEASURED_SHARE, MemoryBudget
from elastic_trainer.engine.optimizers import end_schedule_at, optimizer_of
from elastic_trainer.engine.state import StepResult, TrainState, not_finite
from elastic_trainer.engine.task import CompiledTask, Task, task_of
from elastic_trainer.runs.checkpoint import State
from elastic_trainer.runs.history import History
from elastic_trainer.runs.listener import Listener
from elastic_trainer.runs.summary import run_results
from elastic_trainer.selection.budget import feature_misses
from elastic_trainer.selection.elastic import make_budget
from elastic_trainer.selection.named import find_scheme
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.selection.select import Selection
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import START_AGAIN, UserError
from elastic_trainer.system.machine import frozen_gc
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.profiling import profile_compiled
from elastic_trainer.timing.table import TimingTable

MEMORY_TOLERANCE = 0.05  # of a limit, by which a resumed selection may exceed it
DEADLINE_CHECK_STEPS = 20  # between two looks, besides that after each epoch, whether the steps fit before a deadline


class Trainer:
    """Trains a network step by step under a scheme.

    Args:
        model: a compiled Keras model, whose optimizer, loss and metrics are used; or a `Task`; or, with image data, a
            classifier that returns logits. Its batch norm is frozen (`freeze_batch_norm`).
        data: the examples, an `ArrayData`; in a checkout also what `data.load` returns.
        scheme: a name in `selection.named.SCHEMES`, or a scheme. Elastic ones select within `settings.rho`.
        settings: of the training. What they say of the optimizer and its rate has no effect on a compiled model; what
            they say of checkpoints and saved models is for listeners.
        listeners: are called at each hook, in this order.
        table: timing table of the network, for elastic schemes; by default a compiled model is measured for a while.
            With `settings.micro_batch`, of steps on one part of a batch.
        optimizer: by default the model's, or the one that `settings` ask for.
        memory: what the process may take; by default `settings.memory`, or what the machine has.

    Attributes:
        data, settings, schedule: what it trains on, how, and for how long.
        training: the network, its optimizer and the compiled step.
        history: what was done so far, in numbers.

    Raises:
        UserError: even training the head alone exceeds the budget, or a network or the data do not suit the scheme.
    """

    def __init__(
        self,
        model: keras.Model | Task,
        data: ShuffledData,
        scheme: str | Scheme = "elastic_training",
        settings: Settings = Settings(),  # noqa: B008 (it is frozen)
        listeners: Iterable[Any] = (),
        *,
        table: TimingTable | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        if isinstance(scheme, Settings):
            raise TypeError("the third argument is the scheme; pass the settings as settings=…")
        task, self.data = task_of(model, data), data
        task.rows = data.full_batch
        memory = memory or MemoryBudget(settings.memory)
        self.scheme = scheme if isinstance(scheme, Scheme) else _scheme(scheme, task, data, settings, table, memory)
        self.settings = settings = self.scheme.settings_for(settings)
        self.schedule = self._planned = Schedule.of(settings, data.steps_per_epoch)
        if optimizer is None and isinstance(task, CompiledTask):
            optimizer = task.model.optimizer
        optimizer = optimizer or optimizer_of(settings, self.schedule.total_steps, task.model)
        if not optimizer.built:
            optimizer.build(task.model.trainable_variables)
        features = None
        if settings.feature_cache != "off":
            features = FeatureCache(data, in_float16=settings.feature_cache == "float16")
        # Of a forward pass: within a limit, what trains decides what memory is taken.
        size = part_rows(data.batch_size, settings.micro_batch) if settings.micro_batch else data.batch_size
        data.max_rows = size if memory.has_limit or settings.micro_batch else MAX_ROWS
        self.training = TrainState(task, optimizer, size, self.scheme.penalty, features, memory, data.full_batch)
        self.training.can_split &= isinstance(scheme, Scheme) or find_scheme(scheme).can_split
        self.history = History()
        self._listeners, self._has_started = [*listeners], False
        self._counted, self._step_flops = 0, 0.0  # of which compiled step

    @property
    def task(self) -> Task:
        """What is trained; PruneTrain replaces its network."""
        return self.training.task

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self, until_step: int | None = None) -> dict[str, Any] | None:
        """Train up to step `until_step` of the run, or to its end. The next call goes on from there.

        Training time excludes validation and what listeners pause it for. It includes measuring importance, solving,
        compiling a new step, and averaging the head.

        Returns:
            See `runs.summary.run_results`; None while steps or a validation are left. A finished run trains no more.

        Raises:
            UserError: the loss is no longer a finite number.
        """
        history = self.history
        with frozen_gc():
            if not self._has_started:
                self._begin()
            while not self.is_finished and (until_step is None or history.step < until_step):
                epoch = len(history.epochs)
                start, end = self.schedule.start_of(epoch), self.schedule.start_of(epoch + 1)
                if not history.results:
                    self.task.reset()
                    self._notify("on_epoch_begin", epoch)
                count = min(end, end if until_step is None else until_step) - history.step
                if count > 0:  # else the run was interrupted when only the validation was left
                    with history.clocks.running("training"):
                        for batch in self.data.train(epoch, history.step - start, count):
                            if history.results and self._is_out_of_time():
                                break
                            self.step(batch)
                            if self._is_ended():
                                break
                if history.step >= self.schedule.start_of(epoch + 1) or history.is_stopped or history.out_of_time:
                    self._end_epoch()
            if not self.is_finished:
                return None
            self._notify("on_train_end", self._last_results())
            return self.results()

    @property
    def is_finished(self) -> bool:
        """Whether every epoch was trained and validated, or a deadline or a listener ended the run before."""
        history = self.history
        # Steps of a run that was interrupted between its last step and the validation still need that one.
        may_end = history.is_validated and not history.results
        is_ended = may_end and (history.is_stopped or self._is_out_of_time())
        return len(history.epochs) >= self.schedule.epochs or is_ended

    def results(self) -> dict[str, Any]:
        """What the run came to so far, see `runs.summary.run_results`."""
        memory = self.training.memory
        found = {
            "feature_mb": self.training.features.megabytes,
            "memory_budget_mb": memory.limit_mb if memory.has_limit else None,
            "start_memory_mb": memory.start_mb,
        }
        return {**run_results(self.history, self._planned.total_steps, self.task.score), **found}

    def _begin(self) -> None:
        """Pass the trainer and the model to the listeners."""
        model, steps = self.training.model, self.data.steps_per_epoch
        self._has_started, model.stop_training = True, False
        has_callbacks = not all(isinstance(listener, Listener) for listener in self._listeners)
        if has_callbacks and getattr(model, "optimizer", None) is None:
            model.optimizer = self.training.optimizer  # Keras callbacks use it
        self._notify("set_params", {"epochs": self.schedule.epochs, "steps": steps, "verbose": 0})
        self._notify("set_model", model)
        self._notify("set_trainer", self)
        self._notify("on_train_begin")

    def _notify(self, hook: str, *values: Any) -> None:
        """Call a hook of every listener that has it."""
        for listener in self._listeners:
            method = getattr(listener, hook, None)
            if method is not None:
                method(*values)

    def _is_ended(self) -> bool:
        """Whether the latest step was the last: by a listener, or by the schedule, which a deadline may shorten."""
        history = self.history
        history.is_stopped |= bool(self.training.model.stop_training)
        if not history.is_stopped and history.step % DEADLINE_CHECK_STEPS == 0:
            self._fit_to_deadline()
        return history.is_stopped or history.step >= self.schedule.total_steps

    def step(self, batch: Batch) -> StepResult:
        """Select if that is due, then train on one batch."""
        history, number = self.history, self.history.step
        self._notify("on_train_batch_begin", number)
        if number in self.scheme.due:
            with history.clocks.running("selection"):
                self._select()
        elif not self.training.is_adopted:
            self._adopt(history.selection)
            if self.training.excess_mb > MEMORY_TOLERANCE * self.training.memory.limit_mb:
                raise self.training.too_little_memory()
        is_full = self.data.is_full(batch)
        result = self.training.train(batch)
        history.record_step(result if is_full else result._replace(step_ms=None))
        if not (self.task.allows_infinite_loss or math.isfinite(result.loss)):
            optimizer = self.training.optimizer
            updates = int(optimizer.iterations.numpy())
            raise not_finite(f"the loss is {result.loss} at step {updates}", updates - 1, self.task, optimizer)
        if is_full and history.step in self.scheme.pass_steps:
            with history.clocks.running("selection"):
                history.selection.slowdowns.append(self.scheme.slowdown(batch))
        self._notify("on_train_batch_end", number, {"loss": result.loss, **result.measures})
        return result

    def plan(self, steps_per_epoch: int, past_epochs: int = 0) -> None:
        """Change how long an epoch is, and how many came before the run, and so when it selects from now on."""
        past = past_epochs * steps_per_epoch
        self.schedule = self._planned = replace(Schedule.of(self.settings, steps_per_epoch), past_steps=past)
        self.scheme.plan(self.schedule)

    def _is_out_of_time(self, later: float = 0.0) -> bool:
        """Whether the deadline leaves no time for a step and its validation `later` seconds from now; stays true."""
        history = self.history
        if self.settings.deadline is not None and history.selections:
            progress = history.progress(self.schedule)
            progress = progress._replace(elapsed_seconds=progress.elapsed_seconds + later)
            history.out_of_time |= self.scheme.is_out_of_time(progress)
        return history.out_of_time

    def _select(self) -> None:
        """Make the selection that is due, and train it from now on."""
        history, training, model = self.history, self.training, self.training.model
        self._notify("on_selection_begin", history.step)
        progress = history.progress(self.schedule, features_possible=training.features.are_possible)
        selection = self.scheme.select(progress, training)
        if training.model is not model:
            training.model.stop_training = False
            self._notify("set_model", training.model)
        start = time.perf_counter()
        self._adopt(selection)
        selection.seconds["trace"] = selection.seconds.get("trace", 0.0) + time.perf_counter() - start
        if training.excess_mb > 0:
            raise training.too_little_memory()
        predicted_mb = training.predicted_mb
        selection.memory_mb = None if predicted_mb is None else max(predicted_mb, selection.memory_mb or 0.0)
        history.record_selection(selection, self._step_flops)
        self._notify("on_selection_end", history.step, {"trained_tensors": int(selection.mask.sum())})

    def _adopt(self, selection: Selection) -> None:
        """Train `selection` from now on."""
        uses_features, training = selection.uses_features, self.training
        if selection.budget_step_ms is None:  # no budget says whether they pay
            now, end = self.history.step, self.schedule.total_steps
            steps = next((step for step in range(now + 1, end) if step in self.scheme.due), end) - now
            uses_features = training.features.are_possible and feature_misses(self.data, steps) < 1
        self.scheme.adopt(selection, training, uses_features)
        if training.compiled != self._counted:
            self._counted = training.compiled
            self._step_flops = training.parts * sum(count_flops(training.step_graph).values())

    def _end_epoch(self) -> None:
        """End the epoch, and validate if that is due. At the end of the run, average the head first."""
        history = self.history
        # A run whose time this validation uses up must average before it.
        validates = self._averages_later and self._is_validation_due(is_last=False)
        later = max(history.validation_seconds, default=0.0) if validates else 0.0
        is_last = history.step >= self.schedule.total_steps or history.is_stopped or self._is_out_of_time(later)
        if is_last and self._averages_later:
            with history.clocks.running("training"):
                history.average_head_seconds = self.training.average_head(self.data, self._between_batches)
        start, is_due = time.perf_counter(), self._is_validation_due(is_last)
        history.record_epoch(self.evaluate() if is_due else None, self.task.is_running)
        if is_due:
            history.validation_seconds.append(time.perf_counter() - start)
        self._notify("on_epoch_end", len(history.epochs) - 1, self._last_results())
        if is_due:
            history.validation_seconds[-1] = time.perf_counter() - start  # with its records and what was saved
        history.is_stopped |= bool(self.training.model.stop_training)
        self._fit_to_deadline()

    @property
    def _averages_later(self) -> bool:
        """Whether the head is still to be averaged; an interrupted run may have done it."""
        return self.settings.average_head and self.history.average_head_seconds is None

    def _is_validation_due(self, is_last: bool) -> bool:
        return is_last or self.history.may_validate(self.settings.validation_share)

    def _fit_to_deadline(self) -> None:
        """Let training, and with it the learning-rate schedule, end where the deadline does."""
        history = self.history
        if self.settings.deadline is None or self.is_finished:
            return
        steps = self.scheme.fitting_steps(history.progress(self.schedule))
        if steps is not None:
            # The last epoch is validated, with the head that the run ends with.
            fewest = history.step if history.is_validated and not self._averages_later else history.step + 1
            self._end_at(max(steps, min(fewest, self.schedule.total_steps)))

    def _end_at(self, total_steps: int) -> None:
        if total_steps != self.schedule.total_steps:
            self.schedule = replace(self.schedule, total_steps=total_steps)
            self.scheme.plan(self.schedule)
            end_schedule_at(self.training.optimizer, total_steps)

    def evaluate(self) -> dict[str, float]:
        """The loss and the measures of the task over the test examples."""
        with self.history.clocks.running("validation"):
            self._notify("on_test_begin")
            results = self.training.evaluation(self.data.test(), self._between_batches)
            self._notify("on_test_end", results)
        return results

    def _between_batches(self) -> None:
        """A run can be stopped here."""
        self._notify("on_test_batch_begin", 0)

    def _last_results(self) -> dict[str, Any]:
        """Of the latest epoch, under Keras' names."""
        row = self.history.epochs[-1]
        names = [name.removeprefix("test_") for name in row if name.startswith("test_")]
        tested = {f"val_{name}": row[f"test_{name}"] for name in names if row[f"test_{name}"] is not None}
        return {**{name: row[f"train_{name}"] for name in names}, **tested, "learning_rate": row["learning_rate"]}

    # --- the state --------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The state of the run now. Raises `UserError` if a weight is not finite."""
        self.training.check_finite(self.history.step)
        record = {
            "history": self.history.to_record(),
            "scheme": self.scheme.to_record(),
            "examples": [self.data.train_count, self.data.test_count],
            "total_steps": self.schedule.total_steps,
        }
        return State(self.training.values(), record)

    def load(self, state: State) -> None:
        """Go on from `state`. Raises `UserError` if it is of other examples or of another network."""
        examples = [self.data.train_count, self.data.test_count]
        if state.record["examples"] != examples:
            raise UserError(
                f"--resume: the run was started with {state.record['examples']} training and test examples, now they "
                f"are {examples}; give the same data, or {START_AGAIN}"
            )
        self.history = history = History.from_record(state.record["history"])
        self._end_at(state.record["total_steps"])
        selection = history.selection if history.selections else None
        self.scheme.resume(state.record["scheme"], selection, self.training)
        self.training.assign(state.arrays)


def _scheme(
    name: str, task: Task, data: ShuffledData, settings: Settings, table: TimingTable | None, memory: MemoryBudget
) -> Scheme:
    budget, rows = None, part_rows(data.full_batch, settings.micro_batch)
    entry = find_scheme(name)
    if settings.micro_batch and not entry.can_split and entry.takes_steps:
        raise UserError(f"--micro_batch: cannot be combined with {name}; leave it out")
    if entry.is_elastic:
        if table is None and isinstance(task, CompiledTask):
            with memory.reusing(MEASURED_SHARE):
                table = profile_compiled(task, next(next(data.train(0)).parts(rows)), with_features=True)
        if table is None:
            raise UserError(f"{name}: needs a timing table; make one with elastic_trainer.profile or profiler.py")
        table.check_shapes([tuple(variable.shape) for variable in task.model.trainable_variables])
        budget = make_budget(task.model, data, settings, table.in_parts(data.full_batch // rows), head=task.head)
    scheme: Scheme = entry.make(SchemeContext(task, data, settings, budget))
    return scheme
