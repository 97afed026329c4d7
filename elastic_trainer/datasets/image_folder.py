"""Folders of the user's photos: which of them train, choose the best model, and test; and the photos of each class.

Without folders for that, the content of each photo decides whether it is for testing. Whether a file is a photo is
decided by its content, too, when it is read.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from elastic_trainer.datasets.images import NO_IMAGES, ImageFiles
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.system import files
from elastic_trainer.system.errors import UserError, first_few, printable

TEST_FRACTION = 0.2  # about this share of the images is for testing, unless another one is given
TRAIN, VALIDATION, TEST = "training", "validation", "test"
# As people spell them, whatever the case; such as train_set or test-images, too.
_SPELLINGS = {TRAIN: "train(ing)?", VALIDATION: "val(id(ation|ate)?)?|dev", TEST: "test(ing)?"}
_ENDINGS = "([ _-]?(set|data|images|photos))?"
_WANTED = "train/<class>/ and test/<class>/, or with <class>/ alone"


class Layout(NamedTuple):
    """The folder of each part, by `TRAIN`, `VALIDATION` and `TEST`; `TRAIN` is `folder` itself if it is not divided.

    `note` is a line for the user on what may not be as it seems, or "".
    """

    folder: Path
    places: dict[str, Path]
    note: str = ""

    def training(self) -> tuple[Path, list[str]]:
        """The folder that holds the class folders for training, and the names of its classes by label.

        Raises `UserError` if there is no such folder, or if there are fewer than two classes.
        """
        place = self.places.get(TRAIN)
        if place is None:
            other = next(iter(self.places.values())).name
            raise UserError(f"--data_dir {self.folder}: has '{other}' but no 'train' with one folder for each class")
        classes = [*class_folders(place)]
        if not classes:
            raise UserError(f"--data_dir {place}: contains no folders; it needs one for each class")
        if len(classes) == 1:
            raise UserError(f"--data_dir {place}: has only one class, '{classes[0]}'; at least two are needed")
        return place, classes


def layout(data_dir: Path | None) -> Layout:
    """What the folders in `data_dir` are for.

    They are parts if one with the name of a part holds folders, or if there is a train and another. Otherwise, a folder
    with such a name is a class. Raises `UserError` if `data_dir` is not given or no folder, or has two folders for a
    part.
    """
    if data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {_WANTED}")
    with _reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with {_WANTED}")
    found: dict[str, list[Path]] = {}
    others = list[str]()
    for path in (path for paths in class_folders(data_dir).values() for path in paths):
        words = path.name.casefold()
        part = next((part for part, spelt in _SPELLINGS.items() if re.fullmatch(f"({spelt}){_ENDINGS}", words)), None)
        if part is None:
            others.append(path.name)
        else:
            found.setdefault(part, []).append(path)
    named = [path for part in _SPELLINGS for path in found.get(part, ())]
    if not any(class_folders(path) for path in named) and (TRAIN not in found or len(found) == 1):
        classes = ", ".join(f"'{path.name}'" for path in named)
        return Layout(
            data_dir, {TRAIN: data_dir}, f"without folders in it, read as a class: {classes}" if named else ""
        )
    for paths in found.values():
        if len(paths) > 1:
            raise UserError(f"--data_dir {data_dir}: has '{paths[0].name}' and '{paths[1].name}'; keep one of them")
    note = f"not read, since '{named[0].name}' in {data_dir} is no class: {first_few(others)}"
    return Layout(data_dir, {part: paths[0] for part, paths in found.items()}, note if others else "")


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The folders of each class in `folder`, in the order of the labels.

    Whether é is one character or two, as from a Mac, makes no difference; names are UTF-8 in any locale.
    """
    with _reading(folder):
        paths = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    names = [os.fsencode(path.name).decode("utf-8", "surrogateescape") for path in paths]
    found: dict[str, list[Path]] = {}
    for name, path in sorted(zip((unicodedata.normalize("NFC", name) for name in names), paths, strict=True)):
        found.setdefault(printable(name), []).append(path)
    return found


