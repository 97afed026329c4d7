"""A machine that boots: a copy of this one in a container, in which systemd starts `main.py` by the unit of the docs.

Needs root and Debian's package systemd-container. The copy keeps what it writes in memory, until the end.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from common import ROOT  # first: it sets the import path

from elastic_trainer.system.errors import UserError

Boot = Callable[..., "subprocess.Popen[bytes]"]
PAGE = ROOT / "docs" / "small_boards.md"
# The machine is switched off when the run has ended or is refused; not when it is started again.
ENDS = """[Service]
ExecStopPost=/bin/sh -c 'case $$EXIT_STATUS in 0|2) systemctl exit $$EXIT_STATUS;; esac'
StandardOutput=append:{log}
StandardError=inherit
"""


@contextlib.contextmanager
def mounted(kind: str, options: str, folder: Path) -> Iterator[Path]:
    """`folder`, on which a file system is mounted meanwhile."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, kind, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def machine(logdir: Path) -> Iterator[Boot]:
    """Something with the arguments of `torture_resume.start`, whose processes are a machine that boots.

    `logdir` is on it. Killing a process cuts its power: all that runs there ends at once.
    """
    if os.geteuid() or not shutil.which("systemd-nspawn"):
        raise UserError("--what machine: needs root and systemd-nspawn: apt install systemd-container")
    with TemporaryDirectory() as top, mounted("tmpfs", "size=2g", Path(top)) as memory:
        (memory / "changed").mkdir()
        (memory / "work").mkdir()
        layers = f"lowerdir=/,upperdir={memory}/changed,workdir={memory}/work"
        with mounted("overlay", layers, memory / "root") as root, contextlib.ExitStack() as stack:

            def boot(script: str, *arguments: object, log: Path) -> subprocess.Popen[bytes]:
                install_unit(root / "etc/systemd/system", [sys.executable, ROOT / script, *arguments], log)
                while not subprocess.call(["pgrep", "-f", f"directory={root}"], stdout=subprocess.DEVNULL):
                    time.sleep(0.1)  # what was killed is still ending
                # Where `unshare` is killed, all that it started is.
                words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "systemd-nspawn", "--quiet"]
                words += ["--register=no", "--keep-unit", "--link-journal=no", "--console=pipe", f"--bind={logdir}"]
                words += [f"--directory={root}", "--boot"]
                with log.open("ab") as file:
                    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
                stack.callback(process.kill)
                return process

            yield boot


def install_unit(folder: Path, command: list[object], log: Path) -> None:
    """The unit of docs/small_boards.md with another command, started at boot."""
    unit = PAGE.read_text(encoding="utf-8").partition("```ini\n")[2].partition("```")[0]
    lines = [
        f"ExecStart={shlex.join(map(str, command))}" if line.startswith("ExecStart=") else line
        for line in unit.splitlines()
    ]
    for name in ("elastic.service.d", "multi-user.target.wants"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "elastic.service").write_text("\n".join(lines) + "\n")
    (folder / "elastic.service.d" / "ends.conf").write_text(ENDS.format(log=log))
    wanted = folder / "multi-user.target.wants" / "elastic.service"
    wanted.unlink(missing_ok=True)
    wanted.symlink_to("../elastic.service")


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No byte is free in the file system of `folder` meanwhile."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    try:
        yield
    finally:
        filler.unlink()
