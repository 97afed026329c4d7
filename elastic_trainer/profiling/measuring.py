"""Measured steps of a few selections, which the time model is fitted to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from elastic_trainer.settings import Settings
from elastic_trainer.timing.attribution import Attribution
from elastic_trainer.timing.fit import with_kernels
from elastic_trainer.timing.wall_time import MAX_ROUNDS, MIN_ROUNDS, measure_ms, median_ms, without_drift

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.engine.task import Task

MEASURING_SECONDS = Settings.seconds
COPIED_ROWS, COPIED_ROW_BYTES, COPIED_BATCH = 512, 1 << 17, 4  # 64 MB, more than caches hold
# Steps of this length and more need no warm-up: what cold caches cost is small beside them. Steps of 30 to 110 ms of
# MobileNetV2 took 12 to 21 % longer without one (docs/log/time_model.md).
LONG_STEP_MS = 200
# Depth (share of all tensors) and density of the selections that the fit is measured on, besides the head.
CALIBRATION = (
    *((depth, 1.0) for depth in (0.06, 0.12, 0.25, 0.5, 0.75)),
    *((depth, 0.5) for depth in (0.4, 0.6, 0.8, 1.0)),
    *((depth, 1 / 6) for depth in (0.25, 0.5, 0.75, 1.0)),
)
HEAD = (0.0, 1.0)


class Training(NamedTuple):
    """What steps are measured with: `batch` trains in every step, `optimizer` is built for all trainable variables."""

    task: Task
    optimizer: keras.optimizers.Optimizer
    batch: Batch


class MeasuredStep(NamedTuple):
    """Wall times of one step."""

    selection: int  # which of the selections it trains
    mask: np.ndarray  # bool [N] over `model.trainable_variables`
    from_features: bool  # that are cached, else from inputs
    ms: np.ndarray  # [rounds]


def calibration_masks(
    positions: np.ndarray,
    kernels: np.ndarray,
    head: np.ndarray,
    calibration: Sequence[tuple[float, float]],
) -> list[np.ndarray]:
    """Selections whose steps are measured for the fit: bool [N] over `model.trainable_variables`, the full one last.

    `head` and shares of the tensors down to different depths; `positions` and `kernels` as of `Attribution`. No two are
    the same, so a network of few tensors has fewer of them.
    """
    rng = np.random.default_rng(0)
    masks: list[np.ndarray] = []
    for depth, density in calibration:
        deepest = max(int(depth * len(positions)), 1)
        selected = np.zeros(len(positions), bool)
        selected[:deepest] = rng.random(deepest) < density
        selected[deepest - 1] = True
        mask = head.copy()
        mask[positions] |= with_kernels(selected | head[positions], kernels)
        if not (mask.all() or any((mask == other).all() for other in masks)):
            masks.append(mask)
    return [*masks, np.ones(len(positions), bool)]


def measure_steps(runs: Sequence[Callable[[], object]], seconds: float = MEASURING_SECONDS) -> np.ndarray:
    """Wall times [rounds, len(runs)] in ms of compiled steps, without drift: of `MIN_ROUNDS` to `MAX_ROUNDS` rounds."""
    warmup = int(np.median(measure_ms(runs, rounds=1)) < LONG_STEP_MS)
    times, end = list[np.ndarray](), time.perf_counter() + seconds
    with tqdm(desc=f"measuring steps for {seconds:g} s", unit="round") as bar:
        while len(times) < MIN_ROUNDS or (len(times) < MAX_ROUNDS and time.perf_counter() < end):
            times.append(measure_ms(runs, rounds=1, warmup=warmup))
            bar.update()
    return without_drift(np.concatenate(times))


def idle_training(model: keras.Model, settings: Settings) -> Training:
    """What steps of an image classifier are measured with: its `idle_optimizer`, and noise, all of the first class."""
    import tensorflow as tf

    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.engine.optimizers import idle_optimizer
    from elastic_trainer.engine.task import ImageClassification

    task = ImageClassification(model)
    images, labels, _ = task.signature(settings.batch_size)
    batch = Batch(lambda: tf.random.uniform(images.shape, 0, 255, seed=0), tf.zeros(labels.shape, labels.dtype))
    return Training(task, idle_optimizer(model, settings.optimizer, settings.clips_gradients), batch)


def compile_steps(training: Training, masks: Sequence[np.ndarray | None]) -> list[partial[Any]]:
    """For each of `masks` (bool [N]; None: all tensors) a call of its `TrainStep`, compiled, on the batch."""
    from elastic_trainer.engine.step import TrainStep

    task, optimizer, batch = training
    runs = []
    for mask in tqdm(masks, desc="compiling steps", unit="step", disable=not masks):
        step = TrainStep(task, optimizer, len(batch), mask)
        runs.append(partial(step, batch.inputs, batch.targets, batch.weights))
        runs[-1]()  # the first call compiles
    return runs


def compile_from_features(run: partial[Any]) -> partial[Any] | None:
    """A call that trains from cached features as `run` of `compile_steps` does; None if there is nothing to cache."""
    from elastic_trainer.engine.prefix import split_step

    parts = split_step(run.func)  # type: ignore[arg-type]  # the TrainStep
    if parts is None:
        return None
    inputs, targets, weights = run.args
    from_features = partial(parts, parts.prefix(inputs), targets, weights)
    from_features()  # the first call compiles
    return from_features


def full_step_ms(training: Training) -> float:
    """Wall time in ms of a step that trains everything: the median of a few."""
    return median_ms(compile_steps(training, [None])[0])


def copying_ms() -> float:
    """Wall time in ms of copying a MB of features for a step, from memory that no cache holds."""
    import tensorflow as tf

    kept = np.ones((COPIED_ROWS, COPIED_ROW_BYTES // 4), np.float32)  # as `engine.features` keeps them
    parts = np.random.default_rng(0).permutation(COPIED_ROWS).reshape(-1, COPIED_BATCH)
    reads = [partial(lambda part: tf.constant(kept[part]), part) for part in parts]
    reads[0]()  # the first call takes longer
    return float(np.mean(measure_ms(reads, 1))) / (1e-6 * COPIED_BATCH * COPIED_ROW_BYTES)


def measure(
    training: Training, run_full: partial[Any], attribution: Attribution, seconds: float = MEASURING_SECONDS
) -> tuple[list[MeasuredStep], dict[str, float]]:
    """Measure steps of a few selections, from inputs and from cached features, for `seconds`, at least five rounds.

    `run_full` is the full step, of `compile_steps`, to which `attribution` belongs. Returns the steps, and the other
    measured fields of the `TimingTable`.
    """
    from elastic_trainer.engine.step import AllGradients

    task, _, batch = training
    *some, everything = calibration_masks(attribution.positions, attribution.kernels, task.head, [HEAD, *CALIBRATION])
    masks, runs = [everything, *some], [run_full, *compile_steps(training, some)]
    rows = [(k, False, run) for k, run in enumerate(runs)]
    rows += [(k, True, cached) for k, run in enumerate(runs) if (cached := compile_from_features(run)) is not None]
    gradient_pass = partial(AllGradients(task, len(batch)).run, batch)
    # The gradient pass is next to the full step, so that both see the same disturbances.
    pass_ms, *steps_ms = measure_steps([gradient_pass, *(run for *_, run in rows)], seconds).T
    steps = [MeasuredStep(k, masks[k], is_cached, ms) for (k, is_cached, _), ms in zip(rows, steps_ms, strict=True)]
    full_ms = float(np.median(steps_ms[0]))
    wall_ms = {
        "full_step_ms": full_ms,
        "gradient_pass_ms": float(np.median(pass_ms / steps_ms[0])) * full_ms,
    }
    return steps, wall_ms
