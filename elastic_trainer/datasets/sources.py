"""Finds a data set by the name that `--dataset_name` takes, a key of `registry.DATASETS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from elastic_trainer.datasets.images import NO_IMAGES, ImageFiles
from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import DataSettings


class DataSource(NamedTuple):
    """The images of all parts, not yet read; a label is an index into `class_names`.

    Attributes:
        train: images to train on; there are none where a model is only tested.
        test: images that choose the best model, and test it unless others do.
        held_out: images that test the best model once, after training; None: there are none.
    """

    class_names: Sequence[str]
    train: ImageFiles
    test: ImageFiles
    held_out: ImageFiles | None = None

    def parts(self) -> dict[str, ImageFiles]:
        """All parts by their names: training and test, and where others test, training, validation and test."""
        if self.held_out is None:
            return {"training": self.train, "test": self.test}
        return {"training": self.train, "validation": self.test, "test": self.held_out}


def class_names(name: str, data_dir: Path | None) -> Sequence[str]:
    """Names of the classes of a data set, in the order of their labels, without reading its images.

    Raises:
        UserError: see `find`.
    """
    dataset = DATASETS[name]
    return dataset.class_names(data_dir=data_dir) if "data_dir" in dataset.uses else dataset.class_names()


def count_classes(name: str, data_dir: Path | None) -> int:
    """Number of classes of a data set; errors as `class_names`."""
    return len(class_names(name, data_dir))


def find(
    name: str, data_dir: Path | None = None, skip_broken: bool = False, test_fraction: float | None = None
) -> DataSource:
    """The images of a data set, not yet read. Downloads it if it is one of tensorflow-datasets and not there.

    Args:
        name, data_dir, skip_broken, test_fraction: as `data.load` takes them.

    Raises:
        UserError: the data set is missing or cannot be downloaded, or the folder does not have the required layout.
    """
    given = {"data_dir": data_dir, "skip_broken": skip_broken, "test_fraction": test_fraction}
    dataset = DATASETS[name]
    return dataset.read(**{flag: given[flag] for flag in dataset.uses})


def find_to_test(settings: DataSettings, class_names: Sequence[str] | None, trained: np.ndarray) -> DataSource:
    """The images of a data set to test a model on.

    Args:
        settings: name the data set.
        class_names, trained: as `image_folder.read_to_test` takes them; other data sets have a test part of their own.

    Raises:
        UserError: see `find` and `image_folder.read_to_test`.
    """
    given = (settings.data_dir, settings.skip_broken, settings.test_fraction)
    read_to_test = DATASETS[settings.dataset_name].read_to_test
    if read_to_test is not None:
        return read_to_test(*given, class_names, trained)
    return find(settings.dataset_name, *given)._replace(train=NO_IMAGES)
