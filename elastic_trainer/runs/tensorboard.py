"""What TensorBoard shows of a run: curves over steps and over training seconds, and the map of the trained tensors."""

from __future__ import annotations

import contextlib
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
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

METERS = ("train_flops", "energy_joules", "peak_memory_mb", "gpu_peak_memory_mb")  # columns of metrics.csv
POINT_SECONDS = 0.5  # from one point of the training curves to the next


class EventsWriter(Listener):
    """Writes TensorBoard's events of one run into its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._writer: Any = None
        self._since_point: list[StepResult] = []
        self._taken = 0  # of the steps of this epoch
        self._last_point = time.monotonic()
        self._last_second = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start another file of events. What an interrupted run wrote after its checkpoint is there twice, then."""
        with self._reporting():
            self._writer = tf.summary.create_file_writer(str(self._folder))
        if not self.trainer.history.selections:
            self._write_layout()
        self._last_second = round(self.trainer.history.clocks.seconds("training")) or -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not epoch and self.trainer.history.start is not None:  # the model that training started from
            self._write_curves("test", 0, 0.0, self.trainer.history.start)

    def on_selection_begin(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self._end_point()  # the steps so far belong to the earlier budget

    def on_selection_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        names, selection = ("rho", "slowdown", "correction", "predicted_step_ms"), self.trainer.history.selection
        memory, values = self.trainer.training.memory, {name: getattr(selection, name) for name in names}
        values |= {"predicted_memory_mb": selection.memory_mb}
        values |= {"memory_mb": memory.limit_mb if memory.has_limit else None}
        self._write(step, {f"budget/{name}": value for name, value in values.items()})

    def on_tick(self) -> None:
        """Means of the steps since the last point are written about twice a second."""
        self._take()
        if time.monotonic() - self._last_point >= POINT_SECONDS:
            self._end_point()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_point()
        row = self.trainer.history.epochs[-1]
        if self.trainer.history.is_validated:
            results = {name.removeprefix("test_"): row[name] for name in row if name.startswith("test_")}
            self._write_curves("test", row["step"], row["train_seconds"], results)
        chosen = {"seconds_so_far": row["selection_seconds"], "trained_tensors": row["trained_tensors"]}
        self._write(row["step"], {f"selection/{name}": value for name, value in chosen.items()})
        self._write(row["step"], {f"meters/{name}": row[name] for name in METERS})
        if self._has_new_selection():
            self._draw_selections()

    def flush(self) -> None:
        """Write what there is so far: a checkpoint follows, and a continued run writes what comes after it."""
        self._end_point()

    def finish(self) -> None:
        """Draw the map of all epochs, if the last epoch did not."""
        if self.trainer.history.selections and not self._has_new_selection():
            self._draw_selections()

    def close(self) -> None:
        if self._writer is not None:
            with self._reporting():
                self._writer.close()

    def _take(self) -> None:
        """Note the steps of the epoch since the last call; none are left where it has ended."""
        results = self.trainer.history.results
        self._since_point += results[self._taken :]
        self._taken = len(results)

    def _end_point(self) -> None:
        """Write the means of the steps since the last point, if there were any."""
        self._take()
        results, self._since_point = self._since_point, []
        if not results:
            return
        self._last_point, history = time.monotonic(), self.trainer.history
        means = {"loss": statistics.fmean(result.loss for result in results)}
        for name in results[-1].measures.keys() - means.keys():
            means[name] = statistics.fmean(result.measures[name] for result in results)
        self._write_curves("train", history.step, history.clocks.seconds("training"), means)
        step_ms = [result.step_ms for result in results if result.step_ms is not None]
        self._write(
            history.step,
            {
                "learning_rate": results[-1].learning_rate,
                "step_time/measured_ms": statistics.median(step_ms) if step_ms else None,
                "step_time/budget_ms": history.selection.budget_step_ms,
            },
        )

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Errors of TensorFlow's event writer in this block become a `UserError`."""
        try:
            yield
        except tf.errors.OpError as error:
            raise UserError(f"{self._folder}: cannot write TensorBoard's events: {error.message}") from error

    @contextlib.contextmanager
    def _at(self, step: int) -> Iterator[None]:
        """Events in this block belong to `step`; they are in the file at its end."""
        with self._reporting(), self._writer.as_default(step=step):
            yield

    def _write_curves(self, split: str, step: int, train_seconds: float, results: dict[str, float]) -> None:
        """Write the curves twice: over steps, and over training seconds, which are rounded and written as steps."""
        self._write(step, {f"{split}/{name}": value for name, value in results.items()})
        second = round(train_seconds)
        if split == "train" and second == self._last_second:
            return
        self._last_second = second
        self._write(second, {f"over_training_seconds/{split}_{name}": value for name, value in results.items()})

    def _write(self, step: int, values: dict[str, float | None]) -> None:
        """Write scalars by tag, except those that are None. `tf.summary.scalar` would take seven times as long."""
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

    def _has_new_selection(self) -> bool:
        """Whether a selection was made in the last epoch."""
        history = self.trainer.history
        start = history.epochs[-2]["step"] if len(history.epochs) > 1 else 0
        return history.selection.step >= start

    def _draw_selections(self) -> None:
        """Add the map of the paper's Fig. 21 to TensorBoard's images: tensors (input at the bottom) by epochs."""
        with importing("the map of trained tensors"):
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator

        history = self.trainer.history
        masks = np.array([selection.mask for selection in history.selections])
        edges = [*(selection.epoch for selection in history.selections), len(history.epochs)]
        figure = Figure(figsize=(6, 6), dpi=100, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.add_subplot(
            xlabel="epoch", ylabel="tensor (0 is next to the input)", title="trained tensors (blue)"
        )
        axes.pcolormesh(edges, np.arange(masks.shape[1] + 1) - 0.5, masks.T, cmap="Blues", vmin=0, vmax=1.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.draw()
        image = np.asarray(canvas.buffer_rgba())[None, ..., :3]
        with self._at(history.step):
            tf.summary.image("selection/tensors_by_epoch", image, description="blue: trained in that epoch")
