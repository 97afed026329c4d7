"""Elastic training inside `model.fit`: one line in a Keras program.

    freeze_batch_norm(model)
    model.compile(optimizer, loss, metrics=metrics)
    model.fit(x, y, epochs=12, callbacks=[ElasticTraining(rho=0.5)])

Keras looks `model.train_function` up at every step, so a callback may set it. Keras keeps the loop, the data, the
metrics and all other callbacks; `Trainer.step` takes its place for what happens in a step.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch
from elastic_trainer.datasets.fit_data import FitData
from elastic_trainer.engine.memory import MemoryBudget
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.runs.history import History
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.selection.elastic import ElasticScheme
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.selection.payoff import CLOSE, Comparison, Payoff, chosen_interval
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import memory_size
from elastic_trainer.system.errors import UserError, not_one_of
from elastic_trainer.timing.kept_tables import KeptTables
from elastic_trainer.timing.run_steps import sharpened
from elastic_trainer.timing.table import TimingTable

ONCE = 1e9  # an interval in epochs: select once
UNKNOWN_STEPS = 1_000_000_000  # stands for the length of an epoch until the first one has ended
NOTHING_TRAINABLE = "no tensor is trainable"
UPPER_PART, IMPORTANCE = "elastic_training_upper_part", "elastic_training"
CORRECTIONS = 2  # selections that follow the first one because steps took longer or shorter than asked


class ElasticTraining(keras.callbacks.Callback):
    """Trains, in steps of `model.fit`, only the tensors that fit into a time budget (paper sections 4 and 5).

    The model's own optimizer, loss, metrics and learning-rate schedule are used. Works with NumPy arrays, tf.data and
    PyDataset, class and sample weights, validation, and other callbacks.

    With `rho` alone it decides when that pays, and says so: everything trains as in plain `fit`, in Keras' own step,
    while that step is timed. From the tenth step on, a network whose weights are pretrained trains only the upper part
    that fits the budget; any other one does so once everything has trained until the loss settles; and where what is
    left of `fit` is too short to win back the cost, it is left alone. With `scheme`, `interval`, `table` or `memory` it
    trains elastically from the first step, as told; without a kept table it measures one first (10 to 40 s).

    Not possible here: cached features, since `fit` does not say which examples come next (`Trainer` has them); models
    with their own `train_step` or several optimizers; more than one replica; XLA (`jit_compile` has no effect). Other
    callbacks must not change weights within an epoch, since frozen batch norms are folded into kernels that do not
    train. Keras' Adam counts steps for all tensors together, so a tensor that is first selected late starts with
    larger updates than at the start.

    Args:
        rho: time of a step over that of one of plain `fit`, above 0 and at most 1.
        interval: epochs between two selections; fractions are allowed where the length of an epoch is known. By
            default as many as keep selections short beside what they save; an upper part is selected once.
        table: a `TimingTable` (`elastic_trainer.profile`), or the folder that one is kept in; it is measured there if
            it does not fit. By default a folder for this model under ~/.cache/elastic_trainer.
        scheme: an elastic one of `selection.named.SCHEMES`, by default "elastic_training" where it does not decide by
            itself; `elastic_training_upper_part` needs no importance.
        memory: what the process may take in all, resident: `900M`, `1.5G`, `80%` of what is available now, or a
            number of MB. Selections keep within it, beside `rho`; by default there is no limit.
        importance_batches: latest batches that importance is measured on.
        deterministic: do not correct the budget by how fast the device is while training.
        verbose: 1 prints a line for each selection and one at the end, 0 nothing.

    Attributes:
        history: of the latest `fit`: selections, step times in ms, slowdowns.
        rho_measured: step time over that of plain `fit` as it would have run; None before it is known.

    Raises:
        UserError: an argument is out of range. In `fit`: the model is not compiled, a batch norm is not frozen, or
            `rho` or `memory` is too small.
    """

    def __init__(
        self,
        rho: float = 0.5,
        interval: float | None = None,
        table: TimingTable | str | os.PathLike[str] | None = None,
        *,
        scheme: str | None = None,
        memory: str | float | None = None,
        importance_batches: int = 1,
        deterministic: bool = False,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < rho <= 1:
            raise UserError(f"rho {rho:g}: must be above 0 and at most 1")
        if interval is not None and not interval > 0:
            raise UserError(f"interval {interval:g}: must be above 0")
        elastic = [name for name in SCHEMES if SCHEMES[name].is_elastic]
        if scheme is not None and scheme not in elastic:
            raise UserError(f"scheme {not_one_of(scheme, elastic)}")
        self._decides = scheme is None and interval is None and table is None and memory is None
        self._is_plain = self._decides and rho == 1
        self._settings = Settings(
            rho=rho,
            memory=_megabytes(memory),
            interval=ONCE if interval is None else interval,
            importance_batches=importance_batches,
            deterministic=deterministic,
            feature_cache="off",
        )
        self._table, self._verbose = table, verbose
        self._scheme = UPPER_PART if self._decides else scheme or IMPORTANCE
        self._trainer: Trainer | None = None
        self._task: CompiledTask | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticTraining:
        """The same callback before its first `fit`; Keras Tuner makes one for each trial."""
        other = copy.copy(self)
        other._model = other._trainer = other._task = None
        return other

    @property
    def history(self) -> History:
        """Of the latest `fit`. Raises `UserError` before its first step."""
        if self._trainer is None:
            raise UserError("ElasticTraining has no history before it has trained a step in model.fit")
        return self._trainer.history

    @property
    def rho_measured(self) -> float | None:
        """Step time over that of plain `fit`; None before it is known."""
        full_ms = self._trainer.history.full_training_ms() if self._trainer else None
        return sum(self.history.step_ms) / full_ms if full_ms else None

    # --- hooks of Keras ---------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.model.distribute_strategy.num_replicas_in_sync > 1 and not self._is_plain:
            raise UserError("ElasticTraining trains on one replica; leave out the distribution strategy")
        self._trainer, self._task, self._is_called = None, None, False
        self._first_epoch: int | None = None
        self._epoch = self._epoch_steps = self._corrections = 0
        self._payoff: Payoff | None = None
        self._comparison: Comparison | None = None
        self._keras_function, self.model.train_function = self.model.train_function, self._train_function
        if self._is_plain:
            self._leave("rho 1 trains everything")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        self._epoch, self._epoch_steps = epoch, 0
        self._is_stale = True  # callbacks such as SwapEMAWeights assign weights between epochs

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_called = True
        if self._task is not None and self.model.train_function != self._train_function:
            raise UserError("the model was compiled again during fit, without ElasticTraining; compile it before fit")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        trainer, first = self._trainer, self._first_epoch or 0
        if trainer is not None and trainer.history.results:
            trainer.history.record_epoch({}, is_running=True)
            steps = trainer.schedule.steps_per_epoch
            is_chosen = self._choose_interval(trainer)
            if steps == UNKNOWN_STEPS or is_chosen:
                trainer.plan(trainer.history.step if steps == UNKNOWN_STEPS else steps, first)
        elif self._payoff is not None and trainer is None:
            self._payoff.record_epoch(logs or {})
            epochs = self.params["epochs"] - epoch - 1
            if epochs:
                self._decide(epochs * self._epoch_steps)
            if epochs and self._payoff is not None and not self._goes:
                self._say(self._payoff.waits_for())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.model.train_function = self._keras_function
        if self._trainer is None and self._payoff is not None:
            self._say("everything has trained to the end, as in plain fit")
        if self._trainer is not None and self.rho_measured is not None:
            self._say(f"steps took {self.rho_measured:.2f} of plain fit's time (asked: {self._settings.rho:g})")

    # --- steps ------------------------------------------------------------------------------------------------------

    def _train_function(self, iterator: Any) -> dict[str, Any]:
        """Train as many batches as Keras asks for at once; returns the running results of its metrics."""
        if not self._is_called:  # left behind by a fit that ended with an error; now another one runs
            return self._leave(None)(iterator)
        self._is_called, logs = False, None
        if self._decides and not self._goes:
            return self._train_everything(iterator)
        self._task = self._task or self._make_task(_parts(iterator.element_spec))
        if self._task is None:
            return self._leave(None)(iterator)
        if self._comparison is not None and self._comparison.wants_full:
            return self._train_everything(iterator)
        for _ in range(self.model.steps_per_execution):
            start = _now_ms()
            try:
                values = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            logs = self._step(self._task, values, _now_ms() - start)
        assert logs is not None, "steps_per_execution is at least 1"
        return logs

    def _leave(self, why: str | None) -> Callable[[Any], dict[str, Any]]:
        """Leave the rest of `fit` to Keras, and say why; returns its function."""
        self.model.train_function, self._task = self._keras_function, None
        self._payoff = self._comparison = None
        if why is not None:
            self._say(f"{why}; fit goes on as without ElasticTraining")
        return self._keras_function

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
            if self._settings.memory is not None and spec is not None and None in spec.shape[1:]:
                raise UserError(f"memory: needs examples of one shape, not {spec}; leave it out, or pad them")
        task = CompiledTask(self.model, *specs)
        task.allows_infinite_loss = True  # as `fit` does; keras.callbacks.TerminateOnNaN ends it
        return task

    def _make_task(self, specs: Any) -> CompiledTask | None:
        """`_checked_task`; None, which is said, if it has no tensors to select."""
        task = self._checked_task(specs)
        if not task.head.all():
            return task
        self._leave("every tensor belongs to the head, which always trains" if task.head.any() else NOTHING_TRAINABLE)
        return None

    def _step(self, task: CompiledTask, values: Any, waiting_ms: float) -> dict[str, float]:
        inputs, targets, weights = _parts(values)
        batch = Batch(lambda: inputs, targets, weights)
        trainer = self._trainer or self._begin(task, batch)
        self._recent.append(batch)
        if trainer.history.step in trainer.scheme.due and not task.has_same_variables:
            raise UserError("layers were frozen or freed during fit; compile the model after that, and call fit again")
        if self._is_stale:
            self._is_stale = not trainer.training.refresh()
        count = len(trainer.history.selections)
        with _names_without_dashes(), trainer.history.clocks.running("training"):
            result = trainer.step(batch)
        if len(trainer.history.selections) > count:
            self._say(trainer.history.selection.text(task.variables.used))
        if self._comparison is not None and result.step_ms is not None:
            self._comparison.record_elastic(result.step_ms, waiting_ms)
            if self._comparison.is_done:
                self._correct(trainer, self._comparison.times_ms)
        return result.measures

    def _begin(self, task: CompiledTask, batch: Batch) -> Trainer:
        """The trainer of this fit, whose first batch this is."""
        self._recent: deque[Batch] = deque(maxlen=self._settings.importance_batches)
        data = FitData(self.params.get("steps") or UNKNOWN_STEPS, len(batch), self._recent)
        epochs = max(self.params["epochs"] - (self._first_epoch or 0), 1)
        with _names_without_dashes():
            memory, settings = MemoryBudget(self._settings.memory), replace(self._settings, num_epochs=epochs)
            if isinstance(self._table, TimingTable):
                table = self._table
                table.check_shapes([tuple(variable.shape) for variable in task.model.trainable_variables])
            else:
                self._tables = KeptTables(task, len(batch), self._table, self._say)
                if self._payoff is None:
                    table = self._tables.measured(batch, memory)
                else:
                    table = self._tables.of_steps(self._payoff.full_ms)
            table = replace(table, full_step_ms=table.plain_over_full * table.full_step_ms)  # rho is over plain fit
            if self._payoff is not None:  # no reason to end a fit that runs already
                settings = replace(settings, rho=max(settings.rho, smallest_rho(table, task.head)))
            self._trainer = Trainer(task, data, self._scheme, settings, table=table, memory=memory)
        if settings.rho == 1:  # plain fit, bit for bit
            self._trainer.training.make_step = partial(TrainStep, task, task.model.optimizer, fold=False)
        self._trainer.plan(data.steps_per_epoch, self._first_epoch or 0)
        return self._trainer

    def _choose_interval(self, trainer: Trainer) -> bool:
        """Whether it was left to be chosen, and now is, by what the first selection took."""
        scheme, selection = trainer.scheme, trainer.history.selection
        if not isinstance(scheme, ElasticScheme) or scheme.settings.interval < ONCE or self._scheme == UPPER_PART:
            return False
        selecting_ms = 1e3 * sum(selection.seconds.values())
        epoch_ms = (selection.full_step_ms or 0.0) * trainer.history.step
        interval = chosen_interval(selecting_ms, epoch_ms, self._settings.rho, Settings.interval)
        scheme.settings = replace(scheme.settings, interval=interval)
        return True

    # --- deciding by itself -----------------------------------------------------------------------------------------

    def _train_everything(self, iterator: Any) -> dict[str, Any]:
        """One call of Keras' own function, timed; before it, decide if steps suffice for that."""
        if self._payoff is None:
            self._checked_task(_parts(iterator.element_spec))
            vectors = [each.numpy() for each in self.model.trainable_variables if len(each.shape) == 1]
            self._payoff = Payoff(self._settings.rho, vectors, int(self.model.optimizer.iterations.numpy()) == 0)
        start, count = _now_ms(), self.model.steps_per_execution
        logs = self._keras_function(iterator)
        call_ms = _now_ms() - start
        self._is_stale = True  # folded kernels have trained
        self._epoch_steps += count
        if self._comparison is not None:
            self._comparison.record_full(call_ms / count)
            return logs
        is_timed_now, steps = self._payoff.record_call(call_ms, count), self.params.get("steps")
        if is_timed_now and steps:
            self._decide((self.params["epochs"] - self._epoch) * steps - self._epoch_steps)
        return logs

    @property
    def _goes(self) -> bool:
        """Whether it has decided to train elastically."""
        return self._comparison is not None or self._trainer is not None

    def _decide(self, steps_left: int) -> None:
        """Go on with the upper part, or leave `fit` alone, or neither for now."""
        assert self._payoff is not None
        decision = None if self._goes else self._payoff.decide(steps_left)
        if decision is None:
            return
        if not decision.goes:
            self._leave(decision.why)
            return
        self._say(f"{decision.why}; its upper part trains from now on")
        self._comparison = Comparison()

    def _correct(self, trainer: Trainer, times_ms: tuple[float, float] | None) -> None:
        """Correct the table by the times of full and elastic steps in turn, and select by it if they were off."""
        self._comparison = None
        if times_ms is None:  # data decide how long steps take
            return
        (full_ms, elastic_ms), scheme = times_ms, trainer.scheme
        assert isinstance(scheme, ElasticScheme)
        if elastic_ms >= full_ms:
            self._leave(f"elastic steps take {elastic_ms:.0f} ms, full ones {full_ms:.0f} ms")
            return
        table = scheme.table.scaled(full_ms / scheme.table.full_step_ms)
        table = sharpened(table, trainer.history.selection.mask, elastic_ms)
        if abs(elastic_ms / full_ms - self._settings.rho) <= CLOSE or self._corrections == CORRECTIONS:
            self._tables.keep_of_steps(table)
            return
        self._corrections += 1
        scheme.follow(table, trainer.history.step)
        self._comparison = Comparison()

    def _say(self, text: str | None) -> None:
        if self._verbose and text is not None:
            print(f"\nElasticTraining: {text}")


def _now_ms() -> float:
    return 1e3 * time.perf_counter()


def _megabytes(memory: str | float | None) -> float | None:
    """MB of a limit as `ElasticTraining` takes it. Raises `UserError` if it is none."""
    try:
        return None if memory is None else memory_size(memory if isinstance(memory, str) else f"{memory}M")
    except argparse.ArgumentTypeError as error:
        raise UserError(f"memory {memory!r}: {error}") from error


@contextmanager
def _names_without_dashes() -> Iterator[None]:
    """Errors of this block name the callback's arguments, not flags of a command."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--", "")) from error


def _parts(values: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of values or specs of an iterator of Keras; None for a missing part.

    Keras puts an empty `tf.experimental.Optional` there.
    """
    missing = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
    given = tf.nest.map_structure(lambda part: None if isinstance(part, missing) else part, values)
    return keras.utils.unpack_x_y_sample_weight(given)
