"""Carries out runs of main.py: from a description by flags to a finished folder. No run is made twice.

run_figure.py describes runs. A finished run of the same flags is kept, an interrupted one continues. A
timing table that is missing is made first.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plotting import ROOT, without_effect
from resolutions import PREFIX, SCRIPT

from elastic_trainer.cli.commands import parse_training, profiler_flags
from elastic_trainer.runs.reader import is_finished, is_run, read_settings
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import TABLE_RECORD, Settings
from elastic_trainer.settings.flags import as_words
from elastic_trainer.system.errors import Stopped, UserError
from elastic_trainer.system.files import read_record


@dataclass(frozen=True)
class Run:
    """One call of main.py.

    Attributes:
        settings: of it.
        words: the script, which takes the flags of main.py, and its flags.
        profile_seconds: for measuring its timing table; None: profiler.py's default.
        profile_only: only the table is wanted.
    """

    settings: Settings
    words: list[str]
    profile_seconds: float | None = None
    profile_only: bool = False

    @property
    def folder(self) -> Path:
        return self.settings.folder

    @property
    def is_elastic(self) -> bool:
        """Whether it selects tensors within a time budget, which needs a timing table."""
        return SCHEMES[self.settings.train_type].is_elastic

    @property
    def table(self) -> Path:
        """The folder of its timing table."""
        from elastic_trainer.timing.table_file import table_folder

        return table_folder(self.settings)

    @property
    def has_table(self) -> bool:
        """Whether there is a timing table of this machine and its versions; its network is not looked at."""
        from elastic_trainer.timing.table_file import other_setup

        path = self.table / TABLE_RECORD
        return path.is_file() and other_setup(read_record(path)) is None

    @property
    def profile_words(self) -> list[str]:
        """The script and the flags that make its timing table."""
        flags = profiler_flags(self.settings)
        return ["profiler.py", *flags, *(["--seconds", f"{self.profile_seconds:g}"] if self.profile_seconds else [])]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do. Raises `UserError` if its folder holds a run of other settings."""
        if self.profile_only:
            return self.has_table
        if is_run(self.folder):
            was, now = read_settings(self.folder).to_record(), self.settings.to_record()
            for name in {*now} - without_effect(now):
                if now[name] not in (None, was[name]):  # None: the run chose it
                    raise UserError(
                        f"{self.folder}: holds a run made with --{name} {was[name]}, not {now[name]}; give another "
                        "--logdir, or delete it"
                    )
        return is_finished(self.folder)


def make_run(
    flags: Mapping[str, Any],
    more: Sequence[str],
    classes: Callable[[Settings], int],
    **others: Any,
) -> Run:
    """A run by flags of main.py, value by name, and `more` words of its command line; `others`: attributes of `Run`."""
    words = [*as_words(flags), *more]
    settings = parse_training(words)
    if settings.batch_size is None:
        raise UserError("--batch_size: give it; this preset leaves it to the run")
    settings = replace(settings, num_classes=classes(settings))
    script = SCRIPT if settings.train_type.startswith(PREFIX) else "main.py"
    return Run(settings, [script, *words, "--resume"], **others)


def carry_out(runs: Sequence[Run]) -> None:
    """Profile and train what is missing, one run after the other.

    Raises:
        UserError: a command failed; the finished runs stay.
        Stopped: by a signal, which the running command got, too: it saves a checkpoint.
    """
    missing = [run for run in runs if not run.is_complete]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are complete", flush=True)
    with _stops_are_raised():
        for run in missing:
            if run.is_elastic and not run.has_table:
                _call(run.profile_words)
        for number, run in enumerate(missing, 1):
            print(f"run {number} of {len(missing)}: {run.folder.name}", flush=True)
            if not run.profile_only:
                _call(run.words)


@contextlib.contextmanager
def _stops_are_raised() -> Iterator[None]:
    """In this block SIGINT and SIGTERM raise `Stopped`."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number, "stopped; start it again to continue")

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _call(words: Sequence[str]) -> None:
    """Run a script by words, of which the first is the script; where this program stops, wait until that one has."""
    with subprocess.Popen([sys.executable, str(ROOT / words[0]), *words[1:]]) as process:
        try:
            status = process.wait()
        except Stopped as stopped:
            if stopped.number == signal.SIGTERM:  # Ctrl-C reaches all processes, SIGTERM only this one
                process.send_signal(stopped.number)
            raise
    if status:
        raise UserError(f"{shlex.join(words)}: ended with status {status}; start it again to continue")
