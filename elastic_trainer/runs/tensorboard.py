"""What TensorBoard shows of a run: curves, and the map of the trained tensors.

TensorBoard reads the files of a run by their names, and takes the time of each event from it. Both go on from those of
an interrupted run, also where the time of day was set back meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_trainer.engine.state import StepResult
from elastic_trainer.runs.listener import Listener
from elastic_trainer.system.errors import UserError, importing

with importing("TensorBoard's events"):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.custom_scalar import summary as custom_scalar
    from tensorboard.plugins.image.metadata import create_summary_metadata
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.util.tensor_util import make_tensor_proto

METERS = ("train_flops", "energy_joules", "peak_memory_mb", "gpu_peak_memory_mb")  # columns of metrics.csv
POINT_SECONDS = 0.5  # from one point of the training curves to the next
PREFIX = "events.out.tfevents."


class EventsWriter(Listener):
    """Writes TensorBoard's events of one run into its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._writer: Any = None
        self._since_point: list[StepResult] = []
        self._taken = 0  # of the steps of this epoch
        self._drawn = -1  # step of the latest map
        self._last_point = time.monotonic()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start another file of events. What an interrupted run wrote after its checkpoint is there twice, then."""
        earlier = [*self._folder.glob(f"{PREFIX}*")]
        walls = [event.wall_time for path in earlier for event in EventFileLoader(str(path)).Load()]
        numbers = [int(path.name.split(".")[3]) for path in earlier]
        self._start = max([time.time(), *walls]) - time.monotonic()
        number = max([math.ceil(self._start + time.monotonic()), *(one + 1 for one in numbers)])
        with self._reporting():
            self._writer = tf.io.TFRecordWriter(str(self._folder / f"{PREFIX}{number:010}.{os.getpid()}"))
        self._write(Event(file_version="brain.Event:2"))
        # One chart with step time and budget together, on the page of custom scalars.
        lines = layout_pb2.MultilineChartContent(tag=["step_time/measured_ms", "step_time/budget_ms"])
        chart = layout_pb2.Chart(title="step time against the budget (ms)", multiline=lines)
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="time budget", chart=[chart])])
        self._write(Event(step=0, summary=Summary.FromString(custom_scalar.pb(layout).SerializeToString())))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not epoch and self.trainer.history.start is not None:  # the model that training started from
            self._write_scalars(0, {f"test/{name}": value for name, value in self.trainer.history.start.items()})

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self.end_point()  # the steps so far belong to the earlier budget

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        names, selection = ("rho", "slowdown", "correction", "predicted_step_ms"), self.trainer.history.selection
        memory, values = self.trainer.training.memory, {name: getattr(selection, name) for name in names}
        values |= {"predicted_memory_mb": selection.memory_mb}
        values |= {"memory_mb": memory.limit_mb if memory.has_limit else None}
        self._write_scalars(step, {f"budget/{name}": value for name, value in values.items()})

    def on_tick(self) -> None:
        """Means of the steps since the last point are written about twice a second."""
        results = self.trainer.history.results
        self._since_point += results[self._taken :]
        self._taken = len(results)
        if time.monotonic() - self._last_point >= POINT_SECONDS:
            self._write_point()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.end_point()
        history, row = self.trainer.history, self.trainer.history.epochs[-1]
        values = {name.replace("_", "/", 1): row[name] for name in row if name.startswith("test_")}
        values |= {f"meters/{name}": row[name] for name in METERS}
        values |= {"selection/seconds_so_far": row["selection_seconds"]}
        values |= {"selection/trained_tensors": row["trained_tensors"]}
        self._write_scalars(row["step"], values)
        if history.selection.step >= self._drawn:
            self._draw_selections()

    def end_point(self) -> None:
        """Write what there is so far: a checkpoint follows, and a continued run writes what comes after it."""
        self.on_tick()
        self._write_point()

    def finish(self) -> None:
        """Draw the map of all epochs, if the last epoch did not."""
        if self.trainer.history.step > self._drawn and self.trainer.history.selections:
            self._draw_selections()

    def close(self) -> None:
        if self._writer is not None:
            with self._reporting():
                self._writer.close()

    def _write_point(self) -> None:
        """Write the means of the steps since the last point, if there were any."""
        results, self._since_point = self._since_point, []
        if not results:
            return
        self._last_point, history = time.monotonic(), self.trainer.history
        step_ms = [result.step_ms for result in results if result.step_ms is not None]
        names = results[-1].measures.keys() - {"loss"}
        means = {name: statistics.fmean(result.measures[name] for result in results) for name in names}
        values = {
            "train/loss": statistics.fmean(result.loss for result in results),
            **{f"train/{name}": value for name, value in means.items()},
            "learning_rate": results[-1].learning_rate,
            "step_time/measured_ms": statistics.median(step_ms) if step_ms else None,
            "step_time/budget_ms": history.selection.budget_step_ms,
        }
        self._write_scalars(history.step, values)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Errors of TensorFlow's writer in this block become a `UserError`."""
        try:
            yield
        except tf.errors.OpError as error:
            raise UserError(f"{self._folder}: cannot write TensorBoard's events: {error.message}") from error

    def _write(self, event: Event) -> None:
        event.wall_time = self._start + time.monotonic()
        with self._reporting():
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def _write_scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Write scalars by tag, except those that are None."""
        scalars = [scalar_pb(tag, value).value[0] for tag, value in values.items() if value is not None]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def _draw_selections(self) -> None:
        """Add the map of the paper's Fig. 21 to TensorBoard's images: tensors (input at the bottom) by epochs."""
        with importing("the map of trained tensors"):
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator

        history = self.trainer.history
        masks = np.array([selection.mask for selection in history.selections])
        edges = [*(selection.epoch for selection in history.selections), len(history.epochs)]
        figure, image = Figure(figsize=(6, 6), dpi=100, layout="constrained"), io.BytesIO()
        axes = figure.add_subplot(
            xlabel="epoch", ylabel="tensor (0 is next to the input)", title="trained tensors (blue)"
        )
        axes.pcolormesh(edges, np.arange(masks.shape[1] + 1) - 0.5, masks.T, cmap="Blues", vmin=0, vmax=1.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(image, format="png")
        tensor = make_tensor_proto([b"600", b"600", image.getvalue()])
        about = create_summary_metadata(None, "blue: trained in that epoch")
        value = Summary.Value(tag="selection/tensors_by_epoch", metadata=about, tensor=tensor)
        self._write(Event(step=history.step, summary=Summary(value=[value])))
        self._drawn = history.step
