#!/usr/bin/env python3
"""Run a command, and all that it starts, with a share of the processor.

    scripts/tools/slow_machine.sh 0.25 ./scripts/run_demo.sh
    scripts/tools/slow_machine.sh --load 20,40 0.25 ./scripts/run_demo.sh   # others are busy for 20 s of every 40

The kernel limits it by a control group (`cpu.max` of cgroup v2, `cpu.cfs_quota_us` of v1), which mostly needs root.
The last line says how long the command took.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000  # in which a group may use its share; what v1 assumes


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
def control_group(part: float) -> Iterator[Path]:
    """The file that limits a group of processes to `part` of all processors. Raises `OSError` if none can be made."""
    quota, name = int(part * (os.cpu_count() or 1) * PERIOD_US), f"slow_machine_{os.getpid()}"
    of_v2, of_v1 = CGROUPS / name / "cpu.max", CGROUPS / "cpu" / name / "cpu.cfs_quota_us"
    limit, text = (of_v1, str(quota)) if of_v1.parent.parent.is_dir() else (of_v2, f"{quota} {PERIOD_US}")
    limit.parent.mkdir()
    try:
        limit.write_text(text)
        yield limit
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
    with contextlib.ExitStack() as stack:
        try:
            limit = stack.enter_context(control_group(args.share))
        except OSError as error:
            parser.error(f"SHARE: no control group can be made here ({error}); run it as root")
        print(f"slow_machine: {args.share:.0%} of the processor by {limit}", file=sys.stderr)
        # A process enters the group by itself, so that all that it starts is in it, too.
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(limit.parent / "cgroup.procs")]
        start = time.monotonic()
        process = subprocess.Popen([*enter, *args.command])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the command's, which ends by it
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: process.send_signal(number))
        process.wait()
        print(f"slow_machine: ended after {time.monotonic() - start:.0f} s", file=sys.stderr)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    sys.exit(main())
