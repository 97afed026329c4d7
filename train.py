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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import models
import selection_solver_DP
from data import ImageData
from optimizers import make_optimizer
from utils import RunLog, UserError, peak_memory_mb

if TYPE_CHECKING:
    from profiler import TimingTable


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of a run; defaults are the paper's (section 6)."""

    optimizer: str = "sgd"
    learning_rate: float = 1e-4
    weight_decay: float = 5e-4
    num_epochs: int = 12
    max_steps: int | None = None
    interval: int = 3
    rho: float = 0.5
    save_model: bool = False


@dataclass
class Choice:
    """The tensors to train from now on, and why.

    Attributes:
        mask: bool [N] over `model.trainable_variables`.
        importance: [N], normalised, or None for a scheme that does not measure it.
        predicted_step_ms, budget_step_ms: from the timing table, or None.
        epoch: when it was made.
    """

    mask: np.ndarray
    importance: np.ndarray | None = None
    predicted_step_ms: float | None = None
    budget_step_ms: float | None = None
    epoch: int = 0


class Scheme(Protocol):
    """Which tensors train, and when that changes."""

    def choose(self, epoch: int, optimizer: keras.optimizers.Optimizer) -> Choice | None:
        """The choice that holds from the start of `epoch` on, or None to keep the present one."""


# --- one step ---------------------------------------------------------------------------------------------------------


def classification_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of logits [batch, classes] against integer labels [batch]."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def batch_spec(model: keras.Model, batch_size: int | None) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Shapes and types of one batch of (images, labels) for `model`."""
    return tf.TensorSpec((batch_size, *model.input_shape[1:]), tf.float32), tf.TensorSpec((batch_size,), tf.int32)


class TrainStep:
    """One compiled step that trains exactly the given variables.

    Only they are watched, so TensorFlow prunes every gradient operation that none of them needs; no other variable and
    no other optimizer slot is written. Let go of the object to free its graph.

    Attributes:
        loss, gradients: symbolic tensors of the traced graph, for the profiler; an entry is None where a variable has
            no influence on the loss.
        graph: the traced graph.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
        batch_size: int,
    ) -> None:
        def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            rate = tf.identity(optimizer.learning_rate)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([variable.value for variable in variables])
                logits = model(images, training=True)
                loss = classification_loss(labels, logits)
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
        return classification_loss(labels, model(images, training=True))

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
                loss = classification_loss(labels, model(images, training=True))
            return tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

        self._gradients = tf.function(gradients, input_signature=batch_spec(model, batch_size))

    def __call__(self, optimizer: keras.optimizers.Optimizer, images: tf.Tensor, labels: tf.Tensor) -> np.ndarray:
        """Importance float64 [N] of `model.trainable_variables`, largest magnitude 1 (all 0 where nothing changes).

        Weights, optimizer slots and step count, batch-norm statistics and random state are afterwards as before.

        Raises:
            UserError: a gradient is not finite.
        """
        variables = self._model.trainable_variables
        with _restored([*self._model.variables, *optimizer.variables]):
            before = [tf.identity(variable.value) for variable in variables]
            with _restored(self._model.non_trainable_variables):
                optimizer.apply(self._gradients(images, labels), variables)
            shares = [
                -tf.reduce_sum(gradient * (variable.value - old))
                for gradient, variable, old in zip(self._gradients(images, labels), variables, before, strict=True)
            ]
        importance = np.array([float(share) for share in shares])
        if not np.isfinite(importance).all():
            raise UserError(f"importance is not finite at step {int(optimizer.iterations)}; lower --learning_rate")
        return importance / max(np.abs(importance).max(), np.finfo(np.float64).tiny)


@contextmanager
def _restored(variables: list[keras.Variable]) -> Iterator[None]:
    """Put `variables` back afterwards, bit for bit."""
    before = [tf.identity(variable.value) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.value.assign(value)


# --- schemes ----------------------------------------------------------------------------------------------------------


class FixedScheme:
    """The same tensors from beginning to end."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def choose(self, epoch: int, optimizer: keras.optimizers.Optimizer) -> Choice | None:
        return Choice(self._mask) if epoch == 0 else None


