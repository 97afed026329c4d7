"""Stop requests: a signal ends a run with a checkpoint, a second one ends the process."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from typing import Any

import keras
import pytest
from command_line import NETWORK, OFTEN, ROOT, start_training

from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.system.errors import Stopped

FLAGS = ["--batch_size", 16, "--micro_batch", 4, "--num_epochs", 2, "--rho", 0.6, "--interval", 0.5]
FLAGS += ["--deterministic", "--save_model"]


def test_a_run_that_is_stopped_and_killed_ends_with_the_weights_of_an_unbroken_one(tmp_path):
    """It selects twice an epoch and trains in parts of a batch. A signal prints the command that continues it."""
    unbroken = start_training(*FLAGS, "--logdir", tmp_path, "--run_name", "unbroken")
    _, errors = unbroken.communicate(timeout=300)
    assert unbroken.returncode == 0, errors
    mine, step = tmp_path / "mine", 0
    process = start_training(*FLAGS, "--logdir", tmp_path, "--run_name", "mine")
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGINT, 130)):
        wait_for_step(step + 20, mine, process)  # a selection later
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        if number != signal.SIGKILL:
            last = errors.strip().splitlines()[-1]
            assert last.partition(": ")[2].startswith("stopped after step ") and "Traceback" not in errors
            assert not list(mine.rglob(".*"))
            words = [sys.executable, ROOT / "main.py", *last.split("python main.py ")[1].split()]
        step = max(checkpoints(mine))
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads((mine / "summary.json").read_text())["steps"] == 2 * 56
    assert weights_of(mine) == weights_of(tmp_path / "unbroken")


def wait_for_step(step, folder, process):
    """Wait until the run in `folder` has saved this step or a later one."""
    while max(checkpoints(folder), default=0) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_run_whose_terminal_is_lost_keeps_a_checkpoint_and_its_best_model_and_under_nohup_goes_on(tmp_path):
    """As over ssh: the connection ends, the kernel sends SIGHUP, and writing to the terminal is an error."""
    master, terminal = pty.openpty()
    flags = [*NETWORK, *FLAGS, "--num_epochs", 100, "--logdir", tmp_path, "--run_name"]
    words = [sys.executable, OFTEN, 0, *flags, "lost"]
    more: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    more["preexec_fn"] = lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    lost = subprocess.Popen([*map(str, words)], **more, start_new_session=True)
    words = ["nohup", sys.executable, OFTEN, 0, *flags, "nohup"]
    printed = tmp_path / "printed"  # a pipe that nobody reads would fill up
    kept = subprocess.Popen([*map(str, words)], stdout=printed.open("w"), stderr=subprocess.STDOUT)
    os.close(terminal)
    wait_for_step(5, tmp_path / "lost", lost)
    os.close(master)
    assert lost.wait(60) == 129
    assert checkpoints(tmp_path / "lost") and (tmp_path / "lost" / "best.keras").is_file()
    wait_for_step(5, tmp_path / "nohup", kept)
    kept.send_signal(signal.SIGHUP)
    wait_for_step(max(checkpoints(tmp_path / "nohup")) + 5, tmp_path / "nohup", kept)
    kept.send_signal(signal.SIGQUIT)
    assert kept.wait(60) == 131 and "Traceback" not in printed.read_text()
    assert (tmp_path / "nohup" / "best.keras").is_file()


def checkpoints(folder):
    """The steps of a run's checkpoints."""
    return [int(path.stem.removeprefix("step-")) for path in folder.glob("checkpoints/step-*.npz")]


def weights_of(folder):
    """All weights of last.keras, as bytes."""

    model = keras.models.load_model(folder / "last.keras")
    return [variable.numpy().tobytes() for variable in model.variables]


def handlers():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return [wakeup, *map(signal.getsignal, StopSignals.NUMBERS)]


@pytest.mark.parametrize("number", StopSignals.NUMBERS)
def test_each_signal_that_ends_a_program_requests_a_stop(number, request):
    given = signal.signal(number, signal.SIG_DFL)  # under nohup, these tests ignore SIGHUP
    request.addfinalizer(lambda: signal.signal(number, given))
    before = handlers()
    with StopSignals() as stop:
        stop.check()
        signal.raise_signal(number)
        while stop.number is None:
            time.sleep(0.01)
        with pytest.raises(Stopped) as stopped:
            stop.check()
        assert stopped.value.number == number
        if number == signal.SIGHUP:  # the shell passes it on, and then the kernel sends it
            time.sleep(1.2)
            signal.raise_signal(number)
            time.sleep(0.2)
    assert handlers() == before


def test_second_signal_exits_at_once():
    program = """
import os, signal, time
from elastic_trainer.runs.stop_signals import StopSignals
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 5
    while stop.number is None and time.monotonic() < end:
        time.sleep(0.01)
    assert stop.number == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)  # at the same moment: one request that was sent twice
    time.sleep(1.5)
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 130 and time.monotonic() - float(done.stdout) < 15
    assert b"\nstopping after this step; send SIGTERM again to quit now\n" in done.stderr
