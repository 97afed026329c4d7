"""Folders of the user's photos as a data set (`layout`).

Without folders for that, the content of each photo decides whether it is for testing. Whether a file is a photo is
decided by its content, too, when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from elastic_trainer.datasets import layout
from elastic_trainer.datasets.images import NO_IMAGES, ImageFiles
from elastic_trainer.datasets.layout import CHOOSE, TEST, TRAIN
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError, printable
from elastic_trainer.system.files import reading

TEST_FRACTION = 0.2  # about this share of the images is for testing, unless another one is given


def read_image_folder(settings: Settings) -> DataSource:
    """The photos to train on and to choose the best model by, and what else a user has to know.

    Without folders for that, a share of the photos is to test on: `TEST_FRACTION` or another one.
    Raises `UserError` if the layout is wrong.
    """
    data_dir, test_fraction = _folder(settings), settings.test_fraction
    with reading(f"--data_dir {data_dir}"):
        parts, notes = layout.find_training_parts(data_dir)
    classes = [*_class_folders(parts[TRAIN])]
    if len(classes) < 2:
        raise UserError(f"--data_dir {parts[TRAIN]}: needs folders of at least two classes, not of {len(classes)}")
    images = {part: _images(folder, classes, notes) for part, folder in parts.items()}
    later = images[TEST].count if TEST in parts else 0
    if CHOOSE not in parts:
        return DataSource(classes, images[TRAIN], NO_IMAGES, test_fraction or TEST_FRACTION, notes=notes)
    if test_fraction is not None:
        own = parts[CHOOSE].name
        raise UserError(f"--test_fraction {test_fraction:g}: {data_dir} has its own '{own}'; leave it out")
    if TEST in parts and not later:
        raise UserError(f"--data_dir {parts[TEST]}: has no photos in its class folders; add some or remove it")
    return DataSource(classes, images[TRAIN], images[CHOOSE], tested_later=later, notes=notes)


def read_to_test(settings: Settings, class_names: Sequence[str] | None, has_record: bool) -> DataSource:
    """The photos to test a model on: those in a folder for testing, else for validation, else all.

    Without a record of what the model was trained on, not all but those that a run would test on. `class_names` are
    those of the model, in the order of its outputs; None: the classes are those of the folder. Raises `UserError` if
    the folder has other classes.
    """
    data_dir = _folder(settings)
    with reading(f"--data_dir {data_dir}"):
        parts, notes = layout.find_parts(data_dir)
    own = parts.get(TEST) or parts.get(CHOOSE)
    if own is None and not has_record:
        note = (
            "there is no record of what the model was trained on: those images are tested that a run would not train "
            f"on; to test all, move them to a folder {parts[TRAIN] / 'test'}"
        )
        return read_image_folder(settings)._replace(notes=[note])
    place = own or parts[TRAIN]
    classes = [*(class_names or _class_folders(next(iter(parts.values()))))]
    images = _images(place, classes, notes)
    notes = [f"tested in {place}: {images.count} images", *notes]
    return DataSource(classes, NO_IMAGES, images, notes=notes)


def _folder(settings: Settings) -> Path:
    if settings.data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {layout.WANTED}")
    return settings.data_dir


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    with reading(f"--data_dir {folder}"):
        return {printable(name): paths for name, paths in layout.class_folders(folder).items()}


def _images(folder: Path, classes: Sequence[str], notes: list[str]) -> ImageFiles:
    """The files in the class folders of `folder`."""
    folders = _class_folders(folder)
    with reading(f"--data_dir {folder}"):
        found = layout.find_photos(folders, classes, notes)
    return ImageFiles(len(found), partial(iter, found))
