"""Stop requests: a signal ends a run with a checkpoint, a second one ends the process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
from command_line import ROOT, start_training

from elastic_trainer.runs.stop_signals import StopSignals


def test_signals_stop_a_run_with_a_checkpoint_and_print_the_command_that_continues_it(tmp_path):
    flags = ["--logdir", tmp_path, "--deterministic", "--num_epochs", "2", "--save_model"]
    mine = tmp_path / "mine"
    seen: set[Path] = set()
    process = start_training(*flags, "--run_name", "mine", "--checkpoint_minutes", "0.005")
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        while not {*mine.glob("checkpoints/step-*")} - seen:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        last = errors.strip().splitlines()[-1]
        assert last.startswith("main.py: stopped after step ") and "Traceback" not in errors
        assert not list(mine.rglob(".*"))
        seen = {*mine.glob("checkpoints/step-*")}
        words = [sys.executable, ROOT / "main.py", *last.split("python main.py ")[1].split()]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads((mine / "summary.json").read_text())["steps"] == 2 * 224
    uninterrupted = start_training(*flags, "--run_name", "uninterrupted")
    uninterrupted.communicate(timeout=300)
    assert uninterrupted.returncode == 0
    assert weights_of(mine) == weights_of(tmp_path / "uninterrupted")


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
