"""Tensor Importance Evaluator and the one training loop (paper sections 3 and 4).

A scheme only answers "which tensors now?"; stepping, timing, logging and evaluating exist once, in `run_training`.

    full_training             every tensor
    traditional_tl_training   the new head
    bn_plus_bias_training     normalisation scales and shifts, biases, and the head
    elastic_training          what the Tensor Selector picks within the time budget, anew every few epochs

Differences from the paper and its published code: the head is always trained; importance is measured on a fresh batch
each time, and everything it touches is put back; the budget rests on measured whole-step times, not on a 2:1 rule.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import models
import selection_solver_DP
from data import ImageData
from optimizers import make_optimizer
from options import PAPER
from time_budget import DeadlineBudget, Progress, RhoBudget, TimeBudget
from timing_table import TimingTable
from utils import RunLog, UserError, measure_ms, peak_memory_mb


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of a run; defaults are the paper's (section 6). `deadline` is in seconds and replaces `rho`."""

    optimizer: str = "sgd"
    learning_rate: float = PAPER["learning_rate"]
    weight_decay: float = PAPER["weight_decay"]
    num_epochs: int = PAPER["num_epochs"]
    max_steps: int | None = None
    interval: int = PAPER["interval"]
    rho: float = PAPER["rho"]
    deadline: float | None = None
    correct_budget: bool = True
    time_resolution: int | None = None
    save_model: bool = False


@dataclass
class Choice:
    """The tensors to train from now on, and why.

    Attributes:
        mask: bool [N] over `model.trainable_variables`.
        importance: [N], normalised, or None for a scheme that does not measure it.
        predicted_step_ms, budget_step_ms: by the time budget, or None.
        epoch: when it was made.
        rho, slowdown, correction: as in `time_budget.Allowance`, or None.
    """

    mask: np.ndarray
    importance: np.ndarray | None = None
    predicted_step_ms: float | None = None
    budget_step_ms: float | None = None
    epoch: int = 0
    rho: float | None = None
    slowdown: float | None = None
    correction: float | None = None


class StepResult(NamedTuple):
    """One training step: loss, share of right answers, learning rate, wall time (None where it is no measure)."""

    loss: float
    accuracy: float
    learning_rate: float
    step_ms: float | None


class Scheme(Protocol):
    """Which tensors train, and when that changes."""

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice | None:
        """The choice that holds from the epoch that begins on, or None to keep the present one."""


# --- one step ---------------------------------------------------------------------------------------------------------


def classification_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of logits [batch, classes] against integer labels [batch]."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def training_loss(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss that training lowers, with what the model's own regularisers add, and the logits [batch, classes]."""
    logits = model(images, training=True)
    return tf.add_n([classification_loss(labels, logits), *model.losses]), logits


def batch_spec(model: keras.Model, batch_size: int | None) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Shapes and types of one batch of (images, labels) for `model`."""
    return tf.TensorSpec((batch_size, *model.input_shape[1:]), tf.float32), tf.TensorSpec((batch_size,), tf.int32)


class TrainStep:
    """One compiled step that trains exactly the selected variables.

    Only they are watched, so TensorFlow prunes every gradient operation that none of them needs; no other variable and
    no other optimizer slot is written. Let go of the object to free its graph.

    Args:
        model, optimizer: the optimizer is built for all of `model.trainable_variables`.
        batch_size: images a step.
        mask: bool [N] over `model.trainable_variables`; all if left out.

    Attributes:
        loss, gradients: symbolic tensors of the traced graph, for the profiler; an entry is None where a variable has
            no influence on the loss.
        graph: the traced graph.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        batch_size: int,
        mask: np.ndarray | None = None,
    ) -> None:
        variables = [v for k, v in enumerate(model.trainable_variables) if mask is None or mask[k]]

        def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            rate = tf.identity(optimizer.learning_rate)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([variable.value for variable in variables])
                loss, logits = training_loss(model, images, labels)
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            self.loss, self.gradients = loss, gradients
            optimizer.apply(gradients, variables)
            correct = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), labels)
            return loss, tf.reduce_mean(tf.cast(correct, tf.float32)), rate

        self._function = tf.function(step).get_concrete_function(*batch_spec(model, batch_size))
        self.graph: tf.Graph = self._function.graph

    def __call__(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[float, float, float]:
        """Train on one batch; returns loss, share of right answers, and learning rate once the device is done."""
        loss, accuracy, rate = self._function(images, labels)
        return float(loss), float(accuracy), float(rate)


def forward_pass(model: keras.Model, batch_size: int) -> Any:
    """The compiled training-mode forward pass, (images, labels) -> loss as a float: what every step must do."""

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return training_loss(model, images, labels)[0]

    function = tf.function(loss).get_concrete_function(*batch_spec(model, batch_size))
    return lambda images, labels: float(function(images, labels))


class Evaluation:
    """Loss and accuracy over the test images; compiled once, whatever trains."""

    def __init__(self, model: keras.Model) -> None:
        def batch(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            logits = model(images, training=False)
            correct = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), labels)
            return classification_loss(labels, logits), tf.reduce_mean(tf.cast(correct, tf.float32))

        self._function = tf.function(batch, input_signature=batch_spec(model, None))

    def __call__(self, batches: tf.data.Dataset) -> tuple[float, float]:
        """Mean loss and accuracy (0…1) over all images of `batches`."""
        totals = np.zeros(3)
        for images, labels in batches:
            loss, accuracy = self._function(images, labels)
            totals += np.array([float(loss), float(accuracy), 1.0]) * len(labels)
        return float(totals[0] / totals[2]), float(totals[1] / totals[2])


