"""Trains a network under a scheme of `elastic_trainer.registry`: the one training loop (paper sections 3 and 4).

A scheme decides what trains (`elastic_trainer.selection.schemes.Scheme`). Stepping, timing, recording, checkpoints and
validation exist once, in `run_training`.

    full_training                       every tensor
    traditional_tl_training             the new head
    bn_plus_bias_training               normalisation scales and shifts, biases, and the head
    last_layers_training                the last few layers (paper, Fig 2)
    elastic_training                    what the Tensor Selector picks within the time budget, again every few epochs
    elastic_training_weight_magnitude   the same by other importances (paper, Fig 20)
    elastic_training_grad_magnitude
    elastic_training_random             the same at random, a baseline
    elastic_training_upper_part         the largest upper part of the network within the time budget
    prunetrain                          every tensor, of a network that loses channels as it trains

Differences from the paper and its published code: the head is always trained; importance is measured on a fresh batch
each time, and everything it touches is restored; the budget rests on measured step times, not on a 2:1 rule.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData, ImageOrder
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.machine import quick_collections
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.registry import SCHEMES
from elastic_trainer.runs.checkpoint import Checkpoint, CheckpointClock
from elastic_trainer.runs.energy import EnergyMeter, find_energy_meter
from elastic_trainer.runs.history import History
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.runs.summary import run_results
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import HeadFirst, Scheme, SchemeContext
from elastic_trainer.selection.select import Selection
from elastic_trainer.selection.time_budget import TimeBudget
from elastic_trainer.settings import Settings
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.training.features import Features
from elastic_trainer.training.optimizers import HeadPhase, make_optimizer
from elastic_trainer.training.state import TrainState

FALLING = 0.98  # mean loss of half an epoch over that of the half before, if training makes progress


def train(
    train_type: str,
    model: keras.Model,
    data: ImageData,
    settings: Settings,
    run: RunLog,
    budget: TimeBudget | None = None,
    stop: StopSignals | None = None,
) -> dict[str, Any]:
    """Train `model` under the scheme called `train_type`, a key of `SCHEMES`. See `run_training`.

    Args:
        budget: of an elastic scheme (`selection.schemes.make_budget`).
    """
    scheme = SCHEMES[train_type].make(SchemeContext(model, data, settings, budget))
    head_steps = Schedule.of(settings, data.steps_per_epoch).head_steps
    if head_steps:
        scheme = HeadFirst(scheme, head_mask(model), head_steps)
    return run_training(model, data, scheme, settings, run, stop)


def __getattr__(name: str) -> Any:
    """`train` for the scheme called `name`, such as `train.elastic_training`."""
    if name in SCHEMES:
        return partial(train, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Training:
    """One run from its start, or from its last checkpoint, to its end. Arguments as for `run_training`."""

    def __init__(
        self,
        model: keras.Model,
        data: ImageData,
        scheme: Scheme,
        settings: Settings,
        run: RunLog,
        stop: StopSignals,
        meter: EnergyMeter | str,
    ) -> None:
        self._data, self._scheme, self._settings, self._run, self._stop = data, scheme, settings, run, stop
        self._meter = meter
        self._schedule = Schedule.of(settings, data.steps_per_epoch)
        head_steps = self._schedule.head_steps
        optimizer = make_optimizer(
            settings.optimizer,
            settings.learning_rate,
            settings.weight_decay,
            self._schedule.total_steps,
            HeadPhase(head_steps, settings.head_learning_rate) if head_steps else None,
            settings.gradient_clipping,
            np.flatnonzero(head_mask(model)).tolist(),
            settings.warmup,
        )
        optimizer.build(model.trainable_variables)
        features = None
        if settings.feature_cache != "off":
            # A run that is to be repeated bit for bit makes no choice by the clock.
            features = Features(data, run.folder, settings.feature_cache == "float16", settings.correct_budget)
        self._state = TrainState(model, optimizer, data.batch_size, scheme.penalty, features)
        self._history = History()
        self._step_flops = 0.0
        self._is_advised = False
        checkpoint = run.checkpoints.latest()
        if checkpoint is not None:
            self._restore(checkpoint)
        if isinstance(meter, EnergyMeter):
            self._history.clocks.meter = meter.joules
        run.start(self._history, checkpoint.state["events"] if checkpoint is not None else None)
        self._checkpoint_clock = CheckpointClock(settings.checkpoint_minutes, settings.checkpoint_steps)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises `UserError` if it is of other images or of another network."""
        if checkpoint.state["images"] != self._images():
            raise UserError(
                f"--resume: the run was started with {checkpoint.state['images']} training and test images, now they "
                f"are {self._images()}; give the same data, or start again with --overwrite"
            )
        self._history = history = History.from_record(checkpoint.state["history"])
        if self._settings.save_model and history.saved_accuracy < history.best_accuracy:
            print("--save_model: best.keras will be of the epochs that are kept; the best one so far was not")
        self._scheme.resume(checkpoint.state["scheme"], self._history.selection, self._state)
        self._state.assign(checkpoint.arrays)
        made = history.cached_since()
        if made is not None:
            self._state.cut_as_for(made.selection.mask)

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the results. See `run_training`."""
        history, total_steps = self._history, self._schedule.total_steps
        try:
            with tqdm(total=total_steps, initial=history.step, unit="step", dynamic_ncols=True) as bar:
                if self._settings.save_model and history.step == 0:
                    self._keep_start(bar)
                # Steps of a run that was interrupted between its last step and the validation still need that one.
                while len(history.epochs) < self._schedule.epochs and (history.results or not self._is_out_of_time()):
                    with history.clocks.running("training"):
                        self._train_epoch(bar)
                    self._validate(bar)
        except Stopped as stopped:
            self._save_checkpoint()
            raise Stopped(
                stopped.number,
                f"stopped after step {history.step} of {total_steps}; "
                f"continue with: python main.py --resume {self._run.folder}",
            ) from None
        return {**run_results(history, total_steps, self._meter), "feature_mb": self._state.features.megabytes}

    def _train_epoch(self, bar: tqdm) -> None:
        """The steps of the present epoch that are left."""
        history, epoch = self._history, len(self._history.epochs)
        start, end = self._schedule.steps_of(epoch)
        if history.step == end:  # the run was interrupted when only the validation was left
            return
        title = f"epoch {epoch + 1}/{self._schedule.epochs}"
        part = epoch, history.step - start, end - history.step
        coming = self._data.order(*part)
        for batch in self._data.train(*part):
            if history.results and self._is_out_of_time():
                break
            if self._scheme.is_due(history.step):
                bar.set_description(f"{title}, selecting")
                with history.clocks.running("selection"):
                    self._select(coming)
            elif not self._state.is_adopted:
                self._adopt(history.selection, coming)
            bar.set_description(title, refresh=False)
            coming = coming.after(self._data.batch_size)
            history.record_step(self._state.train(batch, coming))
            self._run.record_step()
            with history.clocks.running("selection"):
                history.record_slowdown(self._scheme.slowdown(history.step, batch))
            if bar.update():  # shown ten times a second at most
                bar.set_postfix_str(_progress(history), refresh=False)
            self._stop.check()
            self._save_checkpoint_if_due()

    def _is_out_of_time(self) -> bool:
        """Whether the deadline leaves no time for another step and the validation after it; once true, always true."""
        history = self._history
        if self._settings.deadline is not None and history.intervals:
            history.out_of_time |= self._scheme.is_out_of_time(history.progress(self._schedule))
        return history.out_of_time

    def _select(self, coming: ImageOrder) -> None:
        selection = self._selected(coming)
        if selection.needs_features and self._state.features.cache is None:  # they turned out not to be possible
            selection = self._selected(coming)
        self._run.end_interval()
        self._history.record_selection(selection, self._step_flops)
        self._run.record_selection()

    def _selected(self, coming: ImageOrder) -> Selection:
        """The selection that is due, adopted."""
        features = self._state.features
        progress = self._history.progress(self._schedule, features_possible=features.are_possible)
        selection = self._scheme.select(progress, self._state)
        start = time.perf_counter()
        self._adopt(selection, coming)
        selection.seconds["trace"] = time.perf_counter() - start
        return selection

    def _adopt(self, selection: Selection, coming: ImageOrder) -> None:
        """Train `selection` from now on, first on the images `coming`."""
        step, total_steps = self._history.step, self._schedule.total_steps
        steps = selection.feature_steps
        if steps is None:
            steps = self._scheme.next_selection(step, total_steps) - step
        if self._state.adopt(selection.mask, coming, steps, selection.keeps_features):
            self._step_flops = sum(count_flops(self._state.step_graph).values())

    def _keep_start(self, bar: tqdm) -> None:
        """Save the model that training starts from: best.keras is never a worse one."""
        history, start = self._history, time.perf_counter()
        bar.set_description("validating the start")
        _, history.start_accuracy = self._tested()
        self._run.save_model(self._state.model, best=True)
        history.saved_accuracy = history.start_accuracy
        history.validation_seconds.append(time.perf_counter() - start)

    def _tested(self) -> tuple[float, float]:
        """Loss and accuracy over the test images."""
        with self._history.clocks.running("validation"):
            return self._state.evaluation(self._data.test(), self._stop.check)

    def _validate(self, bar: tqdm) -> None:
        """Validate on the test images, and record the epoch."""
        history, start = self._history, time.perf_counter()
        bar.set_description(f"epoch {len(history.epochs) + 1}/{self._schedule.epochs}, validating")
        loss, accuracy = self._tested()
        advice = _guessing_advice([result.loss for result in history.results], self._data, self._settings)
        if advice and not self._state.model.losses and not self._is_advised:  # a model's regularisers count in the loss
            self._is_advised = True
            tqdm.write(f"epoch {len(history.epochs) + 1}: {advice}")
        is_best = self._settings.save_model and accuracy > history.saved_accuracy
        if self._settings.save_model:
            self._run.save_model(self._state.model, is_best)
            history.saved_accuracy = max(history.saved_accuracy, accuracy)
        history.record_epoch(loss, accuracy)
        self._run.record_epoch()
        history.validation_seconds.append(time.perf_counter() - start)
        self._save_checkpoint_if_due(at_once=is_best)  # so that best.keras is never of an epoch that is repeated

    def _save_checkpoint_if_due(self, at_once: bool = False) -> None:
        step = self._history.step if self._history.results else None  # steps count within an epoch alone
        if at_once or self._checkpoint_clock.is_due(step):
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        """Raises `UserError` if a weight is not finite: the last good checkpoint must stay."""
        with self._history.clocks.paused("training"):
            self._state.check_finite(self._history.step)
            state = {
                "history": self._history.to_record(),
                "scheme": self._scheme.to_record(),
                "images": self._images(),
                "events": self._run.flushed_events(),
            }
            self._run.checkpoints.save(self._history.step, self._state.values(), state)
        self._checkpoint_clock.restart()

    def _images(self) -> list[int]:
        return [self._data.train_count, self._data.test_count]


def run_training(
    model: keras.Model,
    data: ImageData,
    scheme: Scheme,
    settings: Settings,
    run: RunLog,
    stop: StopSignals | None = None,
) -> dict[str, Any]:
    """The one training loop: select, train, validate, record, again and again. Continues from `run`'s last checkpoint.

    Training time excludes validation and checkpoints and includes measuring importance, solving, and compiling a new
    step.

    Args:
        stop: reports stop requests; by default SIGINT and SIGTERM are handled while this runs.

    Returns:
        See `runs.summary.run_results`.

    Raises:
        UserError: the loss is no longer a finite number, or a file cannot be written.
        Stopped: by a signal; a checkpoint has been written.
    """
    meter = find_energy_meter()
    with (
        quick_collections(),
        nullcontext(stop) if stop is not None else StopSignals() as signals,
        nullcontext() if isinstance(meter, str) else meter,
    ):
        return _Training(model, data, scheme, settings, run, signals, meter).run()


def _guessing_advice(losses: list[float], data: ImageData, settings: Settings) -> str | None:
    """What to change if the second half of an epoch's training losses was no better than guessing; None if it was."""
    earlier, loss = (float(np.mean(part)) for part in np.array_split(losses, 2)) if losses[1:] else (0.0, 0.0)
    if loss <= data.guessing_loss:
        return None
    advice = "lower --learning_rate" if loss > FALLING * earlier else "it falls: train longer, or raise --learning_rate"
    warmup = "" if settings.warmup or settings.optimizer != "sgd" else ", or let it rise at first (--warmup 0.1)"
    return (
        f"the training loss is {loss:.2f}; predicting the share of each class has {data.guessing_loss:.2f}; "
        f"{advice}{warmup}"
    )


def _progress(history: History) -> str:
    recent = history.results[-20:]
    step_ms = [result.step_ms for result in recent if result.step_ms is not None]
    text = f"loss {np.mean([r.loss for r in recent]):.3f}, accuracy {np.mean([r.accuracy for r in recent]):.1%}"
    if history.epochs:
        text += f"; validation {history.epochs[-1]['test_accuracy']:.1%}"
    if step_ms:
        budget_ms = history.selection.budget_step_ms
        budget = f" of {budget_ms:.0f}" if budget_ms else ""
        text += f", step {np.median(step_ms):.0f}{budget} ms"
    return text
