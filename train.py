"""The schemes, and the one training loop (paper sections 3 and 4).

A scheme only answers "which tensors now?"; stepping, timing, logging, checkpoints and testing exist once, in
`run_training`.

    full_training                       every tensor
    traditional_tl_training             the new head
    bn_plus_bias_training               normalisation scales and shifts, biases, and the head
    last_layers_training                the last few layers (paper, Fig 2)
    elastic_training                    what the Tensor Selector picks within the time budget, anew every few epochs
    elastic_training_weight_magnitude   the same by other importances (paper, Fig 20)
    elastic_training_grad_magnitude
    prunetrain                          every tensor, of a network that loses channels as it trains

Differences from the paper and its published code: the head is always trained; importance is measured on a fresh batch
each time, and everything it touches is put back; the budget rests on measured whole-step times, not on a 2:1 rule.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import models
import selection_solver_DP
from data import ImageData
from history import Choice, History, StepResult
from importance import GradientMagnitude, ImportanceEvaluator, WeightMagnitude
from meters import EnergyMeter, find_energy_meter
from operation_times import count_flops
from optimizers import make_optimizer
from options import PAPER
from run_log import RunLog
from time_budget import PASSES, TEST_MARGIN, DeadlineBudget, Progress, RhoBudget, TimeBudget, pass_steps
from timing_table import TimingTable
from training_step import Evaluation, TrainStep
from utils import Stopped, UserError


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of a run; defaults are the paper's (section 6).

    `deadline` is in seconds and replaces `rho`; `interval` is in epochs, fractions allowed; a checkpoint is written
    every `checkpoint_steps` steps, if given, and when the last one is `checkpoint_minutes` old.
    """

    optimizer: str = "sgd"
    learning_rate: float = PAPER["learning_rate"]
    weight_decay: float = PAPER["weight_decay"]
    num_epochs: int = PAPER["num_epochs"]
    max_steps: int | None = None
    interval: float = PAPER["interval"]
    importance_batches: int = 1
    rho: float = PAPER["rho"]
    trained_layers: int = 1
    deadline: float | None = None
    correct_budget: bool = True
    time_resolution: int | None = None
    save_model: bool = False
    prune_interval: int = 2
    prune_ratio: float = 0.25
    prune_threshold: float = 0.7
    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 10.0


class Network(NamedTuple):
    """A model and the optimizer that is built for all of its trainable variables."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer


# --- schemes ----------------------------------------------------------------------------------------------------------


class Scheme:
    """Which tensors train, and when that changes; for some also how, or in what network."""

    def due(self, step: int) -> bool:
        """Whether to choose before step `step`, counted from 0; by default once, at the begin."""
        return step == 0

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        """The choice that holds from the step on that comes."""
        raise NotImplementedError

    def slowdown(self, step: int, images: tf.Tensor, labels: tf.Tensor) -> float | None:
        """Asked after `step` steps, with the last one's batch: the device's slowdown now; None: not measured now."""
        return None

    def penalty(self, model: keras.Model) -> tf.Tensor | None:
        """What is added to the loss within the step, besides the model's own regularisers; None: nothing."""
        return None

    def reconfigured(self, progress: Progress, network: Network) -> Network | None:
        """Another network to go on with, asked for before each choice; None: the same."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of the scheme, fit for JSON, beside the choice."""
        return {}

    def resume(self, state: dict[str, Any], choice: Choice, network: Network) -> Network:
        """Go on from what a checkpoint kept; returns the network that its weights belong to."""
        return network

    def first_test_seconds(self) -> float:
        """What the first test may take, for runs with a deadline."""
        return 0.0


class FixedScheme(Scheme):
    """The same tensors from beginning to end."""

    def __init__(self, mask: np.ndarray) -> None:
        self._mask = mask

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        return Choice(self._mask)


