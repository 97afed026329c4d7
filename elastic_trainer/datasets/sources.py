"""Finds a data set by the name that `--dataset_name` takes. A new data set is added here and in names.py.

digits (digits.py), data sets of tensorflow-datasets (tfds.py; the paper's three are among them), and folders of the
user's photos (image_folder.py).
"""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.datasets.data_source import DataSource
from elastic_trainer.datasets.digits import read_digits
from elastic_trainer.datasets.image_folder import image_folder, read_image_folder, train_classes
from elastic_trainer.datasets.names import TFDS_NAMES
from elastic_trainer.datasets.tfds import read_tfds, tfds_builder


def count_classes(name: str, data_dir: Path | None) -> int:
    """Number of classes of a data set, without reading its images.

    Raises:
        UserError: see `find`.
    """
    if name == "digits":
        return 10
    if name in TFDS_NAMES:
        return tfds_builder(name, data_dir).info.features["label"].num_classes
    return len(train_classes(image_folder(data_dir)))


def find(
    name: str, data_dir: Path | None = None, skip_broken: bool = False, test_fraction: float | None = None
) -> DataSource:
    """The images of a data set, not yet read. Downloads it if it is one of tensorflow-datasets and not there.

    Args:
        name, data_dir, skip_broken, test_fraction: as `data.load` takes them.

    Raises:
        UserError: the data set is missing or cannot be downloaded, or the folder does not have the required layout.
    """
    if name == "digits":
        return read_digits()
    if name in TFDS_NAMES:
        return read_tfds(name, data_dir)
    return read_image_folder(image_folder(data_dir), skip_broken, test_fraction)
