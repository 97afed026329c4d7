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


def layout(data_dir: Path | None) -> tuple[dict[str, Path], list[str]]:
    """What the folders in `data_dir` are for: the folder of each part, and notes on what may not be as it seems.

    They are parts if one with the name of a part holds folders, or if there is a train and another. Otherwise, a folder
    with such a name is a class, and `data_dir` itself trains. Raises `UserError` if `data_dir` is not given or no
    folder, or has two folders for a part.
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
        return {TRAIN: data_dir}, [f"without folders in it, read as a class: {classes}"] if named else []
    for paths in found.values():
        if len(paths) > 1:
            raise UserError(f"--data_dir {data_dir}: has '{paths[0].name}' and '{paths[1].name}'; keep one of them")
    note = f"not read, since '{named[0].name}' in {data_dir} is no class: {first_few(others)}"
    return {part: found[part][0] for part in _SPELLINGS if part in found}, [note] if others else []


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
    places, notes = layout(data_dir)
    others = [places[part] for part in (VALIDATION, TEST) if part in places]
    if TRAIN not in places:
        raise UserError(f"--data_dir {data_dir}: has '{others[-1].name}' but no 'train' with one folder for each class")
    train, classes = places[TRAIN], [*class_folders(places[TRAIN])]
    if not classes:
        raise UserError(f"--data_dir {train}: contains no folders; it needs one for each class")
    if len(classes) == 1:
        raise UserError(f"--data_dir {train}: has only one class, '{classes[0]}'; at least two are needed")
    images = _images(train, classes, str(train), notes)
    if not others:
        return DataSource(classes, images, NO_IMAGES, test_fraction or TEST_FRACTION, notes=notes)
    chooses, *tests = others
    if test_fraction is not None:
        raise UserError(f"--test_fraction {test_fraction:g}: {data_dir} has its own '{chooses.name}'; leave it out")
    chosen = _images(chooses, classes, str(train), notes)
    later = _images(tests[0], classes, str(train), notes).count if tests else 0
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
    places, notes = layout(data_dir)
    own = places.get(TEST) or places.get(VALIDATION)
    if own is None and not has_record:
        note = (
            "there is no record of what the model was trained on: those images are tested that a run would not train "
            f"on; to test all, move them to a folder {places[TRAIN] / 'test'}"
        )
        return read_image_folder(data_dir, test_fraction)._replace(only_tests=True, notes=[note])
    place, known = own or places[TRAIN], next(iter(places.values()))
    classes = [*(class_names or class_folders(known))]
    whose = f"the model ({first_few(classes, 10)}); rename or remove it" if class_names else str(known)
    images = _images(place, classes, whose, notes)
    notes = [f"tested in {place}: {images.count} images", *notes]
    return DataSource(classes, NO_IMAGES, images, only_tests=True, notes=notes)


def _images(folder: Path, classes: Sequence[str], whose: str, notes: list[str]) -> ImageFiles:
    """The files in the class folders of `folder`; adds a line to `notes` on the folders in these, if there are any.

    Names that start with a dot are skipped: macOS puts such a file beside each photo. Raises `UserError` if there is a
    folder of another class; `whose` says which the classes are.
    """
    of_class = class_folders(folder)
    unknown = [f"'{name}'" for name in of_class if name not in classes]
    if unknown:
        are = f"class {unknown[0]} is" if len(unknown) == 1 else f"classes {first_few(unknown)} are"
        raise UserError(printable(f"--data_dir {folder}: {are} not among those of {whose}"))
    found, ignored = list[tuple[str, int]](), list[str]()
    for label, place in ((label, place) for label, name in enumerate(classes) for place in of_class.get(name, ())):
        with _reading(place):
            for path in sorted(entry.path for entry in os.scandir(place) if entry.name[0] != "."):
                if Path(path).is_dir():
                    ignored.append(path)
                else:
                    found.append((path, label))
    if ignored:
        inside = f"within those of classes, such as {ignored[0]}; move the images up to use them"
        notes.append(f"ignored: {len(ignored)} folder(s) {inside}")
    return ImageFiles(len(found), partial(iter, found))


def _reading(path: Path) -> AbstractContextManager[None]:
    """What cannot be read in this block becomes a `UserError` that names `path` and its flag."""
    return files.reading(f"--data_dir {path}")
