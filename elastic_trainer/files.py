"""Atomic file writes, locks, and readers whose errors name the file and the field."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import reprlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import UserError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pydantic import BaseModel


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Errors of reading and of pydantic's checks in this block become a `UserError` that names `path` and the field."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error, RecursionError) as error:
        raise UserError(f"{path}: {_first_field(error)}") from error


def _first_field(error: Exception) -> str:
    """Message of the error; for a `pydantic.ValidationError` (pydantic is not imported here), of its first field."""
    if not hasattr(error, "errors"):
        return first_line(error)
    wrong = error.errors(include_url=False)[0]
    shown = f", not {reprlib.repr(wrong['input'])}" if wrong["loc"] and wrong["type"] != "missing" else ""
    return ": ".join([*map(str, wrong["loc"]), wrong["msg"].removeprefix("Value error, ") + shown])


def read_json(path: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """The contents of a JSON file that `schema` accepts. Fields that the file lacks are left out.

    Raises:
        UserError: the file cannot be read, or a field is missing or wrong; the message names both.
    """
    with reading(path):
        content = path.read_bytes()
        if b"\\udc" in content:  # a name that is not UTF-8, which pydantic's reader refuses: check it with "?" instead
            record = json.loads(content)
            schema.model_validate_json(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
            return record
        return schema.model_validate_json(content).model_dump(exclude_unset=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """System errors in this block become a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` with the same extensions; rename it to `path` when the block has succeeded.

    The file is on the disk before it is renamed, so a power cut leaves either the old file or the new one.

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


def existing_parent(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def is_temporary(path: Path) -> bool:
    """Whether `path` has a temporary name of `atomic_path`."""
    return re.match(r"\.\d+\.", path.name) is not None


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool | None]:
    """Lock the file or folder `path` itself. The system unlocks it when the block or the process ends, however it ends.

    Args:
        path: of the file or folder.
        wait: until another process unlocks it.

    Yields:
        True; False if another process has locked it; None if the system cannot lock it.

    Raises:
        OSError: the file or folder does not exist or cannot be read.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_ours: bool | None = True
        except BlockingIOError:
            is_ours = False
        except OSError:  # a file system without locks
            is_ours = None
        yield is_ours
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Write several files that belong together: `folder` is made, and no other process is in such a block meanwhile.

    Raises:
        UserError: the folder cannot be made.
    """
    with contextlib.ExitStack() as lock:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(folder, wait=True))
        yield


@contextlib.contextmanager
def atomic_large_path(path: Path) -> Iterator[Path]:
    """`atomic_path` for files of gigabytes: if this process is killed, `remove_leftovers` finds the temporary file."""
    with contextlib.ExitStack() as lock, atomic_path(path) as temporary:  # locked until it is renamed
        temporary.touch()
        lock.enter_context(locked(temporary))
        yield temporary


def remove_leftovers(folder: Path, ending: str) -> None:
    """Delete the temporary files of killed processes in `folder`: those with this ending that no process has locked.

    Empty files stay, since their process may be about to lock them.
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
    """Write `text` to `path` atomically; bytes of file names that are not UTF-8 become escapes."""
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
