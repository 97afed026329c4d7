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
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from elastic_trainer.datasets.batches import Batch, ShuffledData
from elastic_trainer.errors import UserError, not_one_of
from elastic_trainer.memory.budget import MEASURED_SHARE, MemoryBudget
from elastic_trainer.options import memory_size
from elastic_trainer.registry import SCHEMES
from elastic_trainer.runs.history import History
from elastic_trainer.settings import TABLE_RECORD, Settings
from elastic_trainer.task import CompiledTask
from elastic_trainer.timing.graph_digest import graph_digest
from elastic_trainer.timing.profiling import compiled_settings, numbered_names, profile_compiled
from elastic_trainer.timing.table import TimingTable, load_table, save_table
from elastic_trainer.trainer import Trainer

UNKNOWN_STEPS = 1_000_000_000  # stands for the length of an epoch until the first one has ended


class ElasticTraining(keras.callbacks.Callback):
    """Trains, in each step of `model.fit`, only the tensors that fit into a time budget (paper sections 4 and 5).

    The model's own optimizer, loss, metrics and learning-rate schedule are used. The first call measures a timing table
    (15 to 40 s for networks of 50 to 200 tensors) and keeps it for the next program. Works with NumPy arrays, tf.data
    and PyDataset, class and sample weights, validation, and other callbacks.

    Not possible here: cached features, since `fit` does not say which examples come next (`Trainer` has them); models
    with their own `train_step` or several optimizers; more than one replica; XLA (`jit_compile` has no effect). Other
    callbacks must not change weights within an epoch, since frozen batch norms are folded into kernels that do not
    train. Keras' Adam counts steps for all tensors together, so a tensor that is first selected late starts with
    larger updates than at the start.

    Args:
        rho: time of a step over that of one of plain `fit`, above 0 and at most 1.
        interval: epochs between two selections; fractions are allowed where the length of an epoch is known.
        table: a `TimingTable` (`elastic_trainer.profile`), or the folder that one is kept in; it is measured there if
            it does not fit. By default a folder for this model under ~/.cache/elastic_trainer.
        scheme: an elastic one of `registry.SCHEMES`; `elastic_training_upper_part` needs no importance.
        memory: what the process may take in all, resident: `900M`, `1.5G`, `80%` of what is available now, or a
            number of MB. Selections keep within it, beside `rho`; by default there is no limit.
        importance_batches: latest batches that importance is measured on.
        correct_budget: measure how fast the device is while training, and correct the budget.
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
        interval: float = 3,
        table: TimingTable | str | os.PathLike[str] | None = None,
        *,
        scheme: str = "elastic_training",
        memory: str | float | None = None,
        importance_batches: int = 1,
        correct_budget: bool = True,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < rho <= 1:
            raise UserError(f"rho {rho:g}: must be above 0 and at most 1")
        if not interval > 0:
            raise UserError(f"interval {interval:g}: must be above 0")
        elastic = [name for name in SCHEMES if SCHEMES[name].is_elastic]
        if scheme not in elastic:
            raise UserError(f"scheme {not_one_of(scheme, elastic)}")
        self._settings = Settings(
            rho=rho,
            memory=_megabytes(memory),
            interval=interval,
            importance_batches=importance_batches,
            correct_budget=correct_budget,
            feature_cache="off",
        )
        self._table, self._scheme, self._verbose = table, scheme, verbose
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
            raise UserError("ElasticTraining has no history before model.fit has trained a step")
        return self._trainer.history

    @property
    def rho_measured(self) -> float | None:
        """Step time over that of plain `fit`; None before it is known."""
        full_ms = self._trainer.history.full_training_ms() if self._trainer else None
        return sum(self.history.step_ms) / full_ms if full_ms else None

    # --- hooks of Keras ---------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.model.distribute_strategy.num_replicas_in_sync > 1:
            raise UserError("ElasticTraining trains on one replica; leave out the distribution strategy")
        self._trainer = self._task = None
        self._is_called = False
        self._first_epoch: int | None = None
        self._keras_function, self.model.train_function = self.model.train_function, self._train_function

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        self._is_stale = True  # callbacks such as SwapEMAWeights assign weights between epochs

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_called = True
        if self._task is not None and self.model.train_function != self._train_function:
            raise UserError("the model was compiled again during fit, without ElasticTraining; compile it before fit")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        trainer = self._trainer
        if trainer is not None and trainer.history.results:
            trainer.history.record_epoch({}, is_running=True)
            if trainer.schedule.steps_per_epoch == UNKNOWN_STEPS:
                trainer.plan(trainer.history.step, self._first_epoch or 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.model.train_function = self._keras_function
        if self._trainer is not None and self.rho_measured is not None:
            self._say(f"steps took {self.rho_measured:.2f} of plain fit's time (asked: {self._settings.rho:g})")

    # --- steps ------------------------------------------------------------------------------------------------------

    def _train_function(self, iterator: Any) -> dict[str, Any]:
        """Train as many batches as Keras asks for at once; returns the running results of its metrics."""
        if self._is_called:  # else left behind by a fit that ended with an error; now another one runs
            self._task = self._task or self._make_task(_parts(iterator.element_spec))
        if not self._is_called or self._task is None:
            self.model.train_function = self._keras_function
            return self._keras_function(iterator)
        self._is_called, logs = False, None
        for _ in range(self.model.steps_per_execution):
            try:
                values = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            logs = self._step(self._task, values)
        assert logs is not None, "steps_per_execution is at least 1"
        return logs

    def _make_task(self, specs: Any) -> CompiledTask | None:
        """What this fit trains on batches of `specs`; None, which is said, if it has no tensors to select.

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
        if not task.head.all():
            return task
        why = "every tensor belongs to the head, which always trains" if task.head.any() else "no tensor is trainable"
        self._say(f"{why}; fit goes on as without ElasticTraining")
        return None

    def _step(self, task: CompiledTask, values: Any) -> dict[str, float]:
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
        return result.measures

    def _begin(self, task: CompiledTask, batch: Batch) -> Trainer:
        """The trainer of this fit, whose first batch this is."""
        self._recent: deque[Batch] = deque(maxlen=self._settings.importance_batches)
        data = _FitData(self.params.get("steps") or UNKNOWN_STEPS, len(batch), self._recent)
        epochs = max(self.params["epochs"] - (self._first_epoch or 0), 1)
        with _names_without_dashes():
            memory, settings = MemoryBudget(self._settings.memory), replace(self._settings, num_epochs=epochs)
            table = _find_table(task, batch, self._table, memory, self._say)
            table = replace(table, full_step_ms=table.plain_over_full * table.full_step_ms)  # rho is over plain fit
            self._trainer = Trainer(task, data, self._scheme, settings, table=table, memory=memory)
        self._trainer.plan(data.steps_per_epoch, self._first_epoch or 0)
        return self._trainer

    def _say(self, text: str) -> None:
        if self._verbose:
            print(f"\nElasticTraining: {text}")


