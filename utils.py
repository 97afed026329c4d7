"""What every part leans on and none owns: clear errors, files that are whole or absent, the record of a run.

Nothing here imports TensorFlow at load time, so that a mistyped flag is answered at once.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    import keras
    from matplotlib.figure import Figure

    from train import Choice, StepResult

PACKAGES = ("tensorflow", "keras", "numpy", "vit-keras", "tensorflow-datasets", "scikit-learn")


class UserError(Exception):
    """A mistake that its maker can mend: the message names the flag or file, what is wrong and what would be right."""


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main`; a `UserError` becomes one line on stderr and exit status 2."""
    try:
        main()
    except UserError as error:
        message = " ".join(str(error).split())
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def load_tensorflow() -> None:
    """Import TensorFlow without its start-up chatter, which would bury the one line that matters.

    TensorFlow 2.21 writes some lines before it reads TF_CPP_MIN_LOG_LEVEL, straight to file descriptor 2. Set that
    variable yourself to see everything. A failing import still raises as usual.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        import tensorflow

        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with silenced():
        import tensorflow

        tensorflow.config.list_physical_devices()  # a missing GPU driver is reported here, not at import


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop what this block writes to file descriptor 2, libraries in C++ included; exceptions pass as usual."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses in this block becomes a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` with the same endings; rename it to `path` once the block succeeded.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def measure_ms(runs: Sequence[Callable[[], object]], rounds: int, unseen: int = 0) -> np.ndarray:
    """Wall times [rounds, len(runs)] in ms. All take turns, so that a machine that slows down slows all alike.

    `unseen` calls go before each measured one: what ran before has left the caches to itself.
    """
    times = np.zeros((rounds, len(runs)))
    for row in times:
        for column, run in enumerate(runs):
            for _ in range(unseen):
                run()
            begin = time.perf_counter()
            run()
            row[column] = (time.perf_counter() - begin) * 1e3
    return times


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, record: object) -> None:
    """Write `record` to `path` as indented JSON, atomically."""
    write_text(path, json.dumps(record, indent=2) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a header line to `path`, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write a matplotlib figure as `stem`.pdf and `stem`.png, atomically."""
    for ending in (".pdf", ".png"):
        with atomic_path(stem.with_name(stem.name + ending)) as temporary:
            figure.savefig(temporary, bbox_inches="tight", dpi=150)


def new_run_folder(logdir: Path, run_name: str, overwrite: bool) -> Path:
    """Make the folder of a run: `logdir`/`run_name`, or with -2, -3, … behind it where that exists.

    With `overwrite`, an earlier run's folder is emptied of the files that a run writes, and of nothing else.

    Raises:
        UserError: the folder cannot be made, or `overwrite` meets a folder that does not hold a run.
    """
    with writing(logdir):
        if overwrite and (logdir / run_name).exists():
            return _emptied_run_folder(logdir / run_name)
        logdir.mkdir(parents=True, exist_ok=True)
        for count in range(1, 1_000_000):
            folder = logdir / (run_name if count == 1 else f"{run_name}-{count}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise UserError(f"--run_name {run_name}: a million runs have this name; choose another")


def _emptied_run_folder(folder: Path) -> Path:
    written = {"config.json", "summary.json", "metrics.csv", "selections.csv", f"{folder.name}.txt"}
    written |= {"best.keras", "last.keras"}
    written |= {"model.tflite", "model_dynamic.tflite", "labels.txt", "export.json"}
    written |= {"classes.csv", "confusion.csv", "confusion.pdf", "confusion.png", "mistakes.png", "evaluation.json"}
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "config.json").exists()):
        raise UserError(
            f"--overwrite: {folder} is not the folder of a run (it has no config.json); nothing was deleted"
        )
    for path in [*folder.iterdir(), *folder.glob("evaluation/*")]:
        if path.is_file() and (path.name in written or path.name.startswith("events.out.")):
            path.unlink()
    return folder


def environment() -> dict[str, Any]:
    """Versions and hardware that a figure depends on."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "python": platform.python_version(),
        "packages": versions,
        "machine": platform.machine(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # x86 says "model name", boards say "Model" or "Hardware".
    return next((fields[key] for key in ("model name", "Model", "Hardware") if key in fields), platform.processor())


def peak_memory_mb() -> float | None:
    """Largest resident memory of this process so far in MB, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