class ElasticScheme:
    """The most important tensors that fit into `rho` of a full step, measured anew every `interval` epochs."""

    def __init__(self, model: keras.Model, data: ImageData, table: TimingTable, rho: float, interval: int) -> None:
        self._data, self._table, self._rho, self._interval = data, table, rho, interval
        self._head = models.head_mask(model)
        check_feasible(table, self._head, rho)
        self._evaluator = ImportanceEvaluator(model, data.batch_size)

    def choose(self, epoch: int, optimizer: keras.optimizers.Optimizer) -> Choice | None:
        if epoch % self._interval:
            return None
        images, labels = self._data.probe(epoch // self._interval)
        importance = self._evaluator(optimizer, images, labels)
        return select_tensors(self._table, importance, self._head, self._rho, epoch)


def check_feasible(table: TimingTable, head: np.ndarray, rho: float) -> None:
    """Raise `UserError` where even training the head alone takes more than `rho` of a full step."""
    smallest = table.predict_ms(head) / table.full_step_ms
    if rho < smallest:
        shown = math.ceil(smallest * 1000) / 1000
        raise UserError(
            f"--rho {rho:g}: training the head alone takes {smallest:.1%} of a full step here; give at least {shown:g}"
        )


def select_tensors(table: TimingTable, importance: np.ndarray, head: np.ndarray, rho: float, epoch: int = 0) -> Choice:
    """Solve for the selection of largest importance whose predicted step time is at most `rho` of a full step.

    Args:
        table: timing table of the network.
        importance, head: [N] over `model.trainable_variables`; the head is always selected, its cost comes first.
        rho: step time over a full step's.
        epoch: kept in the result.
    """
    budget_ms = rho * table.full_step_ms
    order = table.positions
    own_ms, chain_ms = table.own_ms.copy(), table.chain_ms.copy()
    forced = head[order]
    own_ms[forced] = 0.0
    chain_ms[: np.flatnonzero(forced)[-1] + 1] = 0.0
    gain = np.where(forced, 0.0, importance[order])
    solved = selection_solver_DP.solve(chain_ms, own_ms, gain, budget_ms - table.predict_ms(head))
    mask = head.copy()
    mask[order[solved.mask == 1]] = True
    return Choice(mask, importance, table.predict_ms(mask), budget_ms, epoch)


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
    model: keras.Model, data: ImageData, settings: Settings, run: RunLog, table: TimingTable
) -> dict[str, Any]:
    """Train what matters most within `settings.rho` of a full step's time.

    Raises:
        UserError: rho is below what training the head alone takes.
    """
    scheme = ElasticScheme(model, data, table, settings.rho, settings.interval)
    return run_training(model, data, scheme, settings, run)


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass
class _Clocks:
    """Seconds spent training (selection is part of it), selecting, and validating."""

    training: float = 0.0
    selection: float = 0.0
    validation: float = 0.0
    _started: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._started[name] = start
        try:
            yield
        finally:
            del self._started[name]
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def training_now(self) -> float:
        """Training seconds up to this moment, while that clock runs."""
        return self.training + time.perf_counter() - self._started["training"]


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
    total_steps = min(settings.num_epochs * data.steps_per_epoch, settings.max_steps or math.inf)
    total_steps = int(total_steps)
    optimizer = make_optimizer(settings.optimizer, settings.learning_rate, settings.weight_decay, total_steps)
    optimizer.build(model.trainable_variables)
    evaluation = Evaluation(model)
    clocks = _Clocks()
    step: TrainStep | None = None
    choice: Choice | None = None
    all_step_ms: list[float] = []
    best_accuracy = final_accuracy = 0.0
    done = epoch = 0
    warm = False

    with tqdm(total=total_steps, unit="step", dynamic_ncols=True) as bar:
        while done < total_steps:
            with clocks.running("training"):
                with clocks.running("selection"):
                    bar.set_description(f"epoch {epoch + 1}: selecting")
                    new_choice = scheme.choose(epoch, optimizer)
                    if new_choice is not None:
                        if step is None or choice is None or (new_choice.mask != choice.mask).any():
                            step = None  # the old graph goes before the new one comes
                            gc.collect()
                            chosen = [v for v, m in zip(model.trainable_variables, new_choice.mask, strict=True) if m]
                            step = TrainStep(model, optimizer, chosen, data.batch_size)
                            warm = False
                        choice = new_choice
                        run.record_choice(choice, done)
                assert step is not None and choice is not None, "a scheme must choose before the first step"
                bar.set_description(f"epoch {epoch + 1}/{math.ceil(total_steps / data.steps_per_epoch)}")
                epoch_step_ms: list[float] = []
                losses, accuracies = [], []
                for images, labels in data.train(epoch).take(total_steps - done):
                    start = time.perf_counter()
                    loss, accuracy, rate = step(images, labels)
                    elapsed_ms = (time.perf_counter() - start) * 1e3
                    if not math.isfinite(loss):
                        raise UserError(
                            f"the loss is {loss} at step {done + 1} with learning rate {rate:g}; lower --learning_rate"
                        )
                    done += 1
                    if warm:  # a new graph is optimised during its first step
                        epoch_step_ms.append(elapsed_ms)
                    warm = True
                    losses.append(loss)
                    accuracies.append(accuracy)
                    run.record_step(done, clocks.training_now(), loss, accuracy, rate, elapsed_ms)
                    bar.update()
                    bar.set_postfix_str(
                        _progress(losses, accuracies, elapsed_ms, choice, final_accuracy), refresh=False
                    )
            all_step_ms += epoch_step_ms
            epoch += 1
            with clocks.running("validation"):
                bar.set_description(f"epoch {epoch}: testing")
                test_loss, final_accuracy = evaluation(data.test())
            if settings.save_model:
                run.save_model(model, best=final_accuracy > best_accuracy)
            best_accuracy = max(best_accuracy, final_accuracy)
            run.record_epoch(
                epoch=epoch,
                step=done,
                train_seconds=clocks.training,
                selection_seconds=clocks.selection,
                validation_seconds=clocks.validation,
                learning_rate=rate,
                train_loss=float(np.mean(losses)),
                train_accuracy=float(np.mean(accuracies)),
                test_loss=test_loss,
                test_accuracy=final_accuracy,
                median_step_ms=float(np.median(epoch_step_ms)) if epoch_step_ms else None,
                budget_step_ms=choice.budget_step_ms,
                trained_tensors=int(choice.mask.sum()),
            )

    return {
        "epochs": epoch,
        "steps": done,
        "best_accuracy": best_accuracy,
        "final_accuracy": final_accuracy,
        "train_seconds": clocks.training,
        "validation_seconds": clocks.validation,
        "selection_seconds": clocks.selection,
        "median_step_ms": float(np.median(all_step_ms)) if all_step_ms else None,
        "peak_memory_mb": peak_memory_mb(),
        "energy_joules": None,
    }


def _progress(
    losses: list[float], accuracies: list[float], step_ms: float, choice: Choice, test_accuracy: float
) -> str:
    recent = slice(-20, None)
    budget = "" if choice.budget_step_ms is None else f" of {choice.budget_step_ms:.0f}"
    return (
        f"loss {np.mean(losses[recent]):.3f}, accuracy {np.mean(accuracies[recent]):.1%}, "
        f"tested {test_accuracy:.1%}, step {step_ms:.0f}{budget} ms"
    )
