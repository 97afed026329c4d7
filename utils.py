"""Errors in one line on stderr, warnings and exit statuses, for every command line (no TensorFlow here)."""

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

from elastic_trainer.system.errors import Stopped, UserError

if Path(sys.argv[0]).absolute().parent == Path(__file__).parent:  # one of the commands has just started
    # File names and words of the command line are UTF-8, also where the locale says ASCII.
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    # Until `run_cli`, which handles it, Ctrl-C ends it without a traceback.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


FULL_DISK = errno.ENOSPC, errno.EDQUOT


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Run a command line's `main`. Errors that the user can fix are a line on stderr.

    Then exit with 2: the command has to be changed; or 1: it may succeed as it is, once there is room on the disk.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may contain any bytes
    try:
        main()
    except Stopped as stopped:
        print(f"{Path(sys.argv[0]).name}: {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(1 if getattr(error.__cause__, "errno", None) in FULL_DISK else 2)
    sys.exit(0)


def _message(error: Exception) -> str | None:
    """The text for a `UserError`, a path too long for the system, or a lack of memory; None for other errors."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # even `Path.exists` raises it
        return f"{reprlib.repr(os.fsdecode(error.filename or ''))}: {error.strerror}; give a shorter path"
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        # TensorFlow's message has many lines; NumPy's has one.
        wanted = re.search(r"tensor with shape ?\[[\d, ]*\]|[Uu]nable to allocate [^\n]*", str(error))
        return f"out of memory{f' ({wanted[0]})' if wanted else ''}; reduce --batch_size or --input_size"
    return None
