"""Clear errors for users, the frame of every command line, and files that are complete or absent.

This imports nothing of the project, and TensorFlow only on request, so a mistyped flag is answered at once.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import re
import reprlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pydantic import BaseModel


class UserError(Exception):
    """A mistake that the user can fix: the message names the flag or file, what is wrong and what would be right."""


class Stopped(Exception):  # noqa: N818
    """The user or the system requested a stop, by signal `number`; the message says how to continue."""

    def __init__(self, number: int, message: str = "stopped") -> None:
        super().__init__(message)
        self.number = number


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main`; what `_report` prints as one line on stderr exits with status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may consist of any bytes
    try:
        main()
    except Stopped as stopped:
        print(f"{Path(sys.argv[0]).name}: {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not _report(error):
            raise
        sys.exit(2)
    sys.exit(0)


def run_each(*steps: Callable[[], object]) -> None:
    """Run all `steps`, also after one that fails. Each failure is reported as by `run_cli`, which exits with status 2.

    Raises:
        Exception: the last one that is no mistake of the user, when all steps were tried.
    """
    failed, defect = False, None
    for step in steps:
        try:
            step()
        except Exception as error:
            failed = True
            if not _report(error):
                defect = error
    if defect is not None:
        raise defect
    if failed:
        sys.exit(2)


def warn(message: str) -> None:
    """Print a warning of one line on stderr."""
    print(f"{Path(sys.argv[0]).name}: warning: {message}", file=sys.stderr)


def _report(error: Exception) -> bool:
    """Print what is no defect as one line on stderr: a `UserError`, a path too long for the system, lack of memory.

    Returns:
        Whether `error` was one of them.
    """
    message = str(error) if isinstance(error, UserError) else _name_too_long(error) or _out_of_memory(error)
    if message is not None:
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr)
    return message is not None


def _name_too_long(error: Exception) -> str | None:
    """What to say if the system refuses a path for its length, which even a look whether it exists raises."""
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    return f"{reprlib.repr(os.fsdecode(error.filename or ''))}: {error.strerror}; give a shorter one"


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


def printable(text: str) -> str:
    """`text` in one line: line breaks, control characters and bytes that are not UTF-8 become escapes.

    The name of a file may contain all of them.
    """
    unfit = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
    return re.sub(unfit, lambda found: found[0].encode("unicode_escape").decode(), text)


def figure_text(text: str) -> str:
    """`text`, such as the name of a class, as matplotlib draws it literally: a `$` starts no formula."""
    return printable(text).replace("$", r"\$")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What cannot be read in this block, or fails pydantic's checks, becomes a `UserError` of `path` and the field."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error, RecursionError) as error:
        raise UserError(f"{path}: {_first_field(error)}") from error


def _first_field(error: Exception) -> str:
    """What an error says; of a `pydantic.ValidationError` (not imported for this), what the first wrong field says."""
    if not hasattr(error, "errors"):
        return first_line(error)
    wrong = error.errors(include_url=False)[0]
    shown = f", not {reprlib.repr(wrong['input'])}" if wrong["loc"] and wrong["type"] != "missing" else ""
    return ": ".join([*map(str, wrong["loc"]), wrong["msg"].removeprefix("Value error, ") + shown])


def read_json(path: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """A JSON file that `schema` accepts, without fields that the file lacks.

    Raises:
        UserError: it cannot be read, or a field is missing or wrong; the message names both.
    """
    with reading(path):
        content = path.read_bytes()
        if b"\\udc" in content:  # a name that may not be UTF-8, which pydantic's own reader refuses: "?" stands for it
            record = json.loads(content)
            schema.model_validate_json(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
            return record
        return schema.model_validate_json(content).model_dump(exclude_unset=True)


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


def is_temporary(path: Path) -> bool:
    """Whether `path` has a name that `atomic_path` gives."""
    return re.match(r"\.\d+\.", path.name) is not None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool | None]:
    """Lock the file or folder `path` itself: the system unlocks it when the block or its process ends in any way.

    Yields:
        True; False if another process has locked it; None if the system cannot lock it.

    Raises:
        OSError: there is no such file or folder, or it may not be read.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours: bool | None = True
        except BlockingIOError:
            is_ours = False
        except OSError:  # a file system without locks
            is_ours = None
        yield is_ours
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_large_path(path: Path) -> Iterator[Path]:
    """`atomic_path` for a file of gigabytes: if this process is killed, `remove_leftovers` finds what it wrote."""
    with contextlib.ExitStack() as lock, atomic_path(path) as temporary:  # locked until it is renamed
        temporary.touch()
        lock.enter_context(locked(temporary))
        yield temporary


def remove_leftovers(folder: Path, ending: str) -> None:
    """Delete what killed processes left in `folder`: temporary names with this ending that no process has `locked`.

    An empty file stays: its process may be about to lock it.
    """
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if is_temporary(path) and path.name.endswith(ending)]:
            with contextlib.suppress(OSError), locked(path) as is_ours:
                if is_ours and path.is_dir():
                    shutil.rmtree(path)
                elif is_ours and path.stat().st_size:
                    path.unlink()


def sync(path: Path) -> None:
    """Wait until the file or folder `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; bytes of a file's name that are not UTF-8 become escapes."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, record: object) -> None:
    """Write `record` to `path` as indented JSON, atomically."""
    write_text(path, json.dumps(record, indent=2) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a header line to `path`, atomically."""
    with (
        atomic_path(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write a matplotlib figure as `stem`.pdf and `stem`.png, atomically."""
    for ending in (".pdf", ".png"):
        with atomic_path(stem.with_name(stem.name + ending)) as temporary:
            figure.savefig(temporary, bbox_inches="tight", dpi=150)
