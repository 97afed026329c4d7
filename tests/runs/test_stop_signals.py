"""Stop requests: a signal ends a run with a checkpoint, a second one ends the process."""

import json
import signal
import subprocess
import sys
import time

import keras
import pytest
from command_line import ROOT, start_training, wait_for_file

from elastic_trainer.runs.stop_signals import StopSignals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_the_run_with_a_checkpoint_and_prints_the_resume_command(number, status, tmp_path):
    flags = ["--logdir", tmp_path, "--run_name", "mine", "--deterministic", "--num_epochs", "3", "--save_model"]
    process = start_training(*flags, "--checkpoint_minutes", "0.02")
    wait_for_file("mine/checkpoints/step-*", tmp_path, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("main.py: stopped after step ") and "Traceback" not in errors
    command = last.split("python main.py ")[1].split()
    assert not list((tmp_path / "mine").rglob(".*"))
    if number == signal.SIGINT:  # the rest is the same for both signals
        return

    other = start_training(*flags, "--resume", "--learning_rate", "0.5")
    _, errors = other.communicate(timeout=120)
    assert (
        other.returncode == 2 and "was started with --learning_rate 0.002, not 0.5" in errors.strip().splitlines()[-1]
    )

    resumed = subprocess.run(
        [sys.executable, ROOT / "main.py", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["steps"] == 3 * 224
    uninterrupted = start_training(*flags[:2], "--run_name", "uninterrupted", *flags[4:])
    uninterrupted.communicate(timeout=300)
    assert uninterrupted.returncode == 0
    assert weights_of(tmp_path / "mine") == weights_of(tmp_path / "uninterrupted")

    again = start_training(*flags, "--resume")
    output, errors = again.communicate(timeout=60)
    assert again.returncode == 0 and "is finished: accuracy" in output, errors


def weights_of(folder):
    """All weights of last.keras, as bytes."""

    model = keras.models.load_model(folder / "last.keras")
    return [variable.numpy().tobytes() for variable in model.variables]


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


def test_signal_handlers_are_restored_after_the_context():
    def handlers():
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return [wakeup, *map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))]

    before = handlers()
    with StopSignals() as stop:
        assert not any(one is other for one, other in zip(handlers(), before, strict=True))
        stop.check()
    assert handlers() == before
