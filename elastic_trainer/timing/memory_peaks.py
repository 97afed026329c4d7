"""Peaks of memory, measured: a few selections train in processes of their own, which corrects what is predicted.

Only one selection can be measured in a process: TensorFlow's allocator keeps what it took, and the next one takes its
memory from that. The paper does not cover memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from elastic_trainer.machine import load_tensorflow, peak_memory_mb, resident_memory_mb
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
    """Of steps that train the head, every second tensor of the upper half beside it, and everything.

    Args:
        setup: can be pickled.
        head: bool [N] over `model.trainable_variables`.

    Raises:
        EOFError: a process was ended, as the system does where memory is used up.
    """
    places = np.arange(len(head))
    half = head | ((places >= len(head) // 2) & (places % 2 == 0))
    predicted_mb, measured_mb = zip(*sorted(peaks_mb(setup, [head, half, np.ones(len(head), bool)])), strict=True)
    return MemoryPeaks(predicted_mb, measured_mb)


def peaks_mb(setup: Setup, masks: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """Predicted and measured MB of each of `masks`, bool [N] over `model.trainable_variables`; see `measure_peaks`."""
    found, spawn = [], get_context("spawn")
    for mask in tqdm(masks, desc="measuring memory", unit="process"):
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_send_peak, args=(sender, setup, mask), daemon=True)
        process.start()
        sender.close()  # the process has it
        found.append(receiver.recv())
        process.join()
    return found


def _send_peak(sender: Connection, setup: Setup, mask: np.ndarray) -> None:
    """Send predicted and measured MB of steps that train `mask`, above what this process took before their trace."""
    load_tensorflow()
    from elastic_trainer.training.step import TrainStep

    task, optimizer, batch = setup()
    values = batch.inputs, batch.targets, batch.weights
    before_mb = resident_memory_mb()
    assert before_mb is not None, "the system reports how much memory a process takes"
    with contextlib.suppress(OSError):  # else the peak counts from the start of the process, which is no less
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # it counts from here
    step = TrainStep(task, optimizer, len(batch), mask)
    for _ in range(STEPS):
        step(*values)
    measured_mb = (peak_memory_mb() or before_mb) - before_mb
    with contextlib.suppress(BrokenPipeError):  # the program that waits for it was ended
        sender.send((step_memory(step.graph, step.variables).megabytes, measured_mb))