# --- importance -------------------------------------------------------------------------------------------------------


class ImportanceEvaluator:
    """How much each tensor's update lowers the loss (paper section 4, first-order Taylor share of the loss change).

    I_k = -sum(g(w + dw) * dw) over the weights of tensor k: dw is the update the optimizer would make on this batch, g
    the gradient on the same batch (and the same dropout) after it. Normalised by the largest magnitude.
    """

    def __init__(self, model: keras.Model, batch_size: int) -> None:
        self._model = model
        variables = [variable.value for variable in model.trainable_variables]

        def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                loss, _ = training_loss(model, images, labels)
            return tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

        self._gradients = tf.function(gradients, input_signature=batch_spec(model, batch_size))

    def __call__(self, optimizer: keras.optimizers.Optimizer, images: tf.Tensor, labels: tf.Tensor) -> np.ndarray:
        """Importance float64 [N] of `model.trainable_variables`, largest magnitude 1 (all 0 where nothing changes).

        Weights, optimizer slots and step count, batch-norm statistics and random state are afterwards as before.

        Raises:
            UserError: a gradient is not finite.
        """
        variables = self._model.trainable_variables
        with _restored([*self._model.variables, *optimizer.variables]) as before:
            with _restored(self._model.non_trainable_variables):
                optimizer.apply(self._gradients(images, labels), variables)
            shares = [
                -tf.reduce_sum(gradient * (variable.value - before[id(variable)]))
                for gradient, variable in zip(self._gradients(images, labels), variables, strict=True)
            ]
        importance = np.array([float(share) for share in shares])
        if not np.isfinite(importance).all():
            raise UserError(f"importance is not finite at step {int(optimizer.iterations)}; lower --learning_rate")
        return importance / max(np.abs(importance).max(), np.finfo(np.float64).tiny)

    def gradient_pass(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        """Compute every gradient and change nothing: a measure of how fast the device is. Returns once it is done."""
        return float(tf.reduce_sum(self._gradients(images, labels)[-1]))


@contextmanager
def _restored(variables: list[keras.Variable]) -> Iterator[dict[int, tf.Tensor]]:
    """Put `variables` back afterwards, bit for bit; yields what they hold now, by `id` of the variable."""
    before = {id(variable): tf.identity(variable.value) for variable in variables}
    try:
        yield before
    finally:
        for variable in variables:
            variable.value.assign(before[id(variable)])


# --- schemes ----------------------------------------------------------------------------------------------------------


class FixedScheme:
    """The same tensors from beginning to end."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice | None:
        return Choice(self._mask) if progress.epoch == 0 else None


class ElasticScheme:
    """The most important tensors that fit into the time budget, measured anew every `settings.interval` epochs."""

    def __init__(self, model: keras.Model, data: ImageData, settings: Settings, budget: TimeBudget) -> None:
        self._data, self._settings, self._budget = data, settings, budget
        self._head = models.head_mask(model)
        self._evaluator = ImportanceEvaluator(model, data.batch_size)

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice | None:
        if progress.epoch % self._settings.interval:
            return None
        images, labels = self._data.probe(progress.epoch // self._settings.interval)
        importance = self._evaluator(optimizer, images, labels)
        if self._settings.correct_budget:
            slowdown = self._slowdown(images, labels, len(progress.step_ms))
            allowance = self._budget.allow(progress, slowdown)
        else:
            allowance = self._budget.allow(progress._replace(step_ms=()), slowdown=1.0)
        choice = select_tensors(
            self._budget.table, importance, self._head, allowance.table_share, self._settings.time_resolution
        )
        predicted_ms = self._budget.adopt(choice.mask)
        return replace(
            choice,
            epoch=progress.epoch,
            predicted_step_ms=predicted_ms * allowance.slowdown * allowance.correction,
            budget_step_ms=allowance.rho * allowance.full_step_ms,
            rho=allowance.rho,
            slowdown=allowance.slowdown,
            correction=allowance.correction,
        )

    def _slowdown(self, images: tf.Tensor, labels: tf.Tensor, steps_before: int) -> float:
        """How much longer a gradient pass takes than when the timing table was made."""
        passes = min(max(steps_before // 200, 3), 15)  # a small share of what they are compared with
        times = measure_ms([lambda: self._evaluator.gradient_pass(images, labels)], passes)
        return float(np.median(times)) / self._budget.table.gradient_pass_ms


def select_tensors(
    table: TimingTable, importance: np.ndarray, head: np.ndarray, rho: float, time_resolution: int | None = None
) -> Choice:
    """Solve for the selection of largest importance whose predicted step time is at most `rho` of a full step.

    Args:
        table: timing table of the network.
        importance, head: [N] over `model.trainable_variables`; the head is always selected, its cost comes first.
        rho: step time over a full step's, both in the table's time; 1 sets no limit, whatever the fit's error.
        time_resolution: T_q, see `selection_solver_DP.solve`.
    """
    budget_ms = rho * table.full_step_ms
    if rho >= 1:
        budget_ms = max(budget_ms, 1.001 * table.predict_ms(np.ones(len(head), bool)))
    order = table.positions
    own_ms, chain_ms = table.own_ms.copy(), table.chain_ms.copy()
    forced = head[order]
    own_ms[forced] = 0.0
    chain_ms[: np.flatnonzero(forced)[-1] + 1] = 0.0
    gain = np.where(forced, 0.0, importance[order])
    room_ms = budget_ms - table.predict_ms(head)
    solved = selection_solver_DP.solve(chain_ms, own_ms, gain, room_ms, time_resolution)
    mask = head.copy()
    mask[order[solved.mask == 1]] = True
    return Choice(mask, importance, table.predict_ms(mask), budget_ms)


def make_budget(model: keras.Model, data: ImageData, settings: Settings, table: TimingTable) -> TimeBudget:
    """The time budget that `settings` ask for. Raises `UserError` where even training the head alone exceeds it."""
    head = models.head_mask(model)
    if settings.deadline is None:
        return RhoBudget(table, head, settings.rho)
    epochs, total_steps = _length(data, settings)
    test_batches = math.ceil(data.test_count / data.batch_size)
    return DeadlineBudget(table, head, settings.deadline, total_steps, epochs, settings.interval, test_batches)


def _length(data: ImageData, settings: Settings) -> tuple[int, int]:
    """How many epochs, the last perhaps incomplete, and steps a run has."""
    total_steps = min(settings.num_epochs * data.steps_per_epoch, settings.max_steps or sys.maxsize)
    return math.ceil(total_steps / data.steps_per_epoch), total_steps


def full_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train every tensor. Returns the run's summary (see `run_training`)."""
    everything = np.ones(len(model.trainable_variables), bool)
    return run_training(model, data, FixedScheme(everything), settings, run)


def traditional_tl_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train the new head alone (transfer learning as usually meant)."""
    return run_training(model, data, FixedScheme(models.head_mask(model)), settings, run)


def bn_plus_bias_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train normalisation scales and shifts, biases, and the head."""
    return run_training(model, data, FixedScheme(models.normalisation_and_bias_mask(model)), settings, run)


def elastic_training(
    model: keras.Model, data: ImageData, settings: Settings, run: RunLog, budget: TimeBudget
) -> dict[str, Any]:
    """Train what matters most within the time that `budget` allows (see `make_budget`)."""
    return run_training(model, data, ElasticScheme(model, data, settings, budget), settings, run)


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass
class _Clocks:
    """Seconds spent training (selection is part of it), selecting, and validating; and since it all began."""

    training: float = 0.0
    selection: float = 0.0
    validation: float = 0.0
    _started: dict[str, float] = field(default_factory=dict)
    _begin: float = field(default_factory=time.perf_counter)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        self._started[name] = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - self._started.pop(name))

    def elapsed(self) -> float:
        """Wall seconds since the run began."""
        return time.perf_counter() - self._begin

    def training_now(self) -> float:
        """Training seconds up to this moment, while that clock runs."""
        return self.training + time.perf_counter() - self._started["training"]


