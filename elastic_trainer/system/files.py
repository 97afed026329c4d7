"""Atomic file writes, locks, and readers whose errors name the file."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.system.errors import UserError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


VERSION = 2  # of our own JSON files, with the tables beside them
MAX_UNPACKED = 20  # times the size of an archive, beyond 100 MB


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Errors of reading and of checking in this block become a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: {first_line(error)}") from error


@contextlib.contextmanager
def trusting(path: Path, advice: str = "delete it") -> Iterator[None]:
    """What goes wrong while a file of our own is read in this block becomes a `UserError` that names it.

    Such a file was written atomically, and nobody edits it. So it is not checked field by field.
    """
    with reading(path):
        try:
            yield
        except (OSError, UserError):
            raise
        except Exception as error:
            raise ValueError(f"is damaged or of another version; {advice}") from error


def read_record(path: Path) -> dict[str, Any]:
    """The object in a file of `write_record`. Raises `UserError` if it is damaged or of another version."""
    with trusting(path):
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record.pop("version") != VERSION:
            raise ValueError
        return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write an object as JSON, atomically, with the version of our files."""
    write_json(path, {"version": VERSION, **record})


def check_unpacked(file: zipfile.ZipFile) -> None:
    """Raise `ValueError` if an archive unpacks to far more than it holds; ours, as Keras' and NumPy's, are stored."""
    packed, unpacked = (sum(getattr(one, kind) for one in file.infolist()) for kind in ("compress_size", "file_size"))
    if unpacked > max(MAX_UNPACKED * packed, 1e8):
        raise ValueError(f"unpacks {packed / 1e6:,.1f} MB to {unpacked / 1e6:,.0f} MB")


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

    The file is on the disk before it is renamed, so a power cut leaves either the old file or the new one. System
    errors become a `UserError`.
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
def locked(path: Path) -> Iterator[bool]:
    """Lock the file or folder `path` itself until the block or the process ends, however it ends.

    Yields False if another process has locked it. Raises `OSError` if it does not exist or cannot be read.
    """
    descriptor, is_ours = os.open(path, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # of another kind where a file system has no locks
            is_ours = not isinstance(error, BlockingIOError)
        yield is_ours
    finally:
        os.close(descriptor)


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
