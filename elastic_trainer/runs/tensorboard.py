"""What TensorBoard shows of a run: curves, and the map of the trained tensors.

TensorBoard reads the files of a run by their names, and takes the time of each event from it. Both go on from those of
an interrupted run, also where the time of day was set back meanwhile.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_trainer.engine.state import StepResult
from elastic_trainer.runs.history import RECENT, means_of, median_step_ms
from elastic_trainer.runs.listener import Listener
from elastic_trainer.system.errors import importing
from elastic_trainer.system.files import writing

with importing("TensorBoard's events"):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.image.metadata import create_summary_metadata
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.summary.writer.record_writer import RecordWriter
    from tensorboard.util.tensor_util import make_tensor_proto

METERS = ("train_flops", "energy_joules", "peak_memory_mb", "gpu_peak_memory_mb")  # columns of metrics.csv
POINT_SECONDS = 0.5  # from one point of the training curves to the next
PREFIX = "events.out.tfevents."
MAP_SIZE = 600  # pixels of the map, about


class EventsWriter(Listener):
    """Writes TensorBoard's events of one run into its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._file: Any = None
        self._results: list[StepResult] = []  # of the epoch
        self._last_point = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start another file of events. What an interrupted run wrote after its checkpoint is there twice, then."""
        earlier = [*self._folder.glob(f"{PREFIX}*")]
        walls = [event.wall_time for path in earlier for event in EventFileLoader(str(path)).Load()]
        self._start = max([time.time(), *walls]) - time.monotonic()
        number = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in earlier)])
        path = self._folder / f"{PREFIX}{number:010}.{os.getpid()}"
        with writing(path):
            self._file = path.open("wb", buffering=0)  # TensorBoard reads it while it grows
        self._write(Event(file_version="brain.Event:2"))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not epoch and self.trainer.history.start is not None:  # the model that training started from
            self._write_scalars(0, {f"test/{name}": value for name, value in self.trainer.history.start.items()})

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        names, selection = ("rho", "slowdown", "correction", "predicted_step_ms"), self.trainer.history.selection
        memory, values = self.trainer.training.memory, {name: getattr(selection, name) for name in names}
        values |= {"predicted_memory_mb": selection.memory_mb}
        values |= {"memory_mb": memory.limit_mb if memory.has_limit else None}
        self._write_scalars(step, {f"budget/{name}": value for name, value in values.items()})

    def on_tick(self) -> None:
        self._results = self.trainer.history.results
        if time.monotonic() - self._last_point >= POINT_SECONDS:
            self._write_point()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._write_point()
        row = self.trainer.history.epochs[-1]
        values = {name.replace("_", "/", 1): row[name] for name in row if name.startswith("test_")}
        values |= {f"meters/{name}": row[name] for name in METERS}
        values |= {"selection/seconds_so_far": row["selection_seconds"]}
        values |= {"selection/trained_tensors": row["trained_tensors"]}
        self._write_scalars(row["step"], values)
        self._draw_selections()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_point(self) -> None:
        """Write the means of the latest steps."""
        recent, history, self._last_point = self._results[-RECENT:], self.trainer.history, time.monotonic()
        values: dict[str, float | None] = {
            **{f"train/{name}": value for name, value in means_of(recent).items()},
            "learning_rate": recent[-1].learning_rate,
            "step_time/measured_ms": median_step_ms(recent),
            "step_time/budget_ms": history.selection.budget_step_ms,
        }
        self._write_scalars(history.step, values)

    def _write(self, event: Event) -> None:
        event.wall_time = self._start + time.monotonic()
        with writing(self._folder):
            RecordWriter(self._file).write(event.SerializeToString())

    def _write_scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Write scalars by tag, except those that are None."""
        scalars = [scalar_pb(tag, value).value[0] for tag, value in values.items() if value is not None]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def _draw_selections(self) -> None:
        """Add the map of the paper's Fig. 21 to TensorBoard's images: tensors (input at the bottom) by epochs."""
        history = self.trainer.history
        starts = [selection.step for selection in history.selections]
        steps = np.linspace(0, history.step, MAP_SIZE, endpoint=False)
        masks = np.array([selection.mask for selection in history.selections])
        shown = masks[np.searchsorted(starts, steps, side="right") - 1].T[::-1]
        pixels = 255 * np.repeat(shown, max(MAP_SIZE // len(shown), 1), axis=0).astype(np.uint8)
        size = [str(MAP_SIZE).encode(), str(len(pixels)).encode()]
        tensor = make_tensor_proto([*size, tf.io.encode_png(pixels[:, :, None]).numpy()])
        about = create_summary_metadata(None, "white: trained; epochs from left to right, the input at the bottom")
        value = Summary.Value(tag="selection/tensors_by_epoch", metadata=about, tensor=tensor)
        self._write(Event(step=history.step, summary=Summary(value=[value])))
