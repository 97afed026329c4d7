"""Clear errors for users, the frame of every command line, and files that are complete or absent.

This imports nothing of the project, and TensorFlow only on request, so a mistyped flag is answered at once.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class UserError(Exception):
    """A mistake that the user can fix: the message names the flag or file, what is wrong and what would be right."""


class Stopped(Exception):  # noqa: N818
    """The user or the system requested a stop, by signal `number`; the message says how to continue."""

    def __init__(self, number: int, message: str = "stopped") -> None:
        super().__init__(message)
        self.number = number


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


def first_line(error: BaseException) -> str:
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
