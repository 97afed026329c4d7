"""Where features of examples are kept: in memory, or in a file that vanishes with the process.

A store holds `count` rows; a row has one array for each cut tensor (`training.prefix`). Rows are written once and read
at random.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Kind = tuple[tuple[int, ...], np.dtype]  # shape of a row, and its type


class MemoryStore:
    """Rows in memory, which the system provides as they are written.

    Args:
        count: number of rows.
        kinds: shape and type of a row of each array.
    """

    def __init__(self, count: int, kinds: Sequence[Kind]) -> None:
        self._arrays = [np.empty((count, *shape), dtype) for shape, dtype in kinds]

    def write(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Keep `values`, an array [n, …] for each kind, as `rows`, int [n]."""
        for array, value in zip(self._arrays, values, strict=True):
            array[rows] = value

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        """What was written as `rows`, int [n]: an array [n, …] for each kind."""
        return [array[rows] for array in self._arrays]


class FileStore:
    """Rows in a file without a name: the system removes it when the process ends, however it ends.

    Args:
        count, kinds: as of `MemoryStore`.
        folder: where the file is.

    Raises:
        OSError: here and when rows are written: the disk is full, or the folder cannot be written.
    """

    def __init__(self, count: int, kinds: Sequence[Kind], folder: Path) -> None:
        self._row = np.dtype([(f"cut{index}", dtype, shape) for index, (shape, dtype) in enumerate(kinds)])
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as the store is
        free = os.statvfs(self._file.fileno())
        if count * self._row.itemsize > free.f_bavail * free.f_frsize:
            raise OSError("not enough room on the disk")

    def write(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """As `MemoryStore.write`. Not through a mapping: on a full disk that would end the process without a word."""
        records = np.empty(len(rows), self._row)
        for name, value in zip(self._row.names or (), values, strict=True):
            records[name] = value
        for row, record in zip(rows.tolist(), records, strict=True):
            self._file.seek(row * self._row.itemsize)
            data = record.tobytes()
            if self._file.write(data) < len(data):
                raise OSError("no room left on the disk")

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        """As `MemoryStore.read`."""
        records = np.empty(len(rows), self._row)
        memory = records.view(np.uint8).reshape(len(rows), self._row.itemsize)
        for place, row in zip(memory, rows.tolist(), strict=True):
            self._file.seek(row * self._row.itemsize)
            self._file.readinto(place.data)
        return [np.ascontiguousarray(records[name]) for name in self._row.names or ()]
