"""Small fleets in one process."""

import numpy as np
from conftest import BATCH, CLASSES, SIZE, make_small_model, make_table

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import DecodedImages
from elastic_trainer.extensions.fleet.client import Board, Made
from elastic_trainer.extensions.fleet.local import LocalLink
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Clock
from elastic_trainer.extensions.fleet.server import FleetServer
from elastic_trainer.extensions.fleet.settings import FleetSettings
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import Settings

NAMES = ["board-1", "board-2", "board-3"]


def photos(count=24, seed=0, classes=range(CLASSES)):
    """Noise around a colour for each class: uint8 [count, size, size, 3], and labels."""
    rng = np.random.default_rng(seed)
    labels = np.resize([*classes], count).astype(np.int32)
    images = rng.integers(0, 60, (count, SIZE, SIZE, 3)) + 60 * labels[:, None, None, None]
    return DecodedImages(images.astype(np.uint8), labels, [])


def data(seed=0, classes=range(CLASSES), count=24):
    return ImageData(
        "small", [str(k) for k in range(CLASSES)], photos(count, seed, classes), photos(12, 99), BATCH, seed
    )


def make_board(place, slowdown=1.0, **of_data):
    """A board that trains the small network on photos of its own."""

    def make(words, class_names):
        model = make_small_model()
        # Steps really take a few ms; the table's times decide what is selected at first.
        table = make_table(model, constant_ms=1.0)
        return Made(model, data(place, **of_data), table, Settings(weight_decay=0.0, gradient_clipping=0.02))

    return Board(NAMES[place], make, slowdown, say=lambda line: None)


def make_server(folder, link, said, data_of_server=None, rate=1e-4, clock=None, **settings):
    """A server of two rounds, with its records in `folder`."""
    model = make_small_model(seed=1)
    records = Records(folder, {"train_type": "elastic_training_upper_part"}, tensor_names(model))
    chosen = FleetSettings(**{"rounds": 2, "round_seconds": 0.3, "grace": 60.0, **settings})
    hello = {"words": [], "class_names": [str(k) for k in range(CLASSES)]}
    return FleetServer(link, model, chosen, rate, hello, records, data_of_server, said.append, clock=clock or Clock())


def local(boards):
    """A link to boards in this process."""
    return LocalLink({place + 1: board.handle for place, board in enumerate(boards)})
