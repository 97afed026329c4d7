"""What goes wrong in a fleet, with real connections on this machine: a round ends, the model is whole,
and one line says what happened. The boards are made up (`made_up_board`), so that they start without TensorFlow."""

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import make_small_data
from fleets import ROOT, Process, free_port, make_server, wait_until

pytest.importorskip(
    "flwr", reason="Flower is not installed here; ./scripts/run_fleet.sh --tests runs this in .venv-fleet"
)

import httpx

from elastic_trainer.extensions.fleet.settings import FleetSettings
from elastic_trainer.extensions.fleet.superlink import superlink

HERE = Path(__file__).resolve().parent
NETWORK = '''"""A small network."""
import sys
sys.path.insert(0, {tests!r})
from conftest import make_small_model


def small(input_shape, classes):
    return make_small_model()
'''


@pytest.fixture
def fleet():
    """A port, a function that starts made-up boards there, and a list of processes; what is left of them is stopped."""
    port = free_port()
    started: list[Process] = []

    def start(name, does="good", *more):
        words = ("--superlink", f"127.0.0.1:{port}", "--name", name, "--does", does)
        started.append(Process(HERE / "made_up_board.py", *words, *more))
        return started[-1]

    yield port, start, started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def run_server(folder, port, said, **settings):
    """A server of a small network, which it has changed as the good boards ask."""
    wanted = FleetSettings(port=port, **{"grace": 8.0, "rounds": 2, "round_seconds": 1.0, **settings})
    with superlink(wanted, folder, said.append) as link:
        server = make_server(folder, link, said, make_small_data(), **vars(wanted))
        before = dict(server.weights)
        server.run()
        server.say_goodbye()
        return before, server.weights, [row["boards"] for row in server.records.rounds]


def is_whole(weights):
    return all(np.isfinite(weight).all() for weight in weights.values())


def test_replies_that_do_not_fit_are_dropped_and_the_others_count(fleet, tmp_path):
    port, start, _ = fleet
    said: list[str] = []
    for name, does in (("good", "good"), ("a", "nan"), ("b", "shape"), ("c", "foreign"), ("d", "huge"), ("e", "alien")):
        start(name, does)
    before, after, boards = run_server(tmp_path / "run", port, said, boards=6, grace=40.0)
    for name, why in (
        ("a", "not finite"),
        ("b", "has the shape"),
        ("c", "no tensor model/9999"),
        ("d", "more than 10"),
    ):
        [line] = [line for line in said if f"board {name} is dropped" in line]
        assert line.startswith("round 1: the reply of") and why in line
    assert any(line.startswith("round 1: board e: its reply cannot be read: ") for line in said), said
    assert boards[:2] == [0, 1] and boards[2] >= 5 and is_whole(after)  # the last one has to get ready again
    trained = [name for name, weight in before.items() if (weight != after[name]).any()]
    for name in trained:  # each round adds a hundredth; the best model is kept, which may be that of an earlier round
        ratio = (after[name] / before[name])[before[name] != 0]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


def test_late_killed_and_returning_boards_do_not_stop_a_round(fleet, tmp_path):
    port, start, _ = fleet
    said: list[str] = []
    lost = start("lost", "hangs")
    start("good")
    start("late", "late")
    start("half", "half")  # breaks down while it replies

    def replace_lost():
        lost.wait_for("round 1")
        lost.kill()
        start("lost")

    thread = threading.Thread(target=replace_lost)
    thread.start()
    _, after, boards = run_server(tmp_path / "run", port, said, boards=4, rounds=5)
    thread.join()
    assert is_whole(after)
    for name in ("late", "half"):
        assert f"round 1: board {name} did not answer within 9 s; going on without it" in said
    gone = "round 1: board lost did not answer within 9 s; going on without it", "board lost has started again"
    assert any(line in said for line in gone), said  # which comes first depends on how fast it starts again
    assert any("board late: its answer to round 1 came too late and is dropped" in line for line in said), said
    assert "board lost has started again" in said
    assert boards[1] == 1 and boards[-1] == 3, (boards, said)


