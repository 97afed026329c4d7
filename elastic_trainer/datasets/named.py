"""Data sets by name, as `--dataset_name` takes it: a plain dictionary, to which other programs may add.

`find` gives the images of one, not yet read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from elastic_trainer.datasets import image_folder, sources
from elastic_trainer.datasets.images import NO_IMAGES
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.settings import Settings


@dataclass(frozen=True)
class DatasetEntry:
    """A data set of images."""

    read: Callable[[Settings], DataSource]
    class_names: Callable[[Settings], Sequence[str]]  # without reading images
    preset: str = "paper"  # its default
    flags: tuple[str, ...] = ()  # that only the data sets take which list them
    is_tfds: bool = False  # it is one of tensorflow-datasets, which can be prepared
    is_folder: bool = False  # its images are the files in `data_dir`


_TFDS = DatasetEntry(sources.read_tfds, sources.tfds_classes, flags=("data_dir",), is_tfds=True)
DATASETS: dict[str, DatasetEntry] = {
    "caltech_birds2011": _TFDS,  # the paper's data sets
    "oxford_iiit_pet": _TFDS,
    "stanford_dogs": _TFDS,
    "digits": DatasetEntry(sources.read_digits, lambda _: sources.DIGITS, "demo"),
    "image_folder": DatasetEntry(
        image_folder.read_image_folder,
        lambda settings: image_folder.read_image_folder(settings).class_names,
        "photos",
        ("data_dir", "test_fraction"),
        is_folder=True,
    ),
}


def class_names(settings: Settings) -> Sequence[str]:
    """Names of the classes of a data set, in the order of their labels, without reading its images."""
    return DATASETS[settings.dataset_name].class_names(settings)


def changed_class(now: Sequence[str], before: Sequence[str]) -> str | None:
    """How two lists of class names differ, as "class 3 'was', not 'is'"; None if they are equal."""
    pairs = enumerate(zip_longest(before, now, fillvalue="no such class"), 1)
    return next((f"class {number} '{was}', not '{is_}'" for number, (was, is_) in pairs if is_ != was), None)


def find(settings: Settings) -> DataSource:
    """The images of a data set, not yet read. Downloads it if it is one of tensorflow-datasets and not there.

    Raises `UserError` if it is missing or cannot be downloaded, or if the folder does not have the required layout.
    """
    return DATASETS[settings.dataset_name].read(settings)


def find_to_test(settings: Settings, class_names: Sequence[str] | None, has_record: bool = True) -> DataSource:
    """The images of a data set to test a model on: its test part, or what `image_folder.read_to_test` finds."""
    if DATASETS[settings.dataset_name].is_folder:
        return image_folder.read_to_test(settings, class_names, has_record)
    return find(settings)._replace(train=NO_IMAGES)
