"""What every part leans on and none owns: clear errors, signals, run folders, files that are whole or absent.

Nothing here imports TensorFlow at load time, so that a mistyped flag is answered at once.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("tensorflow", "keras", "numpy", "vit-keras", "tensorflow-datasets", "scikit-learn")
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")  # what TensorFlow heeds


DRIFT_WINDOW = 7
DISTURBED_SHARE = 0.02  # of all processors' time while a call is measured; the kernel counts it in steps of 10 ms


class UserError(Exception):
    """A mistake that its maker can mend: the message names the flag or file, what is wrong and what would be right."""


class Stopped(Exception):  # noqa: N818
    """The user or the system asked to stop, by signal `number`; the message says where and how to go on."""

    def __init__(self, number: int, message: str = "stopped") -> None:
        super().__init__(message)
        self.number = number


class StopSignals:
    """While in this context, SIGINT and SIGTERM only ask to stop, and `check` tells; a second one leaves at once.

    A thread learns of them, since Python's own handlers wait until TensorFlow returns from a step or a compilation.
    Outside the main thread, where Python allows no handlers, nothing is changed.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None

    def check(self) -> None:
        """Raises `Stopped` if a signal came."""
        if self.number is not None:
            raise Stopped(self.number)

    def __enter__(self) -> StopSignals:
        self._restore = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            reading, writing = socket.socketpair()
            writing.setblocking(False)
            self._restore.callback(reading.close)
            self._restore.callback(writing.close)  # ends the thread
            self._restore.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing.fileno()))
            for number in self.NUMBERS:
                self._restore.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            threading.Thread(target=self._listen, args=(reading,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()

    def _listen(self, reading: socket.socket) -> None:
        first = 0.0
        with contextlib.suppress(OSError):
            while data := reading.recv(1):
                if data[0] not in self.NUMBERS:
                    continue
                if self.number is None:
                    self.number, first = data[0], time.monotonic()
                    with contextlib.suppress(OSError):
                        print("\nstopping after this step; another signal leaves at once", file=sys.stderr)
                elif time.monotonic() - first > 1:  # `timeout` and shells send one signal twice
                    os._exit(128 + data[0])


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main`; a `UserError`, or lack of memory, becomes one line on stderr and exit status 2."""
    try:
        main()
    except Stopped as stopped:
        print(f"{Path(sys.argv[0]).name}: {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else _out_of_memory(error)
        if message is None:
            raise
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _out_of_memory(error: Exception) -> str | None:
    """What to say if `error` is Python's or TensorFlow's for too little memory, else None."""
    if not isinstance(error, MemoryError) and type(error).__name__ != "ResourceExhaustedError":
        return None
    # TensorFlow's message is pages long; NumPy's is one such line.
    wanted = re.search(r"tensor with shape ?\[[\d, ]*\]|[Uu]nable to allocate [^\n]*", str(error))
    return f"memory ran out{f' ({wanted[0]})' if wanted else ''}; a smaller --batch_size or --input_size takes less"


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
    del os.environ["TF_CPP_MIN_LOG_LEVEL"]  # it has been read; a process that this one starts drops its own chatter


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


def first_line(error: Exception) -> str:
    """What an error says, without the lines that follow the first."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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

    What was written is on the disk before it takes the name, so that a power cut leaves the old file or the new one.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the file or folder `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure_ms(runs: Sequence[Callable[[], object]], rounds: int, unseen: int = 0, most_tries: int = 1) -> np.ndarray:
    """Wall times [rounds, len(runs)] in ms. All take turns, so that a machine that slows down slows all alike.

    `unseen` calls go before each measured one: what ran before has left the caches to itself. A call from which other
    virtual machines took processor time is measured again, until it was tried `most_tries` times.
    """
    times = np.zeros((rounds, len(runs)))
    for row in times:
        for column, run in enumerate(runs):
            for _ in range(unseen):
                run()
            for tries_left in reversed(range(most_tries)):
                stolen = stolen_seconds() if tries_left else 0.0
                begin = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin
                if not tries_left or is_undisturbed(seconds, stolen_seconds() - stolen):
                    break
            row[column] = seconds * 1e3
    return times


def is_undisturbed(seconds: float, stolen: float) -> bool:
    """Whether other virtual machines took next to nothing: `stolen` seconds of processor time within `seconds`."""
    return stolen <= DISTURBED_SHARE * seconds * (os.cpu_count() or 1)


def stolen_seconds(root: Path = Path("/")) -> float:
    """Processor time since the start that this virtual machine wanted and others got; 0 where nobody tells."""
    # cpu, user, nice, system, idle, iowait, irq, softirq, steal
    fields = text_of(root / "proc" / "stat").partition("\n")[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def without_drift(times: np.ndarray) -> np.ndarray:
    """Wall times [rounds, runs] as of a machine of one speed: its usual one while they were measured.

    Neighbours on a shared machine, and heat, slow down whatever runs next to each other in time. That speed is the
    running median, over DRIFT_WINDOW calls in the order they were made, of each time over what that run usually takes.
    """
    from scipy.ndimage import median_filter

    speed = np.ones_like(times)
    for _ in range(3):  # each knows the usual times better, as it knows the speed better
        usual = np.median(times / speed, axis=0)
        speed = median_filter((times / usual).ravel(), DRIFT_WINDOW, mode="nearest").reshape(times.shape)
        speed /= np.median(speed)
    return times / speed


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


def environment() -> dict[str, Any]:
    """Versions, hardware and bounds on threads that a figure depends on."""
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
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "thread_settings": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
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


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, as far as the system tells."""
    with contextlib.suppress(OSError):
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)  # the last is Arm's name
    return False


def text_of(path: Path) -> str:
    """A file of the kernel's, or nothing if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
