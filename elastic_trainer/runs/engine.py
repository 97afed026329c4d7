"""The engine: selects and trains, a batch at a time. Who trains asks it for steps: `Trainer`, and `ElasticTraining`.

It owns what trains: the network with its compiled step and its features (`engine.state`), the scheme that selects, and
the history of both.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from elastic_trainer.datasets.batches import MAX_ROWS, Batch, ShuffledData
from elastic_trainer.engine.features import FeatureCache
from elastic_trainer.engine.optimizers import idle_optimizer, optimizer_of
from elastic_trainer.engine.state import StepResult, TrainState, not_finite
from elastic_trainer.engine.task import CompiledTask, Task, task_of
from elastic_trainer.engine.weight_mean import WeightMean
from elastic_trainer.profiling.tables import estimated_table
from elastic_trainer.runs.history import History
from elastic_trainer.selection.budget import feature_misses
from elastic_trainer.selection.named import find_scheme
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.selection.select import Selection
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import START_AGAIN, UserError
from elastic_trainer.system.memory_budget import MemoryBudget, part_rows
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    from elastic_trainer.runs.checkpoint import State

MEMORY_TOLERANCE = 0.05  # of a limit, by which a resumed selection may exceed it


class Engine:
    """See the module's header.

    Args:
        model: a compiled Keras model, whose optimizer, loss and metrics are used; or a `Task`; or, with image data, a
            classifier that returns logits. Its batch norm is frozen (`freeze_batch_norm`).
        data: what the scheme asks of the examples; an `ArrayData`, or in a checkout also what `data.load` returns.
        scheme: a name in `selection.named.SCHEMES`, or a scheme. Elastic ones select within `settings.rho`.
        settings: of the training. What they say of the optimizer and its rate has no effect on a compiled model.
        table: timing table of the network, for elastic schemes; by default by FLOPs, and by the run's own steps.
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
        scheme: str | Scheme,
        settings: Settings,
        table: TimingTable | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        task, self.data = task_of(model, data), data
        task.rows = data.full_batch
        memory = memory or MemoryBudget(settings.memory)
        self.scheme = scheme if isinstance(scheme, Scheme) else _scheme(scheme, task, data, settings, table)
        self.settings = settings = self.scheme.settings_for(settings)
        self.schedule = Schedule.of(settings, data.steps_per_epoch)
        if optimizer is None and isinstance(task, CompiledTask):
            optimizer = task.model.optimizer
        steps = self.schedule.total_steps - self.schedule.from_step
        optimizer = optimizer or optimizer_of(settings, steps, task.model)
        if not optimizer.built:
            optimizer.build(task.model.trainable_variables)
        features = FeatureCache(data) if settings.feature_cache != "off" else None
        size = part_rows(data.batch_size, settings.micro_batch) if settings.micro_batch else data.batch_size
        # Of a forward pass: within a limit, what trains decides what memory is taken.
        data.max_rows = size if memory.has_limit or settings.micro_batch else MAX_ROWS
        self.training = TrainState(task, optimizer, size, self.scheme.penalty, features, memory)
        self.training.can_split &= isinstance(scheme, Scheme) or find_scheme(scheme).can_split
        self.scheme.limit(self.training.memory, self.training.can_split)
        self.history = History()
        self._counted, self._step_flops = 0, 0.0  # of which compiled step

    @property
    def task(self) -> Task:
        """What is trained; PruneTrain replaces its network."""
        return self.training.task

    @property
    def averages_later(self) -> bool:
        """Whether the head is still to be averaged; an interrupted run may have done it."""
        return self.settings.average_head and self.history.average_head_seconds is None

    def step(self, batch: Batch) -> StepResult:
        """Select if that is due, then train on one batch."""
        history = self.history
        self._notify("on_train_batch_begin", history.step)
        self.prepare()
        is_full = len(batch) == self.data.full_batch  # the budget is not corrected by times of others
        result = self.training.train(batch)
        history.record_step(result if is_full else result._replace(step_ms=None), self._step_flops)
        if not (self.task.allows_infinite_loss or math.isfinite(result.loss)):
            raise not_finite(f"the loss is {result.loss} at step {history.step}", self.task, self.training.optimizer)
        if is_full and history.step in self.scheme.pass_steps:
            with history.clocks.running("selection"):
                history.selection.slowdowns.append(self.scheme.slowdown(batch))
        self._notify("on_train_batch_end", history.step - 1, {"loss": result.loss, **result.measures})
        return result

    def prepare(self) -> None:
        """Select if that is due, and have the compiled step that trains the selection."""
        history = self.history
        is_selected = bool(history.selections) and history.selection.step == history.step
        if history.step in self.scheme.due and not is_selected:
            with history.clocks.running("selection"):
                self._select()
        elif not self.training.is_adopted:
            self._adopt(history.selection)
            self.training.check_memory(MEMORY_TOLERANCE * self.training.memory.limit_mb)

    def plan(self, steps_per_epoch: int, past_epochs: int = 0) -> None:
        """Change how long an epoch is, and how many came before the run, and so when it selects from now on."""
        past = past_epochs * steps_per_epoch
        self.schedule = replace(Schedule.of(self.settings, steps_per_epoch), past_steps=past)
        self.scheme.plan(self.schedule)

    def state(self) -> State:
        """The state of the run now. Raises `UserError` if a weight is not finite."""
        from elastic_trainer.runs.checkpoint import State

        self.training.check_finite(self.history.step)
        examples = [self.data.train_count, self.data.test_count]
        record = {"history": self.history.to_record(), "scheme": self.scheme.to_record(), "examples": examples}
        return State(self.training.values(), record)

    def load(self, state: State) -> None:
        """Go on from `state`, at `settings.from_step` with a new schedule.

        Raises `UserError` if it is of other examples or of another network.
        """
        was, now = state.record["examples"], [self.data.train_count, self.data.test_count]
        if was != now:
            raise UserError(
                f"--resume: the run was started with {was} training and test examples, now they are {now}; give the "
                f"same data, or {START_AGAIN}"
            )
        self.history = history = History.from_record(state.record["history"])
        selection = history.selection if history.selections else None
        self.scheme.resume(state.record["scheme"], selection, self.training)
        self.training.assign(state.arrays)
        if self.schedule.from_step:
            self.training.optimizer.iterations.assign(history.step - self.schedule.from_step)
        if history.step == self.schedule.from_step:
            history.start_schedule()
            self.training.mean = WeightMean()

    def _notify(self, hook: str, *values: Any) -> None:
        """A hook of those who listen; an engine by itself has none."""

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
        training.mean = WeightMean()  # other weights train from now on
        selection.seconds["trace"] = selection.seconds.get("trace", 0.0) + time.perf_counter() - start
        training.check_memory()
        predicted_mb = training.predicted_mb
        selection.memory_mb = None if predicted_mb is None else max(predicted_mb, selection.memory_mb or 0.0)
        selection.step = history.step
        history.selections.append(selection)
        self._notify("on_selection_end", history.step, {"trained_tensors": int(selection.mask.sum())})

    def _adopt(self, selection: Selection) -> None:
        """Train `selection` from now on."""
        uses_features, training, now = selection.uses_features, self.training, self.history.step
        if selection.rho is None:  # no budget says whether they pay
            end = self.schedule.total_steps
            end = next((step for step in range(now + 1, end) if step in self.scheme.due), end)
            uses_features = training.features.are_possible and feature_misses(self.data, end - now, now) < 1
        self.scheme.adopt(selection, training, uses_features)
        if training.compiled != self._counted:
            self._counted = training.compiled
            self._step_flops = training.parts * sum(count_flops(training.step_graph).values())


