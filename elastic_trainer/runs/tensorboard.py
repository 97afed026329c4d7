"""What TensorBoard shows of a run: curves over steps and over training seconds, and the map of the trained tensors."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from elastic_trainer.errors import UserError
from elastic_trainer.files import sync, writing
from elastic_trainer.runs.history import History
from elastic_trainer.selection.select import Selection
from elastic_trainer.training.state import StepResult

METERS = ("train_flops", "energy_joules", "peak_memory_mb", "gpu_peak_memory_mb")  # columns of metrics.csv
POINT_SECONDS = 0.5  # from one point of the training curves to the next


class EventsWriter:
    """TensorBoard's events of one run.

    Args:
        folder: of the run.
        history: of the run, which the points are made from.
        events: sizes in bytes of the events files that a checkpoint knows (`flushed`), or None for a new run. What
            was recorded after that checkpoint is deleted, since it is recorded again.
    """

    def __init__(self, folder: Path, history: History, events: dict[str, int] | None = None) -> None:
        self._folder, self._history = folder, history
        self._since_point: list[StepResult] = []
        self._last_point = time.monotonic()
        self._last_second = -1
        self._drawn, self._drawn_step = 0, -1  # intervals on the latest selection image, and its step
        with writing(folder):
            for path in self._files():
                if path.name not in (events or {}):
                    path.unlink()
                else:
                    os.truncate(path, min((events or {})[path.name], path.stat().st_size))
        with self._reporting():
            self._writer = tf.summary.create_file_writer(str(folder))
        if events is None:
            self._write_layout()
        else:
            self._last_second = round(history.clocks.seconds("training"))
            self._drawn_step = history.epochs[-1]["step"] if history.epochs else 0
            self._drawn = sum(interval.step < self._drawn_step for interval in history.intervals)

    def close(self) -> None:
        """Write what is left. Raises `UserError` if that fails."""
        with self._reporting():
            self._writer.close()

    def flush(self) -> None:
        """Write all events up to now."""
        with self._reporting():
            self._writer.flush()

    def flushed(self) -> dict[str, int]:
        """Have all events up to now on the disk; returns the size in bytes of each of their files."""
        self.end_point()
        self.flush()
        files = self._files()
        for path in files:
            sync(path)
        return {path.name: path.stat().st_size for path in files}

    def add_selection(self, selection: Selection) -> None:
        """The budget of a new selection."""
        names = ("rho", "slowdown", "correction", "predicted_step_ms")
        self._write(self._history.step, {f"budget/{name}": getattr(selection, name) for name in names})

    def add_step(self, result: StepResult) -> None:
        """A training step; means since the last point are written about twice a second."""
        self._since_point.append(result)
        if time.monotonic() - self._last_point >= POINT_SECONDS:
            self.end_point()

    def end_point(self) -> None:
        """Write the means of the steps since the last point, if there were any."""
        results, self._since_point = self._since_point, []
        if not results:
            return
        self._last_point = time.monotonic()
        means = {"loss": statistics.fmean(result.loss for result in results)}
        for name in results[-1].measures.keys() - means.keys():
            means[name] = statistics.fmean(result.measures[name] for result in results)
        self._write_curves("train", self._history.step, self._history.clocks.seconds("training"), means)
        step_ms = [result.step_ms for result in results if result.step_ms is not None]
        self._write(
            self._history.step,
            {
                "learning_rate": results[-1].learning_rate,
                "step_time/measured_ms": statistics.median(step_ms) if step_ms else None,
                "step_time/budget_ms": self._history.selection.budget_step_ms,
            },
        )

    def add_epoch(self, row: dict[str, Any]) -> None:
        """The validation and the costs of an epoch, a row of metrics.csv."""
        self.end_point()
        results = {name.removeprefix("test_"): row[name] for name in row if name.startswith("test_")}
        self._write_curves("test", row["step"], row["train_seconds"], results)
        selection = {"seconds_so_far": row["selection_seconds"], "trained_tensors": row["trained_tensors"]}
        values = {f"selection/{name}": value for name, value in selection.items()}
        self._write(row["step"], {**values, **{f"meters/{name}": row[name] for name in METERS}})
        if len(self._history.intervals) != self._drawn:
            self._draw_selections()

    def finish(self) -> None:
        """Draw the last map, if steps were trained since the one before, and write everything."""
        if self._drawn_step != self._history.step:
            self._draw_selections()
        self.flush()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.*"))

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """What TensorFlow's writer of events cannot do in this block becomes a `UserError`."""
        try:
            yield
        except tf.errors.OpError as error:
            raise UserError(f"{self._folder}: TensorBoard's events cannot be written: {error.message}") from error

    @contextlib.contextmanager
    def _at(self, step: int) -> Iterator[None]:
        """Events of this block belong to `step`."""
        with self._reporting(), self._writer.as_default(step=step):
            yield

    def _write_curves(self, split: str, step: int, train_seconds: float, results: dict[str, float]) -> None:
        """The same curves twice: over steps, and over training seconds, rounded, in the place of steps."""
        self._write(step, {f"{split}/{name}": value for name, value in results.items()})
        second = round(train_seconds)
        if split == "train" and second == self._last_second:
            return
        self._last_second = second
        self._write(second, {f"over_training_seconds/{split}_{name}": value for name, value in results.items()})

    def _write(self, step: int, values: dict[str, float | None]) -> None:
        """Write scalars by tag; those that are None are left out. `tf.summary.scalar` takes seven times as long."""
        written = Summary()
        for tag, value in values.items():
            if value is not None:
                written.MergeFrom(scalar_pb(tag, value))
        with self._at(step):
            tf.summary.experimental.write_raw_pb(written.SerializeToString())

    def _write_layout(self) -> None:
        """One chart with step time and budget together, on TensorBoard's page of custom scalars."""
        from tensorboard.plugins.custom_scalar import layout_pb2
        from tensorboard.plugins.custom_scalar import summary as custom_scalar

        lines = layout_pb2.MultilineChartContent(tag=["step_time/measured_ms", "step_time/budget_ms"])
        chart = layout_pb2.Chart(title="step time against the budget (ms)", multiline=lines)
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="time budget", chart=[chart])])
        with self._at(0):
            tf.summary.experimental.write_raw_pb(custom_scalar.pb(layout).SerializeToString())

    def _draw_selections(self) -> None:
        """The map of the paper's Fig. 21 among TensorBoard's images."""
        self._drawn, self._drawn_step = len(self._history.intervals), self._history.step
        masks = [interval.selection.mask for interval in self._history.intervals]
        edges = [*(interval.selection.epoch for interval in self._history.intervals), len(self._history.epochs)]
        image = tf.io.decode_png(draw_map(masks, edges), channels=3)
        with self._at(self._history.step):
            tf.summary.image("selection/tensors_by_epoch", image[None], description="blue: trained in that epoch")


def draw_map(masks: Sequence[np.ndarray], edges: Sequence[float]) -> bytes:
    """The map of the paper's Fig. 21, tensors (input at the bottom) by epochs, as PNG.

    Args:
        masks: bool [N] of each selection.
        edges: epoch at which each selection starts, and the one at which the last ends.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="tensor (0 is next to the input)", title="trained tensors (blue)")
    tensors = np.arange(len(masks[0]) + 1) - 0.5
    axes.pcolormesh(edges, tensors, np.array(masks).T, cmap="Blues", vmin=0, vmax=1.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=100)
        return file.getvalue()