def _find_table(
    task: CompiledTask,
    batch: Batch,
    given: TimingTable | str | os.PathLike[str] | None,
    memory: MemoryBudget,
    say: Callable[[str], None],
) -> TimingTable:
    """The timing table `given`, or kept in a folder (None: the default one), or measured now and kept there."""
    model, shapes = task.model, [tuple(variable.shape) for variable in task.model.trainable_variables]
    if isinstance(given, TimingTable):
        given.check_shapes(shapes)
        return given
    settings, graph, names = compiled_settings(task, len(batch)), graph_digest(task, len(batch)), numbered_names(model)
    key = hashlib.sha256(f"{graph} {settings} {names} {shapes}".encode()).hexdigest()[:16]
    folder = _cache_folder() / key if given is None else Path(given)
    if (folder / TABLE_RECORD).exists():
        try:
            table = load_table(folder, settings, names, shapes, graph, "it is measured again")
            if table.doubt is None:
                return table
            say(table.warning("it is measured again"))
        except UserError as error:
            say(str(error))
    say("measuring what each tensor costs to train")
    with memory.reusing(MEASURED_SHARE):
        table = profile_compiled(task, batch)
    if table.details["timing"] == "flops":
        say("another profiler is running, so times of tensors follow from FLOPs; the next fit measures again")
        return table
    if table.doubt is not None:
        say(table.warning("was the device busy? It is used now; the next fit measures again"))
    try:
        save_table(table, folder)
        say(f"timing table kept in {folder}")
    except UserError as error:
        say(f"the timing table is not kept: {error}")
    return table


class _FitData(ShuffledData):
    """What a scheme asks of the data of a fit, which alone knows the examples. `recent` are the latest batches."""

    view_count = None

    def __init__(self, steps_per_epoch: int, batch_size: int, recent: deque[Batch]) -> None:
        self.name, self.train_count, self.test_count, self.steps_per_epoch = "fit", 0, 0, steps_per_epoch
        self.batch_size = None  # type: ignore[assignment]  # the last batch of an epoch may be smaller
        self._batch_size, self._recent = batch_size, recent

    @property
    def full_batch(self) -> int:
        """As many as the first batch has."""
        return self._batch_size

    def is_full(self, batch: Batch) -> bool:
        """Whether it has as many examples as the first, whose steps the timing table is of."""
        return len(batch) == self._batch_size

    def importance_batches(self, index: int, count: int = 1) -> list[Batch]:
        """The latest batches, that of the current step included."""
        return [*self._recent]


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


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic_trainer"
