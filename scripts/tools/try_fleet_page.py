#!/usr/bin/env python
"""Run the commands of docs/fleet.md, "Two boards and a server", word by word, on three machines.

The machines are network namespaces of this one: the server at the page's address, and two boards, linked by veth pairs.
Each has a folder of its own with this checkout. Photos are made up: each board lacks a class. It needs Linux with `ip`,
`unshare`, `nsenter`, `openssl` and `ssh-keygen`, and .venv-fleet; no root. Only --rounds is smaller, and no weights
are downloaded.

    .venv-fleet/bin/python scripts/tools/try_fleet_page.py /tmp/machines --rounds 3
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.options import folder, whole_number

ROOT = Path(__file__).resolve().parents[2]
NETWORK, BOARDS = "192.168.1", {"kitchen": ("cat", "dog"), "hall": ("dog", "fox")}
PROGRAMS = "ip", "unshare", "nsenter", "openssl", "ssh-keygen"
INSIDE = "ELASTIC_FLEET_NAMESPACE"  # is set in the namespaces


class Machine:
    """A network namespace and a folder with the checkout. `address` is its last number."""

    def __init__(self, place: Path, address: int) -> None:
        self.folder, self._processes = place, list[subprocess.Popen[bytes]]()
        place.mkdir(parents=True)
        for path in ROOT.iterdir():
            if path.name not in ("logs", ".git"):
                (place / path.name).symlink_to(path)
        self.keeper = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        here, there = Path("/proc/self/ns/net"), Path(f"/proc/{self.keeper.pid}/ns/net")
        while there.readlink() == here.readlink():
            time.sleep(0.05)
        inner, outer = "eth0", f"port{address}"
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", str(self.keeper.pid))
        ip("link", "set", outer, "master", "bridge", "up")
        self.run(f"ip link set lo up; ip addr add {NETWORK}.{address}/24 dev {inner}; ip link set {inner} up")

    def start(self, command: str, log: str) -> subprocess.Popen[bytes]:
        """Start a command here; what it prints goes to the file `log`."""
        with (self.folder / log).open("wb") as file:
            words = ["nsenter", "-n", "-t", str(self.keeper.pid), "bash", "-euo", "pipefail", "-c", command]
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, command: str) -> str:
        """Run a command here to its end; what it prints. Raises `UserError` if it fails."""
        return self.wait(self.start(command, "command.log"), command, "command.log")

    def wait(self, process: subprocess.Popen[bytes], command: str, log: str) -> str:
        """What a command has printed by its end. Raises `UserError` if it fails."""
        code, text = process.wait(), (self.folder / log).read_text(errors="replace")
        if code:
            raise UserError(f"docs/fleet.md: a command failed: {command}\n{text[-3000:]}")
        return text

    def stop(self) -> None:
        """End what was started here."""
        for process in (*self._processes, self.keeper):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM) if process is not self.keeper else process.kill()
                process.wait()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def commands() -> list[str]:
    """The blocks of commands in the section, in their order."""
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    section = page.partition("## Two boards and a server")[2].partition("\n## ")[0]
    found = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    if len(found) != 5:
        raise UserError("docs/fleet.md: the section about two boards has other commands than this script knows")
    return found


def make_photos(place: Path, names: tuple[str, ...], seed: int) -> None:
    """Write 24 made-up photos of each class."""
    rng = np.random.default_rng(seed)
    for name in names:
        colour = 60 + 60 * ("cat", "dog", "fox").index(name)
        (place / name).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(colour - 50, colour + 50, (96, 96, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")


def try_page(place: Path, rounds: int) -> None:
    """Follow the page. Raises `UserError` for the first thing that does not hold."""
    certificates, keys, serve, join, afterwards = commands()
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("link", "set", "bridge", "up")
    server = Machine(place / "server", 10)
    boards = {name: Machine(place / name, 11 + number) for number, name in enumerate(BOARDS)}
    try:
        server.run(certificates)
        (server.folder / "keys").mkdir()
        for number, (name, board) in enumerate(boards.items()):
            shutil.copy(server.folder / "certificates" / "ca.crt", board.folder)
            (board.folder / ".ssh").mkdir()
            board.run(keys)
            shutil.copy(board.folder / ".ssh" / "fleet_key.pub", server.folder / "keys" / f"{name}.pub")
            make_photos(board.folder / "photos", BOARDS[name], number)
        serving = server.start(f"{serve.rstrip()} --rounds {rounds} --weights none", "serve.log")
        joined = {name: board.start(join, "join.log") for name, board in boards.items()}
        said = server.wait(serving, serve, "serve.log")
        for name, process in joined.items():
            boards[name].wait(process, join, "join.log")
            best = boards[name].folder / "logs" / "boards" / "kitchen" / "best.keras"  # by --name, not by the key
            if f"board {name}: " not in said or not best.is_file():
                raise UserError(f"docs/fleet.md: board {name} has no model, or another name:\n{said}")
        print(said[said.index("round 0") :], flush=True)
        make_photos(server.folder / "photos", ("cat", "dog", "fox"), 9)
        evaluate, tensorboard = afterwards.strip().splitlines()
        print(server.run(evaluate)[-800:])
        server.start(f"{tensorboard} --port 6006", "tensorboard.log")
        server.run("until curl -sf http://127.0.0.1:6006 >/dev/null; do sleep 1; done")
        print("docs/fleet.md holds")
    finally:
        for machine in (server, *boards.values()):
            machine.stop()


def main() -> None:
    parser = OneLineParser(prog="try_fleet_page.py", description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=folder, metavar="DIR", help="gets a folder for each machine, anew")
    parser.add_argument("--rounds", type=whole_number(1, 100), default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UserError(f"try_fleet_page.py: {', '.join(missing)}: not installed here")
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-rnpf", "--mount-proc", "--kill-child", sys.executable, *sys.argv])
    for name in ("server", *BOARDS):
        shutil.rmtree(args.output / name, ignore_errors=True)
    try_page(args.output.absolute(), args.rounds)


if __name__ == "__main__":
    utils.run_cli(main)