class RunLog:
    """What a run leaves in its folder: config.json, metrics.csv, selections.csv, summary.json, TensorBoard events.

    The tables are written anew, whole, after each epoch. Use as a context manager: it closes the events file.

    Args:
        folder: an empty folder of its own.
        config: the options of the run; they and the environment go into config.json.
        tensor_names: names of `model.trainable_variables`, in their order.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensor_names: Sequence[str]) -> None:
        import tensorflow as tf

        self.folder, self._config, self._names = folder, config, list(tensor_names)
        self._tf = tf
        self._epochs: list[dict[str, Any]] = []
        self._choices: list[tuple[Choice, int, list[float]]] = []  # choice, step it was made at, medians of its epochs
        self._since_point: list[StepResult] = []
        self._last_point = time.monotonic()
        self._last_second = -1
        write_json(folder / "config.json", {**config, "environment": environment()})
        self._writer = tf.summary.create_file_writer(str(folder))
        self._write_layout()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def record_choice(self, choice: Choice, step: int) -> None:
        """Note the tensors that train from `step` on."""
        self._choices.append((choice, step, []))
        with self._writer.as_default(step=step):
            for name in ("rho", "slowdown", "correction", "predicted_step_ms"):
                if (value := getattr(choice, name)) is not None:
                    self._tf.summary.scalar(f"budget/{name}", value)

    def record_step(self, step: int, train_seconds: float, result: StepResult) -> None:
        """Note one training step; means since the last point go to TensorBoard about twice a second."""
        self._since_point.append(result)
        if time.monotonic() - self._last_point < 0.5:
            return
        self._last_point = time.monotonic()
        self._write_train_point(step, train_seconds)

    def record_epoch(self, **row: Any) -> None:
        """Note the end of an epoch; the keys become the columns of metrics.csv."""
        self._epochs.append(row)
        if self._since_point:
            self._write_train_point(row["step"], row["train_seconds"])
        self._write_points("test", row["step"], row["train_seconds"], row["test_loss"], row["test_accuracy"])
        with self._writer.as_default(step=row["step"]):
            self._tf.summary.scalar("selection/seconds_so_far", row["selection_seconds"])
            self._tf.summary.scalar("selection/trained_tensors", row["trained_tensors"])
            if not self._choices[-1][2]:  # the first epoch of a new selection
                self._write_selection_image()
        if row["median_step_ms"] is not None:
            self._choices[-1][2].append(row["median_step_ms"])
        write_csv(self.folder / "metrics.csv", list(row), (list(epoch.values()) for epoch in self._epochs))
        self._write_selections()
        self._writer.flush()

    def save_model(self, model: keras.Model, best: bool) -> None:
        """Keep `model` as last.keras, and as best.keras where it is the best so far."""
        for name in ("last.keras", "best.keras") if best else ("last.keras",):
            with atomic_path(self.folder / name) as temporary:
                model.save(temporary)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the run's options and its `results`; returns what it holds."""
        keys = ("model_name", "dataset_name", "train_type", "rho", "seed")
        summary = {**{key: self._config.get(key) for key in keys}, **results}
        write_json(self.folder / "summary.json", summary)
        if self._epochs:
            with self._writer.as_default(step=self._epochs[-1]["step"]):
                self._write_selection_image()
        return summary

    def _write_train_point(self, step: int, train_seconds: float) -> None:
        results, self._since_point = self._since_point, []
        loss, accuracy = (statistics.fmean(getattr(r, name) for r in results) for name in ("loss", "accuracy"))
        self._write_points("train", step, train_seconds, loss, accuracy)
        step_ms = [result.step_ms for result in results if result.step_ms is not None]
        budget_ms = self._choices[-1][0].budget_step_ms
        with self._writer.as_default(step=step):
            self._tf.summary.scalar("learning_rate", results[-1].learning_rate)
            if step_ms:
                self._tf.summary.scalar("step_time/measured_ms", statistics.median(step_ms))
            if budget_ms is not None:
                self._tf.summary.scalar("step_time/budget_ms", budget_ms)

    def _write_points(self, split: str, step: int, train_seconds: float, loss: float, accuracy: float) -> None:
        """The same two curves twice: over steps, and with whole training seconds in the place of steps."""
        with self._writer.as_default(step=step):
            self._tf.summary.scalar(f"{split}/loss", loss)
            self._tf.summary.scalar(f"{split}/accuracy", accuracy)
        second = round(train_seconds)
        if split == "train" and second == self._last_second:
            return
        self._last_second = second
        with self._writer.as_default(step=second):
            self._tf.summary.scalar(f"over_training_seconds/{split}_loss", loss)
            self._tf.summary.scalar(f"over_training_seconds/{split}_accuracy", accuracy)

    def _write_layout(self) -> None:
        """One chart with step time and budget together, on TensorBoard's page of custom scalars."""
        from tensorboard.plugins.custom_scalar import layout_pb2
        from tensorboard.plugins.custom_scalar import summary as custom_scalar

        lines = layout_pb2.MultilineChartContent(tag=["step_time/measured_ms", "step_time/budget_ms"])
        chart = layout_pb2.Chart(title="step time against the budget (ms)", multiline=lines)
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="time budget", chart=[chart])])
        with self._writer.as_default(step=0):
            self._tf.summary.experimental.write_raw_pb(custom_scalar.pb(layout).SerializeToString())

    def _write_selections(self) -> None:
        columns = [
            "epoch",
            "step",
            "name",
            "importance",
            "chosen",
            "predicted_step_ms",
            "budget_step_ms",
            "measured_step_ms",
            "rho",
            "slowdown",
            "correction",
        ]
        rows = []
        for choice, step, medians in self._choices:
            measured = statistics.median(medians) if medians else None
            budget = [choice.predicted_step_ms, choice.budget_step_ms, measured]
            budget += [choice.rho, choice.slowdown, choice.correction]
            for index, name in enumerate(self._names):
                importance = None if choice.importance is None else float(choice.importance[index])
                rows.append((choice.epoch, step, name, importance, int(choice.mask[index]), *budget))
        write_csv(self.folder / "selections.csv", columns, rows)

    def _write_selection_image(self) -> None:
        """The map of the paper's Fig. 21, tensors (input at the bottom) by epochs, to TensorBoard's images."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        epochs = len(self._epochs)
        grid = np.zeros((len(self._names), epochs))
        for choice, _, _ in self._choices:
            grid[:, choice.epoch :] = choice.mask[:, None]
        figure = Figure(figsize=(6, 6), layout="constrained")
        axes = figure.add_subplot(
            xlabel="epoch", ylabel="tensor (0 is next to the input)", title="trained tensors (blue)"
        )
        axes.imshow(
            grid,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="Blues",
            vmin=0,
            vmax=1.3,
            extent=(0.5, epochs + 0.5, -0.5, len(self._names) - 0.5),
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=100)
            image = self._tf.io.decode_png(file.getvalue(), channels=3)
        self._tf.summary.image("selection/tensors_by_epoch", image[None], description="blue: trained in that epoch")
