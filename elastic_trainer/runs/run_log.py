"""What a run leaves in its folder: tables, summary, checkpoints, saved models, and the curves for TensorBoard."""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.machine import environment
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.history import History, Interval, StepResult
from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.selection.selection import Choice
from utils import UserError, atomic_path, sync, write_csv, write_json, writing

if TYPE_CHECKING:
    import keras

METERS = ("train_flops", "energy_joules", "peak_memory_mb", "gpu_peak_memory_mb")  # in metrics.csv and TensorBoard


class RunLog:
    """What a run leaves in its folder: config.json, metrics.csv, selections.csv, summary.json, TensorBoard events.

    The tables are written anew, whole, after each epoch. Use as a context manager: it closes the events file, and turns
    SIGINT and SIGTERM into a wish to stop (`stop`).

    Args:
        folder: of its own; empty, or that of the run to go on with.
        config: the options of the run; they and the environment go into config.json, unless it is there.
        tensor_names: names of `model.trainable_variables`, in their order.

    Attributes:
        checkpoints: of this run.
        stop: tells whether a signal came.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensor_names: Sequence[str]) -> None:
        import tensorflow as tf

        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self.checkpoints, self.stop = Checkpoints(folder / "checkpoints"), StopSignals()
        self._tf = tf
        self._writer: Any = None
        self._history = History()
        self._since_point: list[StepResult] = []
        self._last_point = time.monotonic()
        self._last_second = -1
        self._drawn, self._drawn_step = 0, -1  # intervals on the latest selection image, and its step
        if not (folder / "config.json").exists():
            write_json(folder / "config.json", {**config, "environment": environment()})

    def __enter__(self) -> RunLog:
        self.stop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop.__exit__(*exception)
        if self._writer is not None:
            with contextlib.nullcontext() if exception[0] is None else contextlib.suppress(UserError), self._writing():
                self._writer.close()

    def begin(self, history: History, events: dict[str, int] | None = None) -> None:
        """Start recording, from a checkpoint's `history` where there is one.

        What was recorded after that checkpoint goes, since it comes again: the tables are written anew, and the files
        of TensorBoard's events cut to the sizes that `flushed_events` gave.
        """
        self._history = history
        with writing(self.folder):
            for path in self._events_files():
                if path.name not in (events or {}):
                    path.unlink()
                else:
                    os.truncate(path, min((events or {})[path.name], path.stat().st_size))
        with self._writing():
            self._writer = self._tf.summary.create_file_writer(str(self.folder))
        if events is None:
            self._write_layout()
        else:
            self._last_second = round(self._history.clocks.seconds("training"))
            tested = self._history.epochs[-1]["step"] if self._history.epochs else 0
            self._drawn = sum(interval.step < tested for interval in self._history.intervals)
            self._drawn_step = tested
            self._write_tables()

    def flushed_events(self) -> dict[str, int]:
        """Have all events up to now on the disk; returns the size in bytes of each of their files."""
        self._write_train_point()
        self._flush()
        files = self._events_files()
        for path in files:
            sync(path)
        return {path.name: path.stat().st_size for path in files}

    def record_choice(self, choice: Choice, step_flops: float = 0.0) -> None:
        """Note the tensors that train from now on, and the FLOPs of a step."""
        self._write_train_point()  # what went before belongs to the budget before
        self._history.intervals.append(Interval(choice, self._history.step, step_flops))
        with self._events(self._history.step):
            for name in ("rho", "slowdown", "correction", "predicted_step_ms"):
                if (value := getattr(choice, name)) is not None:
                    self._tf.summary.scalar(f"budget/{name}", value)

    def record_step(self) -> None:
        """Note the latest training step; means since the last point go to TensorBoard about twice a second."""
        self._since_point.append(self._history.results[-1])
        if time.monotonic() - self._last_point >= 0.5:
            self._write_train_point()

    def record_epoch(self) -> None:
        """Note the end of an epoch."""
        row = self._history.epochs[-1]
        self._write_train_point()
        self._write_points("test", row["step"], row["train_seconds"], row["test_loss"], row["test_accuracy"])
        with self._events(row["step"]):
            self._tf.summary.scalar("selection/seconds_so_far", row["selection_seconds"])
            self._tf.summary.scalar("selection/trained_tensors", row["trained_tensors"])
            for name in METERS:
                if row[name] is not None:
                    self._tf.summary.scalar(f"meters/{name}", row[name])
        if len(self._history.intervals) != self._drawn:
            self._write_selection_image()
        self._write_tables()
        self._flush()

    def save_model(self, model: keras.Model, best: bool) -> None:
        """Keep `model` as last.keras, and as best.keras where it is the best so far."""
        from elastic_trainer.networks.saved_model import save_model

        for name in ("last.keras", "best.keras") if best else ("last.keras",):
            with atomic_path(self.folder / name) as temporary:
                save_model(model, temporary)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the run's options and its `results`, delete the checkpoints; returns the summary."""
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        summary = {**{key: self._config.get(key) for key in keys}, **results}
        if self._drawn_step != self._history.step:
            self._write_selection_image()
        self._flush()
        write_json(self.folder / "summary.json", summary)
        self.checkpoints.clear()
        return summary

    def _events_files(self) -> list[Path]:
        return sorted(self.folder.glob("events.out.*"))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """What TensorFlow's writer of events cannot do in this block becomes a `UserError`."""
        try:
            yield
        except self._tf.errors.OpError as error:
            raise UserError(f"{self.folder}: TensorBoard's events cannot be written: {error.message}") from error

    @contextlib.contextmanager
    def _events(self, step: int) -> Iterator[None]:
        """Events of this block belong to `step`."""
        with self._writing(), self._writer.as_default(step=step):
            yield

    def _flush(self) -> None:
        with self._writing():
            self._writer.flush()

    def _write_train_point(self) -> None:
        """Means of the steps since the last point, if there were any."""
        results, self._since_point = self._since_point, []
        if not results:
            return
        self._last_point = time.monotonic()
        loss, accuracy = (statistics.fmean(getattr(r, name) for r in results) for name in ("loss", "accuracy"))
        self._write_points("train", self._history.step, self._history.clocks.seconds("training"), loss, accuracy)
        step_ms = [result.step_ms for result in results if result.step_ms is not None]
        with self._events(self._history.step):
            self._tf.summary.scalar("learning_rate", results[-1].learning_rate)
            if step_ms:
                self._tf.summary.scalar("step_time/measured_ms", statistics.median(step_ms))
            if self._history.choice.budget_step_ms is not None:
                self._tf.summary.scalar("step_time/budget_ms", self._history.choice.budget_step_ms)

    def _write_points(self, split: str, step: int, train_seconds: float, loss: float, accuracy: float) -> None:
        """The same two curves twice: over steps, and with whole training seconds in the place of steps."""
        with self._events(step):
            self._tf.summary.scalar(f"{split}/loss", loss)
            self._tf.summary.scalar(f"{split}/accuracy", accuracy)
        second = round(train_seconds)
        if split == "train" and second == self._last_second:
            return
        self._last_second = second
        with self._events(second):
            self._tf.summary.scalar(f"over_training_seconds/{split}_loss", loss)
            self._tf.summary.scalar(f"over_training_seconds/{split}_accuracy", accuracy)

    def _write_layout(self) -> None:
        """One chart with step time and budget together, on TensorBoard's page of custom scalars."""
        from tensorboard.plugins.custom_scalar import layout_pb2
        from tensorboard.plugins.custom_scalar import summary as custom_scalar

        lines = layout_pb2.MultilineChartContent(tag=["step_time/measured_ms", "step_time/budget_ms"])
        chart = layout_pb2.Chart(title="step time against the budget (ms)", multiline=lines)
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="time budget", chart=[chart])])
        with self._events(0):
            self._tf.summary.experimental.write_raw_pb(custom_scalar.pb(layout).SerializeToString())

    def _write_tables(self) -> None:
        if self._history.epochs:
            rows = (list(row.values()) for row in self._history.epochs)
            write_csv(self.folder / "metrics.csv", list(self._history.epochs[0]), rows)
        columns = ["epoch", "step", "name", "importance", "chosen"]
        columns += ["predicted_step_ms", "budget_step_ms", "measured_step_ms", "rho", "slowdown", "correction"]
        write_csv(self.folder / "selections.csv", columns, self._selection_rows())

    def _selection_rows(self) -> Iterator[tuple[object, ...]]:
        for interval in self._history.intervals:
            choice = interval.choice
            measured = statistics.median(interval.step_ms) if interval.step_ms else None
            budget = (choice.predicted_step_ms, choice.budget_step_ms, measured)
            correction = (choice.rho, choice.slowdown, choice.correction)
            epoch = f"{choice.epoch:.6g}"
            for index, name in enumerate(self._names):
                importance = None if choice.importance is None else float(choice.importance[index])
                yield (epoch, interval.step, name, importance, int(choice.mask[index]), *budget, *correction)

    def _write_selection_image(self) -> None:
        """The map of the paper's Fig. 21, tensors (input at the bottom) by epochs, to TensorBoard's images."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        self._drawn, self._drawn_step = len(self._history.intervals), self._history.step
        masks = np.array([interval.choice.mask for interval in self._history.intervals]).T
        edges = [*(interval.choice.epoch for interval in self._history.intervals), len(self._history.epochs)]
        figure = Figure(figsize=(6, 6), layout="constrained")
        axes = figure.add_subplot(
            xlabel="epoch", ylabel="tensor (0 is next to the input)", title="trained tensors (blue)"
        )
        axes.pcolormesh(edges, np.arange(len(masks) + 1) - 0.5, masks, cmap="Blues", vmin=0, vmax=1.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=100)
            image = self._tf.io.decode_png(file.getvalue(), channels=3)
        with self._events(self._history.step):
            self._tf.summary.image("selection/tensors_by_epoch", image[None], description="blue: trained in that epoch")
