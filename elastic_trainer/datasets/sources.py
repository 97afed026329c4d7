"""Where the images of each data set come from: digits, tensorflow-datasets, image folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from elastic_trainer.datasets.image_data import DataSource
from elastic_trainer.datasets.image_folder import image_folder, read_image_folder, train_classes
from elastic_trainer.datasets.images import Encoded
from elastic_trainer.datasets.names import TFDS_NAMES
from elastic_trainer.datasets.tfds import read_tfds, tfds_builder

# One fixed split: runs with different seeds stay comparable, and weights of one never saw the test images of another.
SPLIT_SEED = 0


def count_classes(name: str, data_dir: Path | None) -> int:
    """Number of classes of a data set, without loading it. Raises `UserError` as `load`."""
    if name == "digits":
        return 10
    if name in TFDS_NAMES:
        return tfds_builder(name, data_dir).info.features["label"].num_classes
    return len(train_classes(image_folder(data_dir)))


def find(
    name: str, data_dir: Path | None = None, skip_broken: bool = False, test_fraction: float | None = None
) -> DataSource:
    """What `load` would read, with the same arguments and errors."""
    if name == "digits":
        return _digits()
    if name in TFDS_NAMES:
        return read_tfds(name, data_dir)
    return read_image_folder(image_folder(data_dir), skip_broken, test_fraction)


def _digits() -> DataSource:
    """The 1,797 handwritten digits (8×8 grey) in scikit-learn's wheel, half for training, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.repeat(np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    parts = train_test_split(images, digits.target, test_size=0.5, stratify=digits.target, random_state=SPLIT_SEED)
    train, test = (
        Encoded(len(labels), partial(zip, pixels, labels.tolist(), strict=True))
        for pixels, labels in ((parts[0], parts[2]), (parts[1], parts[3]))
    )
    return DataSource([str(digit) for digit in range(10)], train, test)