class ElasticScheme(Scheme):
    """The most important tensors that fit into the time budget, measured anew every `settings.interval` epochs."""

    def __init__(
        self,
        model: keras.Model,
        data: ImageData,
        settings: Settings,
        budget: TimeBudget,
        importance: type[ImportanceEvaluator] = ImportanceEvaluator,
    ) -> None:
        self._data, self._settings, self._budget = data, settings, budget
        self._head = models.head_mask(model)
        self._evaluator = importance(model, data.batch_size)
        self._has_new_table = False
        selections = selection_steps(data, settings)
        self._steps = {step: index for index, step in enumerate(selections)}
        self._pass_steps = pass_steps([*selections, run_length(data, settings)[1]]) if settings.correct_budget else ()

    def due(self, step: int) -> bool:
        return step in self._steps

    def choose(self, progress: Progress, optimizer: keras.optimizers.Optimizer) -> Choice:
        batches = self._data.probe(self._steps[progress.step], self._settings.importance_batches)
        importance = self._evaluator(optimizer, batches)
        if not self._settings.correct_budget:
            progress = progress._replace(step_ms=())
        elif not progress.slowdowns or self._has_new_table:
            progress = progress._replace(slowdowns=[self._slowdown(*batches[0]) for _ in range(PASSES[0])])
            self._has_new_table = False
        allowance = self._budget.allow(progress)
        choice = select_tensors(
            self._budget.table, importance, self._head, allowance.table_share, self._settings.time_resolution
        )
        predicted_ms = self._budget.adopt(choice.mask)
        return replace(
            choice,
            epoch=progress.step / self._data.steps_per_epoch,
            predicted_step_ms=predicted_ms * allowance.slowdown * allowance.correction,
            budget_step_ms=allowance.rho * allowance.full_step_ms,
            rho=allowance.rho,
            slowdown=allowance.slowdown,
            correction=allowance.correction,
        )

    def slowdown(self, step: int, images: tf.Tensor, labels: tf.Tensor) -> float | None:
        return self._slowdown(images, labels) if step in self._pass_steps else None

    def _slowdown(self, images: tf.Tensor, labels: tf.Tensor) -> float:
        return self._evaluator.pass_ms(images, labels) / self._budget.table.gradient_pass_ms

    def state(self) -> dict[str, Any]:
        return {"table": self._budget.table.digest()}

    def resume(self, state: dict[str, Any], choice: Choice, network: Network) -> Network:
        if state != self.state():
            print("the timing table was made anew since the checkpoint: selections from now on follow the new one")
            self._has_new_table = True  # and slowdowns until then were held against the old one
        self._budget.resume(choice.mask, choice.rho or 1.0, choice.correction or 1.0)
        return network

    def first_test_seconds(self) -> float:
        return self._budget.first_test_seconds()


def selection_steps(data: ImageData, settings: Settings) -> list[int]:
    """Steps, counted from 0, before which a selection is due: every `settings.interval` epochs.

    Raises:
        UserError: less than a step lies between two of them.
    """
    steps = settings.interval * data.steps_per_epoch
    if steps < 1:
        raise UserError(
            f"--interval {settings.interval:g}: is less than a step; an epoch has {data.steps_per_epoch} steps, so "
            f"give at least {math.ceil(1e4 / data.steps_per_epoch) / 1e4:g}"
        )
    total_steps = run_length(data, settings)[1]
    due = [math.ceil(index * steps - 1e-6) for index in range(math.ceil(total_steps / steps))]
    return [step for step in due if step < total_steps]


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
    selections = selection_steps(data, settings)
    if settings.deadline is None:
        return RhoBudget(table, head, settings.rho)
    epochs, total_steps = run_length(data, settings)
    test_batches = math.ceil(data.test_count / data.batch_size)
    return DeadlineBudget(table, head, settings.deadline, total_steps, epochs, selections, test_batches)


def run_length(data: ImageData, settings: Settings) -> tuple[int, int]:
    """How many epochs, the last perhaps incomplete, and steps a run has."""
    total_steps = min(settings.num_epochs * data.steps_per_epoch, settings.max_steps or sys.maxsize)
    return math.ceil(total_steps / data.steps_per_epoch), total_steps


def full_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train every tensor. Returns the run's summary (see `run_training`)."""
    return _fixed_training("full_training", model, data, settings, run)


def traditional_tl_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train the new head alone (transfer learning as usually meant)."""
    return _fixed_training("traditional_tl_training", model, data, settings, run)


def bn_plus_bias_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train normalisation scales and shifts, biases, and the head."""
    return _fixed_training("bn_plus_bias_training", model, data, settings, run)


