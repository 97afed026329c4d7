"""The Flower app of a fleet as users of Flower run it: `flwr run`, `flwr log`, `flwr stop`, and the simulation."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleets import ROOT, Process, free_port, rows, wait_until

pytest.importorskip(
    "flwr", reason="Flower is not installed here; ./scripts/run_fleet.sh --tests runs this in .venv-fleet"
)

APP = ROOT / "elastic_trainer" / "extensions" / "fleet" / "app"

NETWORK = '''"""A small network."""
import keras


def small(input_shape, classes):
    inputs = keras.Input(input_shape)
    hidden = keras.layers.Dense(64, activation="relu", name="hidden")(keras.layers.Flatten()(inputs / 16.0))
    return keras.Model(inputs, keras.layers.Dense(classes, name="classes")(hidden))
'''


class Flower:
    """A SuperLink, and what its users call."""

    def __init__(self, folder, *options):
        bin_folder = Path(sys.executable).parent
        self.folder, self.port, self.processes = folder, free_port(), list[Process]()
        self.environment = {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "home").mkdir()
        (folder / "network.py").write_text(NETWORK)
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        here = ("--insecure", "--host", "127.0.0.1", "--port", self.port)
        self.start("flower-superlink", *here, "--disable-runtime-dependency-installation", *options).wait_for("running")

    def start(self, program, *words):
        process = Process(Path(sys.executable).with_name(program), *words, **self.environment)
        self.processes.append(process)
        return process

    def join(self, name, place):
        """Start a SuperNode, which has one of two parts of the photos."""
        config = f'name="{name}" partition-id={place} num-partitions=2 logdir="{self.folder}"'
        here = ("--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", free_port())
        self.start("flower-supernode", *here, "--node-config", config)

    def flwr(self, *words):
        flwr = Path(sys.executable).with_name("flwr")
        environment = {**os.environ, **self.environment}
        done = subprocess.run([flwr, *words], env=environment, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    def run(self, config, *words):
        """Run the app; its number, and the folder of its run."""
        network = f'model_name="{self.folder}/network.py:small" input_size=8 weights="none" logdir="{self.folder}"'
        output = self.flwr("run", APP, "x", "--run-config", f"{network} {config}", *words)
        number = re.search(r"started run (\d+)", output)
        assert number is not None, output
        return number[1], self.folder / f"flower_{number[1]}"

    def wait_until_done(self, number, folder, seconds):
        wait_until((folder / "summary.json").is_file, seconds, lambda: self.log(number))

    def log(self, number):
        return self.flwr("log", number, "x", "--show")


@pytest.fixture
def flower(tmp_path):
    """Starts a SuperLink with these options; all is stopped at the end."""
    started = []

    def start(*options):
        started.append(Flower(tmp_path, *options))
        return started[-1]

    yield start
    for one in started:
        for process in one.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill(signal.SIGTERM)


def test_flwr_runs_logs_and_stops_the_app_with_a_strategy_of_flower(flower):
    """Of one board Flower starts a process for each message, so its memory is what its context keeps; the other is
    `fleet.py join`."""
    link = flower()
    link.join("kitchen", 0)
    own = ("--superlink", f"127.0.0.1:{link.port}", "--name", "shed", "--logdir", link.folder)
    shed = Process(ROOT / "fleet.py", "join", *own, "--model_name", f"{link.folder}/network.py:small")
    link.processes.append(shed)
    number, folder = link.run('rounds=1 round_seconds="2" strategy="FedAvg"')
    link.wait_until_done(number, folder, 400)
    found = rows(folder / "metrics.csv")
    assert [row["boards"] for row in found] == ["2", "2"] and float(found[0]["test_accuracy"]) > 0.6
    boards = rows(folder / "boards.csv")
    assert {row["board"] for row in boards} == {"kitchen", "shed"}
    assert all(float(row["train_seconds"]) <= 2.5 and int(row["steps"]) > 1 for row in boards)
    assert "round 1 of 1: accuracy" in link.log(number)
    shed.wait_for("the fleet has finished", 60)
    number, folder = link.run("rounds=100000 boards=1")
    wait_until((folder / "config.json").is_file, 60)
    link.flwr("stop", number, "x")
    wait_until(lambda: "stopped" in link.flwr("list", "x", "--format", "json"), 60)
    server = ["pgrep", "-f", f"flwr-serverapp.*127.0.0.1:{link.port}"]
    wait_until(lambda: subprocess.run(server, check=False, capture_output=True).returncode == 1, 60)


def test_a_wrong_configuration_of_a_run_is_named(flower):
    link = flower()
    number, _ = link.run("rounds=0")
    wait_until(lambda: "UserError: --run-config: --rounds: must be a whole number" in link.log(number), 60)


def test_flowers_simulation_trains_boards_in_actors(flower):
    pytest.importorskip("ray", reason="Flower's simulation needs ray: pip install 'flwr[simulation]'")
    link = flower("--simulation")
    resources = "num-supernodes=6 client-resources-num-cpus=1 init-args-num-cpus=2"
    number, folder = link.run('rounds=1 round_seconds="0.5" slowest=3.0', "--federation-config", resources)
    link.wait_until_done(number, folder, 200)
    boards = rows(folder / "boards.csv")
    assert {row["board"] for row in boards} == {f"board-{place}" for place in range(6)}
    steps = {row["board"]: int(row["steps"]) for row in boards}
    assert steps["board-0"] > 1.5 * steps["board-5"], "which is three times slower"
