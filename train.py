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

import time
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
from tqdm import tqdm

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.networks.tensors import trained_mask
from elastic_trainer.runs.energy import EnergyMeter, find_energy_meter
from elastic_trainer.runs.history import History
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.importance import GradientMagnitude, WeightMagnitude
from elastic_trainer.selection.schemes import ElasticScheme, FixedScheme, Scheme, run_length
from elastic_trainer.selection.time_budget import TEST_MARGIN, TimeBudget
from elastic_trainer.settings import Settings
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.state import Network, _Trainee
from utils import Stopped, UserError


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
    mask = trained_mask(model, name, settings.trained_layers)
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
    from elastic_trainer.pruning.scheme import PruneTrainScheme

    return run_training(model, data, PruneTrainScheme(model, data, settings), settings, run)


# --- the loop ---------------------------------------------------------------------------------------------------------


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
