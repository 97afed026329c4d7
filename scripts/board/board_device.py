"""Files, messages, signals and time of a board. Part of board_train.py; Python alone."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import List  # Python 3.6

START = time.monotonic()
HERE = Path(__file__).resolve().parent
CHECKPOINT_SECONDS = 120  # what a power cut may lose
SIGNALS = [
    getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGPWR") if hasattr(signal, name)
]
caught: List[int] = []  # the signal that asks for a stop


def fail(text):
    """End with one line. Status 2: the command has to be changed; 1: the disk is full, so it may succeed as it is."""
    error = sys.exc_info()[1]
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    say(f"\rboard_train.py: error: {text}", file=sys.stderr)
    sys.exit(1 if is_full else 2)


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def say(text, end="\n", file=None):
    """Print; where the terminal is gone, do nothing."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=file, flush=True)


def show(text, end=""):
    """Rewrite the line of progress, if there is a terminal."""
    if sys.stderr.isatty():
        say(f"\r{text}\033[K", end, sys.stderr)


def catch_signals():
    """Let a signal ask for a stop in `caught`; the next one, a second later or more, ends the program at once.

    Those that are ignored, as SIGHUP by `nohup`, stay so.
    """
    moments = []

    def note(number, _):
        caught.append(number)
        moments.append(time.monotonic())
        if moments[-1] - moments[0] > 1:  # `timeout` and terminals send more than one at a time
            os._exit(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)


def stop(text):
    """End as the signal that was caught asks for."""
    say(f"\nboard_train.py: stopped {text}; continue with --resume", file=sys.stderr)
    sys.exit(128 + caught[0])


def left(deadline):
    """Seconds until the deadline, which counts from the start of the program."""
    return deadline - (time.monotonic() - START) if deadline else math.inf


def replace_file(path, write):
    """Write a file under a temporary name, and rename it once it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")
    finally:
        remove(temporary)


def remove(*paths):
    """Remove the files that exist."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def read_record():
    """What board.json says; the files beside it are those of the export."""
    path, again = HERE / "board.json", "copy the folder of the export again"
    try:
        record = json.loads(path.read_text())
        for name, expected in record["sha256"].items():
            path = HERE / name
            if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                raise ValueError
        return record
    except OSError as error:
        fail(f"{path}: cannot be read: {error.strerror}; {again}")
    except (ValueError, KeyError, TypeError):
        fail(f"{path}: is damaged, or of another export or version; {again}")


def lock(folder):
    """Keep other programs out of `folder` until this one ends, however it ends."""
    descriptor = os.open(str(folder), os.O_RDONLY)  # stays open
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{folder}: another program uses this folder; wait until it ends, or give another --output")
    except OSError:
        pass  # a file system without locks
