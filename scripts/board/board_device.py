"""Files, messages and time of a board. Part of board_train.py; Python alone."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

from board_digests import record_digest

START = time.monotonic()
HERE = Path(__file__).resolve().parent
COPY_AGAIN = "copy the folder of the export again"


def fail(text):
    """End with one line. Status 2: the command has to be changed; 1: the disk is full, so it may succeed as it is."""
    error = sys.exc_info()[1]
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    print(f"\rboard_train.py: error: {text}", file=sys.stderr)
    sys.exit(1 if is_full else 2)


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def show(text, end=""):
    """Rewrite the line of progress, if there is a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end=end, file=sys.stderr, flush=True)


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
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove(*paths):
    """Remove the files that exist."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def write_json(path, record):
    """Write a record with its digest, which `read_json` checks."""
    record = {**record, "digest": record_digest(record)}
    replace_file(path, lambda file: file.write(json.dumps(record, indent=1).encode()))


def read_json(path, advice):
    """The record in a file; `advice` says what helps if it is damaged."""
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or record.get("digest") != record_digest(record):
            raise ValueError("is damaged, or of another version")
        return record
    except (OSError, ValueError, RecursionError) as error:
        fail(f"{path}: cannot be read: {first_line(error)}; {advice}")


def read_record():
    """What board.json says; the files beside it are those of the export."""
    record = read_json(HERE / "board.json", COPY_AGAIN)
    for name, expected in record["sha256"].items():
        try:
            digest = hashlib.sha256((HERE / name).read_bytes()).hexdigest()
        except OSError as error:
            fail(f"{HERE / name}: cannot be read: {error.strerror}; {COPY_AGAIN}")
        if digest != expected:
            fail(f"{HERE / name}: is damaged, or of another export than board.json; {COPY_AGAIN}")
    return record


def lock(folder):
    """Keep other programs out of `folder` until this one ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)  # stays open
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = lock_owner(os.fstat(descriptor).st_ino)
        fail(f"{folder}: another program{found} uses this folder; wait until it ends, or give another --output")
    except OSError:
        pass  # a file system without locks


def lock_owner(inode):
    """The process that has locked the file, as text; "" if the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].split(":")[2] == str(inode):
                return f" (process {words[4]})"
    return ""