def first_mask(model: keras.Model, data: ShuffledData, settings: Settings, table: TimingTable | None) -> np.ndarray:
    """What a run would train first: bool [N] over `model.trainable_variables`. `table`: of an elastic scheme."""
    task = task_of(model, data)
    scheme: Scheme = find_scheme(settings.train_type).make(SchemeContext(task, data, settings, table))
    engine = Engine(task, data, scheme, settings)
    possible = engine.training.features.are_possible
    return scheme.select(engine.history.progress(engine.schedule, possible), engine.training).mask


def _scheme(name: str, task: Task, data: ShuffledData, settings: Settings, table: TimingTable | None) -> Scheme:
    entry, rows = find_scheme(name), part_rows(data.full_batch, settings.micro_batch)
    if settings.micro_batch and not entry.can_split and entry.takes_steps:
        raise UserError(f"--micro_batch: cannot be combined with {name}; leave it out")
    if entry.is_elastic:
        if table is None:
            idle = idle_optimizer(task.model, settings.optimizer, settings.clips_gradients)
            optimizer = task.model.optimizer if isinstance(task, CompiledTask) else idle
            optimizer.build(task.model.trainable_variables)
            table = estimated_table(task, optimizer, rows)
        table.check_shapes([tuple(variable.shape) for variable in task.model.trainable_variables])
        table = table.in_parts(data.full_batch // rows)
    scheme: Scheme = entry.make(SchemeContext(task, data, settings, table))
    return scheme