class _Trainee:
    """The tensors that train at present, and the compiled step that trains them."""

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, batch_size: int) -> None:
        self._model, self._optimizer, self._batch_size = model, optimizer, batch_size
        self._step: TrainStep | None = None
        self._warm = False
        self.choice = Choice(np.zeros(len(model.trainable_variables), bool))

    def adopt(self, choice: Choice) -> None:
        """Train `choice` from now on; the old graph goes before a new one comes."""
        if self._step is None or (choice.mask != self.choice.mask).any():
            self._step = None
            gc.collect()
            self._step = TrainStep(self._model, self._optimizer, self._batch_size, choice.mask)
            self._warm = False
        self.choice = choice

    def train(self, images: tf.Tensor, labels: tf.Tensor) -> StepResult:
        """One step on one batch. The first one of a new graph, which TensorFlow then optimises, has no `step_ms`."""
        assert self._step is not None, "a scheme must choose before the first step"
        start = time.perf_counter()
        loss, accuracy, rate = self._step(images, labels)
        step_ms = (time.perf_counter() - start) * 1e3 if self._warm else None
        self._warm = True
        if not math.isfinite(loss):
            step = int(self._optimizer.iterations)
            raise UserError(f"the loss is {loss} at step {step} with learning rate {rate:g}; lower --learning_rate")
        return StepResult(loss, accuracy, rate, step_ms)


