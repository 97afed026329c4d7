"""Makes the folder of a run, and locks it against other runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.runs.reader import is_run
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import is_temporary, locked, writing


@contextlib.contextmanager
def run_folder(logdir: Path, run_name: str, resume: bool = False) -> Iterator[Path]:
    """The folder of a run, locked against other runs: `logdir`/`run_name`, with -2, -3, … appended if it exists.

    With `resume`, it is that of an earlier run, in which the temporary files of a killed one are deleted. A folder that
    is in use is refused (two runs are not noticed where the system has no locks), as one to resume without a run. One
    that is still empty at the end is removed.
    """
    is_reused = resume and (logdir / run_name).exists()
    with writing(logdir):
        folder = logdir / run_name if is_reused else _new_folder(logdir, run_name)
    if not folder.is_dir():
        raise UserError(f"--run_name {run_name}: {folder} is a file; choose another name")
    with contextlib.ExitStack() as lock:
        with writing(folder):
            if lock.enter_context(locked(folder)) is False:
                raise UserError(f"{folder}: another run is writing to it; wait until it ends, or give --run_name")
            leftovers = {path for path in (*folder.glob(".*"), *folder.glob("*/.*")) if is_temporary(path)}
            if is_reused and {*folder.iterdir()} - leftovers and not is_run(folder):
                raise UserError(f"--resume: {folder} contains no run (no config.json); give the name of a run")
            for path in leftovers:
                path.unlink(missing_ok=True)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _new_folder(logdir: Path, run_name: str) -> Path:
    logdir.mkdir(parents=True, exist_ok=True)
    folder, count = logdir / run_name, 1
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        folder, count = logdir / f"{run_name}-{count + 1}", count + 1