def test_a_killed_server_goes_on_and_a_second_one_is_refused(fleet, tmp_path):
    port, start, started = fleet
    network = tmp_path / "network.py"
    network.write_text(NETWORK.format(tests=str(ROOT / "tests")))
    words = ["serve", "--model_name", f"{network}:small", "--class_names", "0,1,2", "--input_size", "8", "--port", port]
    words += ["--boards", "2", "--rounds", "4", "--round_seconds", "1", "--logdir", tmp_path, "--run_name", "run"]
    words += ["--weights", "none"]
    start("a")
    start("b")
    server = Process(ROOT / "fleet.py", *words)
    started.append(server)
    server.wait_for("round 2 of 4")  # boards test the model of round 2 in round 3
    second = Process(ROOT / "fleet.py", *words)
    assert second.process.wait(60) == 2
    wait_until(lambda: second.lines, 5)
    [line] = second.lines
    assert line.startswith(f"fleet.py: error: --port {port}: cannot listen at 127.0.0.1:{port}")
    server.kill()
    again = Process(ROOT / "fleet.py", "serve", "--resume", tmp_path / "run")
    started.append(again)
    assert again.process.wait(150) == 0, again.lines
    again.wait_for("going on after round", 1)
    again.wait_for("round 4 of 4", 1)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", "0", "1", "2", "3", "4"]
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "run" / "best.keras").is_file()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """What docs/fleet.md makes, twice: `mine` and `other`, each with certificates/ and the key `key`."""
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs openssl and ssh-keygen")
    commands = re.findall(r"^(?:openssl|ssh-keygen) .*(?:\\\n.*)*", (ROOT / "docs" / "fleet.md").read_text(), re.M)
    assert len(commands) == 4
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("mine", "other"):
        script = "\n".join(commands).replace("192.168.1.10", "127.0.0.1").replace("~/.ssh/fleet_key", "key")
        (folder / name / "certificates").mkdir(parents=True)
        subprocess.run(["bash", "-ec", script], cwd=folder / name, check=True, capture_output=True)
    (folder / "keys").mkdir()
    shutil.copy(folder / "mine" / "key.pub", folder / "keys" / "kitchen.pub")
    return folder


def test_only_boards_with_a_known_key_take_part_under_its_name(fleet, certificates, tmp_path):
    port, start, _ = fleet
    said: list[str] = []
    (mine, other), keys = (certificates / name for name in ("mine", "other")), certificates / "keys"
    trusted = ("--root_certificates", mine / "certificates" / "ca.crt")
    start("good", "good", *trusted, "--private_key", mine / "key")
    outside = {
        "does not know this key": start("stranger", "good", *trusted, "--private_key", other / "key"),
        "--private_key none": start("keyless", "good", *trusted),
        "does not vouch for the server": start("a", "good", "--root_certificates", other / "certificates" / "ca.crt"),
        "the server uses TLS": start("plain"),
    }
    settings = {"certificates": mine / "certificates", "node_keys": keys, "boards": 1, "rounds": 1, "grace": 30.0}
    _, after, boards = run_server(tmp_path / "run", port, said, **settings)
    assert boards == [0, 1] and is_whole(after)
    assert any(line.startswith("board kitchen: 30 photos") for line in said), said  # not "good", as it says itself
    for why, process in outside.items():
        process.wait_for(why, 30)
        assert process.process.wait(30) != 0
    assert "127.0.0.1 was refused: its key is not among those in --node_keys" in said


def test_a_killed_board_with_a_key_is_taken_back_at_once(fleet, certificates, tmp_path):
    """Flower knows it as online for a minute, and would refuse it as long."""
    port, start, _ = fleet
    mine = certificates / "mine"
    wanted = FleetSettings(port=port, certificates=mine / "certificates", node_keys=certificates / "keys")
    words = ("good", "--root_certificates", mine / "certificates" / "ca.crt", "--private_key", mine / "key")
    with superlink(wanted, tmp_path) as link:
        board = start("a", *words)
        wait_until(link.nodes, 30)
        [before] = link.nodes().values()
        board.kill()
        start("a", *words)
        wait_until(lambda: [*link.nodes().values()] != [before], 30)
        [after] = link.nodes().values()
    assert (before[0], after[0]) == ("kitchen", "kitchen")


def test_a_stranger_with_the_servers_certificate_reaches_nothing_but_fleet(certificates, tmp_path):
    port, said = free_port(), list[str]()
    folder = certificates / "mine" / "certificates"
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder / "ca.crt"}"\n'
    )
    wanted = FleetSettings(port=port, certificates=folder, node_keys=certificates / "keys")
    app = ROOT / "elastic_trainer" / "extensions" / "fleet" / "app"
    tries = [["supernode", "register", certificates / "other" / "key.pub", "x"], ["run", app, "x"], ["list", "x"]]
    flwr, environment = Path(sys.executable).with_name("flwr"), {**os.environ, "FLWR_HOME": str(tmp_path)}
    with superlink(wanted, tmp_path, said.append) as link:
        for words in tries:
            done = subprocess.run([flwr, *words], env=environment, check=False, capture_output=True, text=True)
            assert done.returncode != 0 and "404" in done.stdout + done.stderr, done
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        for path in (
            "/v1/runtime/acquire-task",
            "/v1/fleet/%2e%2e/control/list-runs",
            "/v1/fleet/..%2fcontrol/x",
            "/docs",
        ):
            found = httpx.post(f"https://127.0.0.1:{port}{path}", verify=context)
            assert found.status_code == 404, path
        too_long = httpx.post(f"https://127.0.0.1:{port}/v1/fleet/push-object", verify=context, content=bytes(17 << 20))
        assert too_long.status_code == 413
        assert link.nodes() == {}
    assert said[1] == "127.0.0.1 was refused: asked for something that is not for boards" and len(said) == 3