def last_layers_training(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train the last `settings.trained_layers` layers (paper, Fig 2)."""
    return _fixed_training("last_layers_training", model, data, settings, run)


def _fixed_training(name: str, model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    mask = models.trained_mask(model, name, settings.trained_layers)
    return run_training(model, data, FixedScheme(mask), settings, run)


def elastic_training(
    model: keras.Model, data: ImageData, settings: Settings, run: RunLog, budget: TimeBudget
) -> dict[str, Any]:
    """Train what matters most within the time that `budget` allows (see `make_budget`)."""
    return run_training(model, data, ElasticScheme(model, data, settings, budget), settings, run)


def elastic_training_weight_magnitude(
    model: keras.Model, data: ImageData, settings: Settings, run: RunLog, budget: TimeBudget
) -> dict[str, Any]:
    """The same with the magnitude of the weights as importance (paper, Fig 20)."""
    return run_training(model, data, ElasticScheme(model, data, settings, budget, WeightMagnitude), settings, run)


def elastic_training_grad_magnitude(
    model: keras.Model, data: ImageData, settings: Settings, run: RunLog, budget: TimeBudget
) -> dict[str, Any]:
    """The same with the magnitude of the gradients as importance (paper, Fig 20)."""
    return run_training(model, data, ElasticScheme(model, data, settings, budget, GradientMagnitude), settings, run)


def prunetrain(model: keras.Model, data: ImageData, settings: Settings, run: RunLog) -> dict[str, Any]:
    """Train every tensor, and remove channels that matter little as it goes on (see `prunetrain.py`)."""
    from prunetrain import PruneTrainScheme

    return run_training(model, data, PruneTrainScheme(model, data, settings), settings, run)


# --- the loop ---------------------------------------------------------------------------------------------------------


class _Trainee:
    """The network, its optimizer, the tensors that train at present, and the compiled step that trains them."""

    def __init__(self, network: Network, batch_size: int, penalty: Callable[[keras.Model], tf.Tensor | None]) -> None:
        self._batch_size, self._penalty = batch_size, penalty
        self.replace(network)

    def replace(self, network: Network) -> None:
        """Train another network from now on, once a choice is adopted."""
        self.network = network
        self.model, self.optimizer = network
        self.evaluation = Evaluation(self.model)
        self._mask: np.ndarray | None = None
        self._step: TrainStep | None = None
        self._warm, self.step_flops = False, 0.0

    def adopt(self, mask: np.ndarray) -> None:
        """Train bool [N] `mask` from now on; the old graph goes before a new one comes."""
        if self._mask is not None and (mask == self._mask).all():
            return
        self._step = None
        gc.collect()
        self._step = TrainStep(self.model, self.optimizer, self._batch_size, mask, self._penalty)
        self._warm, self._mask = False, mask
        self.step_flops = sum(count_flops(self._step.graph).values())

    def train(self, images: tf.Tensor, labels: tf.Tensor) -> StepResult:
        """One step on one batch. The first one of a new graph, which TensorFlow then optimises, has no `step_ms`."""
        assert self._step is not None, "a scheme must choose before the first step"
        start = time.perf_counter()
        loss, accuracy, rate = self._step(images, labels)
        step_ms = (time.perf_counter() - start) * 1e3 if self._warm else None
        self._warm = True
        if not math.isfinite(loss):
            step = int(self.optimizer.iterations)
            raise UserError(f"the loss is {loss} at step {step} with learning rate {rate:g}; lower --learning_rate")
        return StepResult(loss, accuracy, rate, step_ms)

    def values(self) -> dict[str, np.ndarray]:
        """All that the network and the optimizer hold, by kind and position."""
        return {name: variable.numpy() for name, variable in self._variables()}

    def assign(self, values: dict[str, np.ndarray]) -> None:
        """Take up what `values` returned.

        Raises:
            UserError: that was another network or optimizer.
        """
        variables = dict(self._variables())
        shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
        if shapes != {name: value.shape for name, value in values.items()}:
            raise UserError("--resume: the checkpoint is of another network or optimizer; give the same options")
        for name, variable in variables.items():
            kind = variable.dtype.as_numpy_dtype  # numpy forgets the name of bfloat16
            variable.assign(values[name] if values[name].dtype == kind else values[name].view(kind))

    def is_finite(self) -> bool:
        """Whether all that training changes still consists of numbers."""
        variables = [*self.model.trainable_variables, *self.optimizer.variables]
        return all(np.isfinite(variable.numpy()).all() for variable in variables)

    def _variables(self) -> Iterator[tuple[str, Any]]:
        for owner, variables in (("model", self.model.variables), ("optimizer", self.optimizer.variables)):
            for index, variable in enumerate(variables):
                yield f"{owner}/{index}", variable.value


class _Training:
    """One run from its begin, or from its last checkpoint, to its end."""

    def __init__(
        self,
        model: keras.Model,
        data: ImageData,
        scheme: Scheme,
        settings: Settings,
        run: RunLog,
        meter: EnergyMeter | str,
    ) -> None:
        self._data, self._scheme, self._settings, self._run, self._meter = data, scheme, settings, run, meter
        self._epochs, self._total_steps = run_length(data, settings)
        optimizer = make_optimizer(settings.optimizer, settings.learning_rate, settings.weight_decay, self._total_steps)
        optimizer.build(model.trainable_variables)
        self._trainee = _Trainee(Network(model, optimizer), data.batch_size, scheme.penalty)
        self._history = History()
        checkpoint = run.checkpoints.latest()
        if checkpoint is not None:
            if checkpoint.state["images"] != self._images():
                raise UserError(
                    f"--resume: the run was begun with {checkpoint.state['images']} training and test images, now they "
                    f"are {self._images()}; give the same data, or begin anew with --overwrite"
                )
            self._history = History.from_record(checkpoint.state["history"])
            choice = self._history.choice
            self._trainee.replace(scheme.resume(checkpoint.state["scheme"], choice, self._trainee.network))
            self._trainee.assign(checkpoint.arrays)
            self._trainee.adopt(choice.mask)
        if isinstance(meter, EnergyMeter):
            self._history.clocks.meter = meter.joules
        run.begin(self._history, checkpoint.state["events"] if checkpoint is not None else None)
        self._last_checkpoint = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary. See `run_training`."""
        history = self._history
        try:
            with tqdm(total=self._total_steps, initial=history.step, unit="step", dynamic_ncols=True) as bar:
                # Steps of a run that was cut off between its last step and the test are still to be tested.
                while len(history.epochs) < self._epochs and (history.results or not self._is_out_of_time()):
                    with history.clocks.running("training"):
                        self._train_epoch(bar)
                    self._test(bar)
        except Stopped as stopped:
            self._save_checkpoint()
            raise Stopped(
                stopped.number,
                f"stopped after step {history.step} of {self._total_steps}; "
                f"go on with: python main.py --resume {self._run.folder}",
            ) from None
        return self._summary()

    def _train_epoch(self, bar: tqdm) -> None:
        """The steps of the present epoch that are still to do."""
        history, epoch = self._history, len(self._history.epochs)
        begin, end = (min(count * self._data.steps_per_epoch, self._total_steps) for count in (epoch, epoch + 1))
        if history.step == end:  # the run was cut off when only the test was left
            return
        title = f"epoch {epoch + 1}/{self._epochs}"
        for images, labels in self._data.train(epoch, history.step - begin).take(end - history.step):
            if history.results and self._is_out_of_time():
                break
            if self._scheme.due(history.step):
                bar.set_description(f"{title}, selecting")
                with history.clocks.running("selection"):
                    self._select()
            bar.set_description(title, refresh=False)
            history.record_step(self._trainee.train(images, labels))
            self._run.record_step()
            with history.clocks.running("selection"):
                history.record_slowdown(self._scheme.slowdown(history.step, images, labels))
            bar.set_postfix_str(_progress(history), refresh=False)
            bar.update()
            self._run.stop.check()
            self._save_checkpoint_if_due()

    def _is_out_of_time(self) -> bool:
        """Whether the deadline leaves no time for another step and the test after it; once it did, for good.

        A gradient pass after that step, and what the first step of a new graph takes longer, are left to the margin.
        """
        history, scheme = self._history, self._scheme
        if self._settings.deadline is None or not history.intervals:
            return False
        first_test_seconds = scheme.first_test_seconds() * (history.choice.slowdown or 1.0)
        needed = TEST_MARGIN * max(history.latest_test_seconds, default=first_test_seconds)
        needed += sum(history.intervals[-1].step_ms[-1:]) / 1e3
        if scheme.due(history.step):
            needed += history.selection_seconds or 0.0
        history.out_of_time |= history.clocks.elapsed() + needed > self._settings.deadline
        return history.out_of_time

    def _select(self) -> None:
        progress = self._history.progress(self._epochs, self._total_steps)
        if (network := self._scheme.reconfigured(progress, self._trainee.network)) is not None:
            self._trainee.replace(network)
        choice = self._scheme.choose(progress, self._trainee.optimizer)
        self._trainee.adopt(choice.mask)
        self._run.record_choice(choice, self._trainee.step_flops)

    def _test(self, bar: tqdm) -> None:
        """Test, and record the epoch."""
        history, begin = self._history, time.perf_counter()
        bar.set_description(f"epoch {len(history.epochs) + 1}/{self._epochs}, testing")
        with history.clocks.running("validation"):
            loss, accuracy = self._trainee.evaluation(self._data.test(), self._run.stop.check)
        is_best = self._settings.save_model and accuracy > history.best_accuracy
        if self._settings.save_model:
            self._run.save_model(self._trainee.model, is_best)
        history.record_epoch(loss, accuracy)
        self._run.record_epoch()
        history.test_seconds.append(time.perf_counter() - begin)
        self._save_checkpoint_if_due(at_once=is_best)  # so that best.keras is never of an epoch that comes again

    def _save_checkpoint_if_due(self, at_once: bool = False) -> None:
        every, minutes = self._settings.checkpoint_steps, self._settings.checkpoint_minutes
        by_steps = every is not None and bool(self._history.results) and self._history.step % every == 0
        if at_once or by_steps or time.monotonic() - self._last_checkpoint >= 60 * minutes:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        """Raises `UserError` where weights are no longer finite: the last good checkpoint must stay."""
        with self._history.clocks.paused("training"):
            if not self._trainee.is_finite():
                raise UserError(
                    f"a weight is not finite after step {self._history.step} with learning rate "
                    f"{float(self._trainee.optimizer.learning_rate):g}; lower --learning_rate"
                )
            state = {
                "history": self._history.to_record(),
                "scheme": self._scheme.state(),
                "images": self._images(),
                "events": self._run.flushed_events(),
            }
            self._run.checkpoints.save(self._history.step, self._trainee.values(), state)
        self._last_checkpoint = time.monotonic()

    def _images(self) -> list[int]:
        return [self._data.train_count, self._data.test_count]

    def _summary(self) -> dict[str, Any]:
        history = self._history
        step_ms, full_ms = history.step_ms, history.full_training_ms()
        training, selection = (history.clocks.seconds(name) for name in ("training", "selection"))
        return {
            "epochs": len(history.epochs),
            "steps": history.step,
            "planned_steps": self._total_steps,
            "best_accuracy": history.best_accuracy,
            "final_accuracy": history.epochs[-1]["test_accuracy"],
            "train_seconds": training,
            "validation_seconds": history.clocks.seconds("validation"),
            "selection_seconds": selection,
            "selection_percent": 100 * selection / training,
            "elapsed_seconds": history.clocks.elapsed(),
            "median_step_ms": float(np.median(step_ms)) if step_ms else None,
            "rho_measured": sum(step_ms) / full_ms if full_ms else None,
            # All of training time, selecting included, over that of full training as it would have run.
            "time_over_full": 1e3 * training / (full_ms / len(step_ms) * history.step) if full_ms else None,
            "train_flops": history.flops(),
            "peak_memory_mb": history.peak("peak_memory_mb"),
            "gpu_peak_memory_mb": history.peak("gpu_peak_memory_mb"),
            **self._energy(),
            "training_spans": history.clocks.spans,
        }

    def _energy(self) -> dict[str, Any]:
        joules, missing = self._history.clocks.joules, None
        if joules is None:
            here = self._meter if isinstance(self._meter, str) else self._meter.failure
            missing = here or "a part of the run was trained without an energy meter"
        name = None if isinstance(self._meter, str) else self._meter.name
        return {"energy_joules": joules, "energy_meter": name, "energy_missing": missing}


def run_training(
    model: keras.Model, data: ImageData, scheme: Scheme, settings: Settings, run: RunLog
) -> dict[str, Any]:
    """The one training loop: choose tensors, train, test, record; then again. Goes on from `run`'s last checkpoint.

    Training time excludes testing and checkpoints and includes measuring importance, solving, and compiling a new step.

    Returns:
        What summary.json holds of the training itself: accuracies in 0…1, times in seconds, memory in MB, energy in J
        (or null, and why), FLOPs (two for each multiply-accumulate).

    Raises:
        UserError: the loss is no longer a finite number, or a file cannot be written.
        Stopped: by a signal; a checkpoint has been written.
    """
    meter = find_energy_meter()
    with nullcontext() if isinstance(meter, str) else meter:
        return _Training(model, data, scheme, settings, run, meter).run()


def _progress(history: History) -> str:
    recent = history.results[-20:]
    step_ms = [result.step_ms for result in recent if result.step_ms is not None]
    text = f"loss {np.mean([r.loss for r in recent]):.3f}, accuracy {np.mean([r.accuracy for r in recent]):.1%}"
    if history.epochs:
        text += f", tested {history.epochs[-1]['test_accuracy']:.1%}"
    if step_ms:
        budget_ms = history.choice.budget_step_ms
        budget = f" of {budget_ms:.0f}" if budget_ms else ""
        text += f", step {np.median(step_ms):.0f}{budget} ms"
    return text
