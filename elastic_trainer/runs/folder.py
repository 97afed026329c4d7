"""The folder of a run: it is made, locked against other runs, and emptied of an earlier run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.errors import UserError
from elastic_trainer.files import is_temporary, locked, writing
from elastic_trainer.registry import EXPORTERS
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.reader import CONFIG, METRICS, SELECTIONS, SUMMARY, is_run
from elastic_trainer.settings import BEST_MODEL, LAST_MODEL, TRAINED_IMAGES


@contextlib.contextmanager
def run_folder(logdir: Path, run_name: str, overwrite: bool = False, resume: bool = False) -> Iterator[Path]:
    """The folder of a run, locked against other runs: `logdir`/`run_name`, or with -2, -3, … appended if that exists.

    With `overwrite`, the files that a run writes are deleted from an earlier run's folder, and nothing else. With
    `resume`, only the half-written files of a killed run are deleted.

    Raises:
        UserError: the folder cannot be made or is in use, or `overwrite` meets a folder that does not hold a run.
    """
    taken = (overwrite or resume) and (logdir / run_name).exists()
    with writing(logdir):
        folder = logdir / run_name if taken else _new_folder(logdir, run_name)
    if not folder.is_dir():
        raise UserError(f"--run_name {run_name}: {folder} is no folder; choose another name")
    with _locked(folder):
        with writing(folder):
            leftovers = [path for path in (*folder.glob(".*"), *folder.glob("*/.*")) if is_temporary(path)]
            if taken and set(folder.iterdir()) - {*leftovers} and not is_run(folder):
                flag = "--overwrite" if overwrite else "--resume"
                raise UserError(
                    f"{flag}: {folder} is not the folder of a run (it has no config.json); nothing was changed"
                )
            if overwrite:
                _empty(folder)
            for path in leftovers:
                path.unlink(missing_ok=True)
        yield folder


def _new_folder(logdir: Path, run_name: str) -> Path:
    logdir.mkdir(parents=True, exist_ok=True)
    for count in range(1, 1_000_000):
        folder = logdir / (run_name if count == 1 else f"{run_name}-{count}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise UserError(f"--run_name {run_name}: a million runs have this name; choose another")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` against other runs. Where the system has no such lock, two runs in one folder are not noticed."""
    with contextlib.ExitStack() as stack:
        with writing(folder):
            is_ours = stack.enter_context(locked(folder))
        if is_ours is False:
            raise UserError(f"{folder}: another run is writing there; wait for it, or give --run_name")
        yield


def _empty(folder: Path) -> None:
    written = {SUMMARY, METRICS, SELECTIONS, f"{folder.name}.txt", BEST_MODEL, LAST_MODEL, TRAINED_IMAGES}
    written |= {name for entry in EXPORTERS.values() for name in entry.files}
    written |= {"classes.csv", "confusion.csv", "confusion.pdf", "confusion.png", "mistakes.png", "evaluation.json"}
    Checkpoints(folder / "checkpoints").clear()
    for path in [*folder.iterdir(), *folder.glob("evaluation/*")]:
        if path.is_file() and (path.name in written or path.name.startswith("events.out.")):
            path.unlink()
        elif path.is_dir() and path.name in written:  # what an exporter wrote
            shutil.rmtree(path)
    (folder / CONFIG).unlink(missing_ok=True)  # last: as long as it exists, the folder is that of a run
