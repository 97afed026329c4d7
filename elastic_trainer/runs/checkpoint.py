"""Checkpoints of a run: one file each, written atomically. The last two are kept; of a finished run, the last.

A file has NumPy's .npz format: the arrays of all variables, and the rest of the run's state as JSON. A single file can
be renamed into place, and zip's checksum of each array detects damage.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.system.errors import START_AGAIN, UserError
from elastic_trainer.system.files import atomic_path, check_unpacked, writing

VERSION = 10  # of the contents of the state
_STATE = "state"


class State(NamedTuple):
    """All that a run needs to continue from a step, also on another machine.

    Attributes:
        arrays: variables of the network and the optimizer, by name.
        record: everything else, as JSON types.
    """

    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: Path | None = None  # saved or loaded last, so it is intact

    def save(self, step: int, state: State) -> None:
        """Write the checkpoint of `step`; keep it and the last intact one before it, and delete all others.

        If the disk is full or cannot be written to, the older ones remain.
        """
        record = {"version": VERSION, "arrays": len(state.arrays), **state.record}
        text = json.dumps(record, separators=(",", ":")).encode()
        path = self.folder / f"step-{step:010}.npz"
        with atomic_path(path) as temporary:
            np.savez(temporary, **{_STATE: np.frombuffer(text, np.uint8), **state.arrays})  # type: ignore[arg-type]
        self._keep(path, self._last)
        self._last = path

    def latest(self) -> State | None:
        """The newest checkpoint that is intact, or None if there are none. Damaged ones are skipped, with a message.

        Raises:
            UserError: all are damaged, or one has another version.
        """
        paths = self._paths()
        for path in paths:
            try:
                state = _read(path)
            except Exception as error:  # damage takes many forms in zip, numpy and JSON
                print(f"{path} is damaged ({' '.join(str(error).split())}); trying an earlier one", file=sys.stderr)
                continue
            if state.record.get("version") != VERSION:
                raise UserError(f"{path}: written by another version of this program; {START_AGAIN}")
            self._last = path
            return state
        if paths:
            raise UserError(f"{self.folder}: every checkpoint is damaged; {START_AGAIN}")
        return None

    def keep_last(self) -> None:
        """Delete all but the last one that was saved or loaded: the run is finished."""
        self._keep(self._last)

    def _keep(self, *kept: Path | None) -> None:
        with writing(self.folder):
            for path in self._paths():
                if path not in kept:
                    path.unlink()

    def _paths(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*.npz"), reverse=True)


def _read(path: Path) -> State:
    with zipfile.ZipFile(path) as archive:
        check_unpacked(archive)
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}  # reading checks the checksums
    record = json.loads(arrays.pop(_STATE).tobytes())
    if record.pop("arrays") != len(arrays):  # zip has no checksum of its list of contents
        raise ValueError("arrays are missing")
    return State(arrays, record)