@dataclass
class _StepMeter:
    """The measured steps of a run, and what follows from them for its time budget."""

    step_ms: list[float] = field(default_factory=list)
    since_choice: list[float] = field(default_factory=list)
    between_seconds: float | None = None  # from the end of an epoch's training to the next one's begin
    _outside: float = 0.0
    _choices: int = 0
    _full_step_ms: float | None = None  # of full training as it would run now
    _full_ms: float = 0.0  # what full training would have taken for the same steps

    def adopt(self, choice: Choice) -> None:
        self._choices += 1
        self.since_choice.clear()
        self._full_step_ms = choice.budget_step_ms / choice.rho if choice.rho and choice.budget_step_ms else None

    def record(self, result: StepResult) -> None:
        if result.step_ms is not None:
            self.step_ms.append(result.step_ms)
            self.since_choice.append(result.step_ms)
            self._full_ms += self._full_step_ms or 0.0

    def rho(self) -> float | None:
        """Time of the measured steps over that of full training as it would have run, or None without a budget."""
        return sum(self.step_ms) / self._full_ms if self._full_ms else None

    def end_epoch(self, clocks: _Clocks) -> None:
        """Note that validation, records and saving are done."""
        outside = clocks.elapsed() - clocks.training
        self.between_seconds, self._outside = outside - self._outside, outside

    def progress(self, epoch: int, epochs: int, done: int, total_steps: int, clocks: _Clocks) -> Progress:
        steps_ms = sum(self.step_ms)
        return Progress(
            epoch,
            epochs,
            done,
            total_steps,
            clocks.elapsed(),
            tuple(self.since_choice),
            max(1e3 * (clocks.training - clocks.selection) - steps_ms, 0.0) / max(done, 1),
            self.between_seconds,
            clocks.selection / self._choices if self._choices else None,
        )


