"""Runs the command lines as a user does: as processes."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import keras

import data
from elastic_trainer.cli.commands import parse_training
from main import train_run

ROOT = Path(__file__).resolve().parents[1]


# A network small enough to profile in seconds; the demo runs the same commands on the default network.
NETWORK = ["--dataset_name", "digits", "--model_name", f"{ROOT}/tests/zoo.py:branches", "--input_size", "16"]
NETWORK += ["--batch_size", "64"]


def command(script, *arguments):
    """Run a script of the project; returns the finished process with its output as text."""
    words = [sys.executable, ROOT / script, *map(str, arguments)]
    # The variable may be set where the tests run; in a user's shell it is not.
    environment = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)


def error_line(script, *arguments):
    """The one line that a refused command prints on stderr."""
    done = command(script, *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"{Path(script).name}: error: ")
    return lines[0]


def run_data(*words):
    """Run a command of data.py in this process."""
    data.main([*map(str, words)])


def run_here(main, script, *words):
    """Run the function `main` of a script in this process, where TensorFlow is imported already."""
    keras.utils.clear_session()  # layers are numbered as in a new process
    with mock.patch("sys.argv", [script, *map(str, words)]):
        main()


def train_here(*words):
    """Train by the flags of main.py in this process; a deadline counts from now."""
    keras.utils.clear_session()
    train_run(parse_training([*map(str, words)]))


OFTEN = ROOT / "scripts" / "benchmarks" / "often.py"  # main.py with other minutes between checkpoints


def start_training(*arguments):
    """Start main.py on the small network, with a checkpoint after each step; returns the running process."""
    words = [sys.executable, OFTEN, 0, *NETWORK, *arguments]
    return subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
