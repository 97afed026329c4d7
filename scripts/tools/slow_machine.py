#!/usr/bin/env python3
"""Run a command, and all that it starts, with a share of the processor.

    scripts/tools/slow_machine.sh 0.25 ./scripts/run_demo.sh
    scripts/tools/slow_machine.sh --load 20,40 0.25 ./scripts/run_demo.sh   # others are busy for 20 s of every 40

The kernel limits it where a control group may be made (`cpu.max` of cgroup v2, `cpu.cfs_quota_us` of v1); else all its
processes are stopped and continued in turn, which takes more from programs of many threads. The first line says which,
and the last one how long the command took.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000  # in which a group may use its share; what v1 assumes
PERIOD = 0.1  # seconds in which a command runs once and is stopped once
LOOK = 0.5  # seconds between two looks for processes that it started
PR_SET_CHILD_SUBREAPER = 36


def share(text: str) -> float:
    """A type for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a share of the processor from 0.01 to 1, such as 0.25")
    return value


def seconds_of_every(text: str) -> tuple[float, float]:
    """A type for argparse."""
    try:
        busy, every = map(float, text.split(","))
    except ValueError:
        busy, every = 0.0, 0.0
    if not 0 < busy < every:
        raise argparse.ArgumentTypeError(f"'{text}' must be two numbers of seconds, such as 20,40")
    return busy, every


@contextlib.contextmanager
def control_group(part: float) -> Iterator[Path | None]:
    """The file that limits a group of processes to `part` of all processors; None where the kernel does not let us."""
    quota, name = int(part * (os.cpu_count() or 1) * PERIOD_US), f"slow_machine_{os.getpid()}"
    of_v2, of_v1 = CGROUPS / name / "cpu.max", CGROUPS / "cpu" / name / "cpu.cfs_quota_us"
    limit, text = (of_v1, str(quota)) if of_v1.parent.parent.is_dir() else (of_v2, f"{quota} {PERIOD_US}")
    is_limited = False
    with contextlib.suppress(OSError):  # also where the group has no such file
        limit.parent.mkdir()
        limit.write_text(text)
        is_limited = True
    try:
        yield limit if is_limited else None
    finally:
        with contextlib.suppress(OSError):  # a process is left in it
            limit.parent.rmdir()


@contextlib.contextmanager
def _busy_processes() -> Iterator[list[multiprocessing.Process]]:
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        pass


def load(busy: float, every: float) -> None:
    """Keep all processors busy for `busy` of every `every` seconds, for ever."""
    while True:
        with _busy_processes():
            time.sleep(busy)
        time.sleep(every - busy)


def descendants(root: int) -> list[int]:
    """All processes that `root` started, and those that these started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, at = list(children.get(root, ())), 0
    while at < len(found):
        found += children.get(found[at], ())
        at += 1
    return found


def throttle(part: float, is_over: Callable[[], bool]) -> None:
    """Stop and continue what this process started until `is_over`."""
    looked = -LOOK
    processes: list[int] = []
    while not is_over():
        if time.monotonic() - looked > LOOK:
            beside = {process.pid for process in multiprocessing.active_children()}
            looked, processes = time.monotonic(), [*{*descendants(os.getpid())} - beside]
        start = time.monotonic()
        time.sleep(part * PERIOD)
        ran = time.monotonic() - start
        _signal(processes, signal.SIGSTOP)
        time.sleep(ran * (1 / part - 1))
        _signal(processes, signal.SIGCONT)


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="slow_machine.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("share", type=share, metavar="SHARE", help="of the processor, such as 0.25")
    parser.add_argument(
        "--load",
        type=seconds_of_every,
        metavar="BUSY,EVERY",
        help="keep all processors busy for BUSY of every EVERY seconds",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    args = parser.parse_args()
    if not args.command:
        parser.error("COMMAND: is missing, such as ./scripts/run_demo.sh")
    if shutil.which(args.command[0]) is None:
        parser.error(f"COMMAND: there is no program {args.command[0]}")
    if args.load:
        threading.Thread(target=load, args=args.load, daemon=True).start()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that what outlives its parent stays ours
    with control_group(args.share) as limit:
        by = limit or "stopping and continuing its processes"
        print(f"slow_machine: {args.share:.0%} of the processor by {by}", file=sys.stderr)
        # A process enters the group by itself, so that all that it starts is in it, too.
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(limit.parent / "cgroup.procs")] if limit else []
        start = time.monotonic()
        process = subprocess.Popen([*enter, *args.command])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the command's, which ends by it
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: process.send_signal(number))
        if limit:
            process.wait()
        else:
            throttle(args.share, lambda: process.poll() is not None)
            _signal(descendants(os.getpid()), signal.SIGCONT)  # what it left running is free
        print(f"slow_machine: ended after {time.monotonic() - start:.0f} s", file=sys.stderr)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    sys.exit(main())
