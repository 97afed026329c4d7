"""docs/fleet.md word by word on a server and two boards, and a stranger who has the CA certificate.

The machines are network namespaces of this one, where those may be made; else they share the loopback.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed here; ./scripts/run_fleet.sh --tests runs this")
keras = pytest.importorskip("keras")

ROOT = Path(__file__).parents[3]
HAS_NAMESPACES = subprocess.run("unshare -n ip link", shell=True, check=False, capture_output=True).returncode == 0
SERVER, BOARDS = "192.168.1.10" if HAS_NAMESPACES else "127.0.0.1", {"kitchen": ("cat", "dog"), "hall": ("dog", "fox")}
CHANGES = {  # of the page, since nothing can be downloaded, and to be quick
    "192.168.1.10": SERVER,
    "weights='imagenet' image-size=96 rounds=20": "weights='' image-size=32 rounds=3 timeout=90.0 batch-size=8",
    "seconds=20.0": "seconds=0.5",
}


def commands():
    """The blocks of the section about many machines."""
    section = (ROOT / "docs/fleet.md").read_text(encoding="utf-8").split("## On many machines")[1].split("\n## ")[0]
    found = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    for old, new in CHANGES.items():
        assert old in "".join(found), f"docs/fleet.md has changed: {old}"
        found = [block.replace(old, new) for block in found]
    return found


class Machine:
    """A folder with this checkout, and a network namespace; `number` is the last of its address."""

    def __init__(self, folder, number):
        self.folder, self.number, self.processes, self.prefix = folder, number, [], []
        folder.mkdir()
        for path in ROOT.iterdir():
            if path.name not in ("logs", ".git"):
                (folder / path.name).symlink_to(path)
        if HAS_NAMESPACES:
            keeper = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
            self.processes.append(keeper)
            self.prefix = ["nsenter", "-n", "-t", str(keeper.pid)]
            own, new = (Path(f"/proc/{pid}/ns/net") for pid in ("self", keeper.pid))
            while new.readlink() == own.readlink():
                time.sleep(0.05)

    def start(self, command, log="log.txt"):
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                [*self.prefix, "bash", "-euo", "pipefail", "-c", command],
                cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder), "FLWR_HOME": str(self.folder / ".flwr")},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(self, command, seconds=120):
        """The exit status of a command here, and what it prints."""
        (self.folder / "command.txt").unlink(missing_ok=True)
        status = self.start(command, "command.txt").wait(seconds)
        return status, (self.folder / "command.txt").read_text()

    def said(self, text, seconds, log="log.txt"):
        """Wait until a program here has printed `text`."""
        end = time.monotonic() + seconds
        while text not in (self.folder / log).read_text(errors="replace"):
            assert time.monotonic() < end, (text, (self.folder / log).read_text(errors="replace")[-3000:])
            time.sleep(0.2)

    def stop(self, kill=signal.SIGTERM):
        for process in reversed(self.processes):
            if process.poll() is None:
                os.killpg(process.pid, kill) if os.getpgid(process.pid) == process.pid else process.kill()
        for process in self.processes:
            process.wait(20)
        self.processes.clear()


@pytest.fixture
def machines(tmp_path):
    """The server, two boards and a stranger."""
    found = {name: Machine(tmp_path / name, 10 + k) for k, name in enumerate(("server", *BOARDS, "stranger"))}
    if HAS_NAMESPACES:  # the server has a bridge to which the others are linked
        server = found["server"]
        for machine in [*found.values()][1:]:
            words = f"link add eth0 netns {machine.prefix[-1]} type veth peer name port{machine.number} netns"
            subprocess.run(["ip", *words.split(), server.prefix[-1]], check=True)
            machine.run(f"ip link set lo up; ip addr add 192.168.1.{machine.number}/24 dev eth0; ip link set eth0 up")
        ports = "; ".join(f"ip link set port{k} master bridge up" for k in (11, 12, 13))
        # Without an address of its own, it has that of a port, and loses it with the machine of that.
        bridge = "ip link add bridge address 02:00:00:00:00:01 type bridge; ip link set bridge up"
        bridge += f"; ip addr add {SERVER}/24 dev bridge"
        status, text = server.run(f"ip link set lo up; {bridge}; {ports}")
        assert status == 0, text
    yield found
    for machine in found.values():
        machine.stop()


def make_photos(folder, classes, seed):
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        level = 60 + 60 * ("cat", "dog", "fox").index(name)
        for number in range(24):
            keras.utils.save_img(folder / name / f"{number}.png", rng.integers(level - 50, level + 50, (40, 40, 3)))


def test_the_page_holds_and_a_stranger_gets_nothing(machines):
    certificates, superlink, key, register, supernode, run = commands()
    server, stranger, boards = machines["server"], machines["stranger"], {name: machines[name] for name in BOARDS}
    assert server.run(certificates)[0] == 0
    (server.folder / "keys").mkdir()
    for number, (name, board) in enumerate({**boards, "stranger": stranger}.items()):
        shutil.copy(server.folder / "certificates/ca.crt", board.folder)
        assert board.run(key)[0] == 0
        make_photos(board.folder / "photos", BOARDS.get(name, ("cat", "dog")), number)
        if board is not stranger:
            shutil.copy(board.folder / "fleet_key.pub", server.folder / f"keys/{name}.pub")
    server.start(superlink)
    server.said("running", 60)
    status, text = server.run(register)
    assert status == 0, text
    for number, board in enumerate((*boards.values(), stranger)):
        own_port = "" if HAS_NAMESPACES else f" --port {8200 + number}"
        board.start(supernode.rstrip() + own_port)

    running = server.start(f"export PATH=$PWD/.venv-fleet/bin:$PATH FLWR_TELEMETRY_ENABLED=0; {run}", "run.txt")
    server.said("[ROUND 2/3]", 400, "run.txt")
    boards["hall"].stop(signal.SIGKILL)
    running.wait(400)
    log = (server.folder / "run.txt").read_text()
    assert "the best model of 3 rounds" in log and "is left out" in log, log[-3000:]
    [folder] = (server.folder / "logs/fleet").glob("run_*")
    assert {path.name for path in folder.iterdir()} == {"model.keras", "rounds.csv", "accuracy.png"}
    rows = (folder / "rounds.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in (rows[1], rows[2], rows[-1])] == ["2", "2", "1"]

    stranger.said("Failed to activate SuperNode", 10)
    assert "ElasticTraining" not in (stranger.folder / "log.txt").read_text(), "no message has reached the stranger"
    config = f'[superlink.fleet]\\naddress = "{SERVER}:PORT"\\nroot-certificates = "{stranger.folder}/ca.crt"\\n'
    for port in (9092, 9093) if HAS_NAMESPACES else (9092,):
        shutil.rmtree(stranger.folder / ".flwr", ignore_errors=True)
        stranger.run(f"mkdir -p .flwr; printf '{config.replace('PORT', str(port))}' > .flwr/config.toml")
        for words in ("ls fleet", "run examples/fleet fleet", "supernode register fleet_key.pub fleet"):
            status, text = stranger.run(f"export PATH=$PWD/.venv-fleet/bin:$PATH; timeout 20 flwr {words}")
            assert status != 0, (port, words, text)
