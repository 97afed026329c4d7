"""What every command line shares: errors in one line on stderr, exit statuses, warnings (no TensorFlow here)."""

from __future__ import annotations

import errno
import io
import os
import re
import reprlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from elastic_trainer.errors import Stopped, UserError


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