def run_training(
    model: keras.Model, data: ImageData, scheme: Scheme, settings: Settings, run: RunLog
) -> dict[str, Any]:
    """The one training loop: choose tensors, train an epoch, evaluate, record; then again.

    Training time excludes evaluation and includes measuring importance, solving, and compiling a new step.

    Returns:
        What summary.json holds of the training itself: accuracies in 0…1, times in seconds, memory in MB.

    Raises:
        UserError: the loss is no longer a finite number.
    """
    epochs, total_steps = _length(data, settings)
    optimizer = make_optimizer(settings.optimizer, settings.learning_rate, settings.weight_decay, total_steps)
    optimizer.build(model.trainable_variables)
    trainee, evaluation, clocks = _Trainee(model, optimizer, data.batch_size), Evaluation(model), _Clocks()
    meter = _StepMeter()
    accuracies: list[float] = []
    done, out_of_time = 0, False
    deadline = settings.deadline or math.inf

    with tqdm(total=total_steps, unit="step", dynamic_ncols=True) as bar:
        for epoch in range(epochs):
            with clocks.running("training"):
                bar.set_description(f"epoch {epoch + 1}/{epochs}, selecting")
                with clocks.running("selection"):
                    choice = scheme.choose(meter.progress(epoch, epochs, done, total_steps, clocks), optimizer)
                    if choice is not None:
                        trainee.adopt(choice)
                        meter.adopt(choice)
                        run.record_choice(choice, done)
                bar.set_description(f"epoch {epoch + 1}/{epochs}")
                results: list[StepResult] = []
                for images, labels in data.train(epoch).take(total_steps - done):
                    results.append(trainee.train(images, labels))
                    meter.record(results[-1])
                    done += 1
                    run.record_step(done, clocks.training_now(), results[-1])
                    bar.set_postfix_str(_progress(results, trainee.choice, accuracies), refresh=False)
                    bar.update()
                    if out_of_time := clocks.elapsed() + 1.25 * (meter.between_seconds or 0.0) > deadline:
                        break
            bar.set_description(f"epoch {epoch + 1}/{epochs}, testing")
            with clocks.running("validation"):
                test_loss, test_accuracy = evaluation(data.test())
            accuracies.append(test_accuracy)
            if settings.save_model:
                run.save_model(model, best=test_accuracy > max(accuracies[:-1], default=-1.0))
            step_ms = [result.step_ms for result in results if result.step_ms is not None]
            run.record_epoch(
                epoch=epoch + 1,
                step=done,
                train_seconds=clocks.training,
                selection_seconds=clocks.selection,
                validation_seconds=clocks.validation,
                learning_rate=results[-1].learning_rate,
                train_loss=float(np.mean([result.loss for result in results])),
                train_accuracy=float(np.mean([result.accuracy for result in results])),
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                median_step_ms=float(np.median(step_ms)) if step_ms else None,
                budget_step_ms=trainee.choice.budget_step_ms,
                trained_tensors=int(trainee.choice.mask.sum()),
            )
            meter.end_epoch(clocks)
            if out_of_time:
                break

    return {
        "epochs": len(accuracies),
        "steps": done,
        "planned_steps": total_steps,
        "best_accuracy": max(accuracies),
        "final_accuracy": accuracies[-1],
        "train_seconds": clocks.training,
        "validation_seconds": clocks.validation,
        "selection_seconds": clocks.selection,
        "elapsed_seconds": clocks.elapsed(),
        "median_step_ms": float(np.median(meter.step_ms)) if meter.step_ms else None,
        "rho_measured": meter.rho(),
        "peak_memory_mb": peak_memory_mb(),
        "energy_joules": None,
    }


def _progress(results: list[StepResult], choice: Choice, test_accuracies: list[float]) -> str:
    recent = results[-20:]
    step_ms = [result.step_ms for result in recent if result.step_ms is not None]
    text = f"loss {np.mean([r.loss for r in recent]):.3f}, accuracy {np.mean([r.accuracy for r in recent]):.1%}"
    if test_accuracies:
        text += f", tested {test_accuracies[-1]:.1%}"
    if step_ms:
        budget = f" of {choice.budget_step_ms:.0f}" if choice.budget_step_ms else ""
        text += f", step {np.median(step_ms):.0f}{budget} ms"
    return text
