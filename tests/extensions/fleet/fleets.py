"""Small fleets in one process, and processes of real ones."""

import csv
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from conftest import BATCH, CLASSES, SIZE, make_small_model, make_table

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import DecodedImages
from elastic_trainer.extensions.fleet.board import Board, sent_names
from elastic_trainer.extensions.fleet.messages import Parcel
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Roster
from elastic_trainer.extensions.fleet.rounds import BoardSetup, RoundClock
from elastic_trainer.extensions.fleet.server import FleetServer
from elastic_trainer.extensions.fleet.settings import FleetSettings
from elastic_trainer.extensions.fleet.simulated import LocalLink
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
NAMES = ["board-1", "board-2", "board-3"]
CLASS_NAMES = [str(k) for k in range(CLASSES)]


def photos(count=24, seed=0, classes=range(CLASSES)):
    """Noise around a colour for each class: uint8 [count, size, size, 3], and labels."""
    rng = np.random.default_rng(seed)
    labels = np.resize([*classes], count).astype(np.int32)
    images = rng.integers(0, 60, (count, SIZE, SIZE, 3)) + 60 * labels[:, None, None, None]
    return DecodedImages(images.astype(np.uint8), labels, [])


def data(seed=0, classes=range(CLASSES), count=24):
    return ImageData("small", CLASS_NAMES, photos(count, seed, classes), photos(12, 99), BATCH, seed)


def make_setup(photos=None):
    """Steps really take a few ms; the table's times decide what is selected at first."""
    model = make_small_model()
    settings = Settings(weight_decay=0.0, gradient_clipping=0.02)
    return BoardSetup(model, photos or data(), make_table(model, constant_ms=1.0), settings)


def make_board(place, slowdown=1.0, **of_data):
    """A board that trains the small network on its photos."""
    clock = RoundClock(slowdown)
    return Board(NAMES[place], lambda words, names: make_setup(data(place, **of_data)), clock, say=lambda line: None)


def hello(board):
    """Get a board ready for the network of a server; its reply, the server's network, and its weights."""
    model = make_small_model(seed=1)
    arrays = {name: model.variables[int(name.removeprefix("model/"))].numpy() for name in sent_names(model)}
    return board.handle(Parcel("hello", {"words": [], "class_names": CLASS_NAMES}, arrays)), model, arrays


def make_server(folder, link, said, data_of_server=None, rate=1e-4, **settings):
    """A server of two rounds, with its records in `folder`."""
    model = make_small_model(seed=1)
    records = Records(folder, {"train_type": "elastic_training_upper_part"}, tensor_names(model))
    chosen = FleetSettings(**{"rounds": 2, "round_seconds": 0.3, "grace": 60.0, **settings})
    roster, strategy = Roster(link, said.append), None
    if "strategy" in settings:
        from elastic_trainer.extensions.fleet.strategy import strategy_of

        strategy = strategy_of(chosen.strategy, chosen.strategy_args)
    hello = {"words": [], "class_names": CLASS_NAMES}
    return FleetServer(roster, model, chosen, rate, hello, records, data_of_server, strategy)


def local(boards):
    """A link to boards in this process."""
    return LocalLink({place + 1: board.handle for place, board in enumerate(boards)})


def free_port():
    """A port of this machine on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def rows(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


class Process:
    """A program in its own process group, whose lines are read as they come."""

    def __init__(self, *words, **environment):
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            start_new_session=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, text, seconds=90):
        wait_until(lambda: any(text in line for line in self.lines), seconds, lambda: f"no '{text}' in {self.lines}")

    def kill(self, signal_number=signal.SIGKILL):
        """End it and all that it has started at once, as a power cut does."""
        os.killpg(self.process.pid, signal_number)
        self.process.wait()


def wait_until(is_done, seconds, why=lambda: ""):
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, why()
        time.sleep(0.1)
