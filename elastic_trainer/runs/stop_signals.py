"""Ctrl-C (SIGINT), a lost terminal (SIGHUP), SIGTERM and others: the run ends after its step.

train.py then writes a checkpoint, and says how to go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time
from typing import Any

from elastic_trainer.runs.listener import Listener
from elastic_trainer.system.errors import Stopped

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPWR")  # macOS lacks the last


class StopSignals(Listener):
    """In this context these signals only request a stop, which `check` raises; a second signal exits at once.

    A thread receives them, because Python's own handlers wait until TensorFlow returns from a step or a compilation.
    Python allows handlers only in the main thread; in other threads this changes nothing. Under `nohup`, which starts a
    process that ignores SIGHUP, that stays ignored.
    """

    NUMBERS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None

    def on_tick(self) -> None:
        self.check()

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal came."""
        if self.number is not None:
            raise Stopped(self.number)

    def __enter__(self) -> StopSignals:
        self._restore = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            reading, writing = socket.socketpair()
            writing.setblocking(False)
            self._restore.callback(reading.close)
            self._restore.callback(writing.close)  # ends the thread
            self._restore.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing.fileno()))
            for number in self.NUMBERS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._restore.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            threading.Thread(target=self._listen, args=(reading,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()

    def _listen(self, reading: socket.socket) -> None:
        first = 0.0
        with contextlib.suppress(OSError):
            while data := reading.recv(1):
                if data[0] not in self.NUMBERS:
                    continue
                if self.number is None:
                    if data[0] == signal.SIGHUP:
                        _leave_terminal()
                    self.number, first = data[0], time.monotonic()
                    with contextlib.suppress(OSError):
                        again = "press Ctrl-C" if self.number == signal.SIGINT else "send SIGTERM"
                        print(f"\nstopping after this step; {again} again to quit now", file=sys.stderr)
                # `timeout` and shells send one signal twice; the kernel and shells SIGHUP, at any time.
                elif data[0] != signal.SIGHUP and time.monotonic() - first > 1:
                    os._exit(128 + data[0])


def _leave_terminal() -> None:
    """Drop what is printed from now on to a terminal that is gone, where it would be an error."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
