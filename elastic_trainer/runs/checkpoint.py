"""Checkpoints of a run: one file each, complete or absent, the last two kept; and when the next one is due.

A file has NumPy's .npz format: the arrays of all variables, and the rest of the run's state as JSON. A single file can
be renamed into place at once, and zip's checksum of each array detects damage.
"""

from __future__ import annotations

import json
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.files import atomic_path, writing

VERSION = 3  # of what the state holds
_STATE = "state"


class Checkpoint(NamedTuple):
    """What one checkpoint holds: arrays by name, and JSON-able state."""

    arrays: dict[str, np.ndarray]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: Path | None = None  # what was saved or loaded last, so known to be good

    def save(self, step: int, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`; keep it and the last good one before, and delete all others.

        Raises:
            UserError: the disk is full or cannot be written to; the older checkpoints are still there.
        """
        text = json.dumps({"version": VERSION, **state}, separators=(",", ":")).encode()
        path = self.folder / f"step-{step:010}.npz"
        with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as file:
            for name, array in {_STATE: np.frombuffer(text, np.uint8), **arrays}.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
        with writing(self.folder):
            for old in self._paths():
                if old not in (path, self._last):
                    old.unlink()
        self._last = path

    def latest(self) -> Checkpoint | None:
        """The newest one that is intact, or None if there is none. A damaged one is skipped, with a message.

        Raises:
            UserError: all of them are damaged, or cannot be read.
        """
        paths = self._paths()
        for path in paths:
            try:
                checkpoint = _read(path)
            except PermissionError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
            except Exception as error:  # damage takes many forms in zip, numpy and JSON
                print(f"{path} is damaged ({' '.join(str(error).split())}); trying the one before", file=sys.stderr)
                continue
            if checkpoint.state.get("version") != VERSION:
                raise UserError(f"{path}: was written by another version of this program; start again with --overwrite")
            self._last = path
            return checkpoint
        if paths:
            raise UserError(f"{self.folder}: every checkpoint in it is damaged; start again with --overwrite")
        return None

    def clear(self) -> None:
        """Delete them all. Raises `UserError` where the system refuses."""
        with writing(self.folder):
            for path in self._paths():
                path.unlink()
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*.npz"), reverse=True)


def _read(path: Path) -> Checkpoint:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}  # reading checks the checksums
    return Checkpoint(arrays, json.loads(arrays.pop(_STATE).tobytes()))


class CheckpointClock:
    """When the next checkpoint is due.

    Args:
        minutes: from one checkpoint to the next.
        steps: a checkpoint every so many steps as well, or None.
    """

    def __init__(self, minutes: float, steps: int | None) -> None:
        self._minutes, self._steps = minutes, steps
        self.restart()

    def restart(self) -> None:
        """A checkpoint was written just now."""
        self._last = time.monotonic()

    def is_due(self, step: int | None) -> bool:
        """Whether one is due after `step` steps (None: by time alone)."""
        by_steps = self._steps is not None and step is not None and step % self._steps == 0
        return by_steps or time.monotonic() - self._last >= 60 * self._minutes
