"""The one training loop: select, train, validate, again and again (paper sections 3 and 4).

It needs no run folder and no command line. What writes tables, curves and checkpoints, or shows progress, listens:
`runs.listener.Listener`, or any `keras.callbacks.Callback`.

    trainer = Trainer(model, data, "elastic_training", Settings(num_epochs=12, rho=0.5), table=table)
    trainer.run(until_step=100)          # some steps, …
    state = trainer.state()              # … then hand over, …
    other.load(state); other.run()       # … and go on elsewhere
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import keras

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.engine.optimizers import pass_time
from elastic_trainer.engine.task import Task
from elastic_trainer.engine.weight_mean import EVERY, LAST
from elastic_trainer.runs.deadline import Deadline
from elastic_trainer.runs.engine import Engine
from elastic_trainer.runs.listener import Listener, logs_of
from elastic_trainer.runs.summary import run_results
from elastic_trainer.selection.schemes import Scheme
from elastic_trainer.settings import Settings
from elastic_trainer.system.machine import frozen_gc
from elastic_trainer.system.memory_budget import MemoryBudget
from elastic_trainer.timing.table import TimingTable

TICK_SECONDS = 0.1


class Trainer(Engine):
    """Trains a network in epochs under a scheme, and validates it.

    Args:
        model, data, scheme, settings, table, optimizer, memory: see `Engine`. What the settings say of checkpoints and
            saved models is for listeners.
        listeners: are called at each hook, in this order.

    Raises:
        UserError: as `Engine`.
    """

    deadline: Deadline | None = None  # when the steps must end; None: the schedule says

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
        super().__init__(model, data, scheme, settings, table, optimizer, memory)
        self._listeners, self._has_started, self._last_tick = [*listeners], False, 0.0

    def run(self, until_step: int | None = None) -> dict[str, Any] | None:
        """Train up to step `until_step` of the run, or to its end. The next call goes on from there.

        Training time excludes validation and what listeners pause it for. It includes measuring importance, solving,
        compiling a new step, and averaging the head.

        Returns:
            See `runs.summary.run_results`; None while steps or a validation are left. A finished run trains no more.

        Raises:
            UserError: the loss is no longer a finite number.
        """
        history, settings = self.history, self.settings
        if settings.deadline is not None:
            self.deadline = Deadline(settings.deadline, self)
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
                            if history.results and self._is_over():
                                break
                            if self.deadline is not None:
                                pass_time(self.training.optimizer, self.deadline.share)
                            self.step(batch)
                            if settings.average_weights and history.step % EVERY == 0 and self.share >= 1 - LAST:
                                self.training.take_weights()
                            if time.monotonic() - self._last_tick >= TICK_SECONDS:
                                self._tick()
                if history.step >= end or self._is_over():
                    self._end_epoch()
            if not self.is_finished:
                return None
            self._notify("on_train_end", logs_of(history.epochs[-1]) if history.epochs else {})
            return self.results()

    @property
    def is_finished(self) -> bool:
        """Whether every epoch was trained and validated, or a deadline or a listener ended the run before."""
        history = self.history
        # Steps of a run that was interrupted between its last step and the validation still need that one.
        may_end = history.is_validated and not history.results
        return len(history.epochs) >= self.schedule.epochs or (may_end and self._is_over())

    def results(self) -> dict[str, Any]:
        """What the run came to so far, see `runs.summary.run_results`."""
        found, memory = run_results(self.history, self.task.score), self.training.memory
        found |= {"feature_mb": self.training.features.megabytes, "start_memory_mb": memory.start_mb}
        return {**found, "memory_budget_mb": memory.limit_mb if memory.has_limit else None}

    @property
    def share(self) -> float:
        """The share of the schedule that has passed, in steps or, with a deadline, in time."""
        first, step = self.schedule.from_step, self.history.step
        steps = (step - first) / (self.schedule.total_steps - first)
        return steps if self.deadline is None else max(steps, self.deadline.share)

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
            getattr(listener, hook, lambda *_: None)(*values)

    def _tick(self) -> None:
        self._last_tick = time.monotonic()
        self._notify("on_tick")

    def _is_over(self, later: float = 0.0) -> bool:
        """Whether a listener ended the run, or its deadline leaves no time for a step `later` seconds from now."""
        history = self.history
        is_late = self.deadline is not None and self.deadline.is_over(later)
        history.is_over |= is_late or bool(getattr(self.training.model, "stop_training", False))
        return history.is_over

    def _end_epoch(self) -> None:
        """End the epoch, and validate if that is due. At the end of the run, average the head first."""
        history = self.history
        self._tick()
        if not self.training.is_adopted:  # resumed when only this was left
            self._adopt(history.selection)
        # A run whose time this validation uses up must average before it.
        validates = self.averages_later and self._is_validation_due(is_last=False)
        later = self.deadline.validation_seconds if validates and self.deadline is not None else 0.0
        is_last = history.step >= self.schedule.total_steps or self._is_over(later)
        if is_last:
            self.training.average_weights()
            if self.averages_later:
                with history.clocks.running("training"):
                    history.average_head_seconds = self.training.average_head(self.data, self.may_stop)
        start, is_due = time.perf_counter(), self._is_validation_due(is_last)
        history.record_epoch(self.evaluate() if is_due else None, self.task.is_running)
        self._notify("on_epoch_end", len(history.epochs) - 1, logs_of(history.epochs[-1]))
        if is_due:
            seconds = time.perf_counter() - start  # with its records and what was saved
            history.record_validation(seconds, self.training.evaluation.made_seconds)

    def _is_validation_due(self, is_last: bool) -> bool:
        """Whether this validation, and the last one, stay within their share of training time; the last always is."""
        share, seconds = self.settings.validation_share, self.history.clocks.seconds
        expected = seconds("validation") + 2 * sum(self.history.validation_seconds[-1:])
        return is_last or share >= 1 or (share > 0 and expected <= share * seconds("training"))

    def evaluate(self) -> dict[str, float]:
        """The loss and the measures of the task over the test examples."""
        with self.history.clocks.running("validation"):
            self._notify("on_test_begin")
            results = self.training.evaluation(self.data.test(), self.may_stop)
            self._notify("on_test_end", results)
        return results

    def may_stop(self) -> None:
        """Called between batches that do not train, where a signal may end the run."""
        self._notify("on_test_batch_begin", 0)
