"""Measures the memory of a few selections, each in a process of its own, to correct predictions.

Only one selection can be measured in a process: TensorFlow's allocator keeps what it took, and the next one takes its
memory from that. The paper does not cover memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from elastic_trainer.machine import (
    can_reset_peak,
    has_gpu,
    in_own_process,
    load_tensorflow,
    peak_memory_mb,
    reset_peak,
    resident_memory_mb,
    silenced,
)
from elastic_trainer.memory.step_memory import MemoryPeaks, step_memory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import keras

    from elastic_trainer.datasets.batches import Batch
    from elastic_trainer.task import Task

STEPS = 3  # after which a process takes hardly more

# Makes what is trained, in the process in which it trains.
Setup = Callable[[], "tuple[Task, keras.optimizers.Optimizer, Batch]"]


def measure_peaks(setup: Setup, head: np.ndarray) -> MemoryPeaks:
    """Of steps that train the head, the upper half of the tensors, and all of them.

    Args:
        setup: can be pickled.
        head: bool [N] over `model.trainable_variables`.

    Raises:
        EOFError: a process was ended, as the system does where memory is used up.
        OSError: there is no memory to start one.
    """
    half = head | (np.arange(len(head)) >= len(head) // 2)
    found = measure_selections(setup, [head, half, np.ones(len(head), bool)])
    predicted_mb, measured_mb = zip(*sorted(found), strict=True)
    return MemoryPeaks(predicted_mb, measured_mb)


def can_measure() -> bool:
    """Whether the system reports what a process takes, and counts its peak from a given moment."""
    return resident_memory_mb() is not None and can_reset_peak() and not has_gpu()


def measure_selections(setup: Setup, masks: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """Predicted and measured MB of each of `masks`, bool [N] over `model.trainable_variables`; see `measure_peaks`."""
    return [in_own_process(_send_peak, setup, mask) for mask in tqdm(masks, desc="measuring memory", unit="process")]


def _send_peak(sender: Connection, setup: Setup, mask: np.ndarray) -> None:
    """Send predicted and measured MB of steps that train `mask`, above what this process took before their trace."""
    with silenced():  # the other process has said what there is to say of Keras
        load_tensorflow()
    from elastic_trainer.training.step import TrainStep

    with contextlib.suppress(OSError):  # the system ends this process rather than the one that waits for it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with silenced(1):  # the other process has said what there is to say of the network
        task, optimizer, batch = setup()
    values = batch.inputs, batch.targets, batch.weights
    before_mb = resident_memory_mb() or 0.0
    reset_peak()
    step = TrainStep(task, optimizer, len(batch), mask)
    for _ in range(STEPS):
        step(*values)
    measured_mb = (peak_memory_mb() or 0.0) - before_mb
    with contextlib.suppress(BrokenPipeError):  # the program that waits for it was ended
        sender.send((step_memory(step.graph, step.variables).megabytes, measured_mb))
