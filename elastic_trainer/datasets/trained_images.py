"""Which images a model was trained on, as their digests in its run's folder, so that none tests it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.files import atomic_path, reading
from elastic_trainer.settings import TRAINED_IMAGES


def trained_images(model: Path) -> np.ndarray:
    """Digests, uint64, of the images that a model was trained on; none if that is not recorded.

    Args:
        model: a file of weights, or the folder of a run; it need not exist.

    Raises:
        UserError: the record is damaged.
    """
    path = (model if model.is_dir() else model.parent) / TRAINED_IMAGES
    if not path.is_file():
        return np.zeros(0, np.uint64)
    with reading(path):
        content = path.read_bytes()
        if len(content) % 8:
            raise ValueError("is not a list of digests of 8 bytes; delete it to go on without it")
        return np.frombuffer(content, "<u8")


def write_trained_images(folder: Path, digests: np.ndarray, earlier: np.ndarray) -> None:
    """Record in the folder of a run which images its model is trained on, unless they are recorded already.

    Args:
        folder: of the run.
        digests: of its training images, uint64.
        earlier: of the images that the weights it starts from were trained on, uint64.
    """
    path = folder / TRAINED_IMAGES
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_bytes(np.union1d(digests, earlier).astype("<u8").tobytes())


def leave_out_trained(dataset: ImageData, model: Path, flag: str) -> np.ndarray:
    """Leave the images that `model` was trained on out of the test images, and print how many they are.

    Args:
        dataset: changes.
        model: see `trained_images`.
        flag: that named the model, for messages.

    Returns:
        `trained_images(model)`.

    Raises:
        UserError: no test image is left, or the record of the images is damaged.
    """
    digests = trained_images(model)
    parts = [(dataset, "test")] if dataset.held_out is None else [(dataset, "validation"), (dataset.held_out, "test")]
    for part, name in parts:
        count = part.test_count
        trained = part.leave_out_of_test(digests)
        if trained == count:
            raise UserError(
                f"{flag} {model}: was trained on all {count} {name} images; give images that it has not seen"
            )
        if trained:
            print(f"{flag} {model}: was trained on {trained} of {count} {name} images; they are left out of the test")
    return digests
