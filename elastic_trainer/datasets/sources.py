"""Finds a data set by the name that `--dataset_name` takes, a key of `registry.DATASETS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.registry import DATASETS


class DataSource(NamedTuple):
    """The images of both splits, not yet read; a label is an index into `class_names`."""

    class_names: Sequence[str]
    train: ImageFiles
    test: ImageFiles


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