def read_image_folder(data_dir: Path | None, test_fraction: float | None) -> DataSource:
    """The photos to train on and to choose the best model by, and what else a user has to know.

    `test_fraction` is the share of the photos to test on if there are no folders for that; None: `TEST_FRACTION`.
    Raises `UserError` if the layout is wrong.
    """
    there = layout(data_dir)
    train, classes = there.training()
    others = {part: there.places[part] for part in (VALIDATION, TEST) if part in there.places}
    for place in others.values():
        _check_known(place, classes, str(train))
    notes = [there.note] if there.note else []
    images, ignored = _images(train, classes)
    notes += ignored
    if not others:
        return DataSource(classes, images, NO_IMAGES, test_fraction or TEST_FRACTION, notes=notes)
    chooses, *tests = others.values()
    if test_fraction is not None:
        raise UserError(f"--test_fraction {test_fraction:g}: {there.folder} has its own '{chooses.name}'; leave it out")
    chosen, ignored = _images(chooses, classes)
    notes += ignored
    later = _images(tests[0], classes)[0].count if tests else 0
    if tests and not later:
        raise UserError(f"--data_dir {tests[0]}: has no photos in its class folders; add some or remove it")
    ends = f", {tests[0]} is reported once at the end" if tests else " and tests it"
    notes.append(f"{train} trains, {chooses} chooses the best model{ends}")
    return DataSource(classes, images, chosen, tested_later=later, notes=notes)


def read_to_test(
    data_dir: Path | None, test_fraction: float | None, class_names: Sequence[str] | None, has_record: bool
) -> DataSource:
    """The photos to test a model on: those in a folder for testing, else for validation, else all.

    Without a record of what the model was trained on, not all but those that a run would test on. `class_names` are
    those of the model, in the order of its outputs; None: the classes are those of the folder. Raises `UserError` if
    the folder has other classes.
    """
    there = layout(data_dir)
    own = there.places.get(TEST) or there.places.get(VALIDATION)
    if own is None and not has_record:
        note = (
            "there is no record of what the model was trained on: those images are tested that a run would not train "
            f"on; to test all, move them to a folder {there.folder / 'test'}"
        )
        return read_image_folder(data_dir, test_fraction)._replace(only_tests=True, notes=[note])
    place, known = own or there.places[TRAIN], there.places.get(TRAIN) or there.places.get(VALIDATION) or own
    assert known is not None, "a layout has one place at least"
    classes = [*(class_names or class_folders(known))]
    whose = f"the model ({first_few(classes, 10)}); rename or remove it" if class_names else str(known)
    _check_known(place, classes, printable(whose))
    images, ignored = _images(place, classes)
    return DataSource(
        classes, NO_IMAGES, images, only_tests=True, notes=[f"tested in {place}: {images.count} images", *ignored]
    )


def _check_known(folder: Path, classes: Sequence[str], whose: str) -> None:
    """Raise `UserError` if `folder` has a class folder of another class; `whose`: says which the classes are."""
    unknown = [f"'{name}'" for name in class_folders(folder) if name not in classes]
    if unknown:
        are = f"class {unknown[0]} is" if len(unknown) == 1 else f"classes {first_few(unknown)} are"
        raise UserError(f"--data_dir {folder}: {are} not among those of {whose}")


def _images(folder: Path, classes: Sequence[str]) -> tuple[ImageFiles, list[str]]:
    """The files in the class folders of `folder`, and a line on the folders in these, if there are any.

    Names that start with a dot are skipped: macOS puts such a file beside each photo.
    """
    found, ignored = list[tuple[str, int]](), list[str]()
    of_class = class_folders(folder)
    for label, place in ((label, place) for label, name in enumerate(classes) for place in of_class.get(name, ())):
        with _reading(place):
            for path in sorted(entry.path for entry in os.scandir(place) if entry.name[0] != "."):
                if Path(path).is_dir():
                    ignored.append(path)
                else:
                    found.append((path, label))
    line = f"ignored: {len(ignored)} folder(s) within those of classes, such as {ignored[0]}" if ignored else ""
    return ImageFiles(len(found), partial(iter, found)), [f"{line}; move the images up to use them"] if line else []


def _reading(path: Path) -> AbstractContextManager[None]:
    """What cannot be read in this block becomes a `UserError` that names `path` and its flag."""
    return files.reading(f"--data_dir {path}")
