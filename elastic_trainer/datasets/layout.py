"""What the folders of the user's photos are for: which hold the classes of which part, and which are classes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from elastic_trainer.system import files
from elastic_trainer.system.errors import UserError, first_few, printable

TRAIN, VALIDATION, TEST = "train", ("val", "valid", "validation"), "test"
_WANTED = "train/<class>/ and test/<class>/, or with <class>/ alone"


class Layout(NamedTuple):
    """The folders in `folder` that hold the class folders of each part; None: there is none.

    `train` is `folder` itself if it is not divided. `notes` are lines for the user on what may not be as it seems.
    """

    folder: Path
    train: Path | None
    validation: Path | None = None
    test: Path | None = None
    notes: Sequence[str] = ()

    @property
    def tested(self) -> list[Path]:
        """The folders that choose and test the best model, in this order; none if a share of the images does."""
        return [place for place in (self.validation, self.test) if place is not None]

    def training(self) -> tuple[Path, list[str]]:
        """The folder that holds the class folders for training, and the names of its classes by label.

        Raises `UserError` if there is no such folder, or if there are fewer than two classes.
        """
        if self.train is None:
            other = (self.test or self.tested[0]).name
            raise UserError(f"--data_dir {self.folder}: has '{other}' but no 'train' with one folder for each class")
        classes = [*class_folders(self.train)]
        if not classes:
            raise UserError(f"--data_dir {self.train}: contains no folders; it needs one for each class")
        if len(classes) == 1:
            raise UserError(f"--data_dir {self.train}: has only one class, '{classes[0]}'; at least two are needed")
        return self.train, classes


def layout(data_dir: Path | None) -> Layout:
    """What the folders in `data_dir` are for.

    They are parts if one is called train, or if one with the name of a part holds folders. A folder with such a name
    that holds only files is a class, unless there is another part. Raises `UserError` if `data_dir` is not given or no
    folder, or has two folders for validation.
    """
    if data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {_WANTED}")
    with reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with {_WANTED}")
    others = {path.name: path for paths in class_folders(data_dir).values() for path in paths}
    parts = {name: others.pop(name) for name in (TRAIN, *VALIDATION, TEST) if name in others}
    holds_folders = any(class_folders(path) for path in parts.values())
    if not holds_folders and (TRAIN not in parts or (len(parts) == 1 and _has_files(parts[TRAIN]))):
        notes = [f"{path}: has no folders in it, so it is read as a class" for path in parts.values()]
        return Layout(data_dir, data_dir, notes=notes)
    validation = [name for name in VALIDATION if name in parts]
    if len(validation) > 1:
        raise UserError(f"--data_dir {data_dir}: has '{validation[0]}' and '{validation[1]}'; keep one of them")
    note = f"not read, since '{next(iter(parts))}' in {data_dir} is no class: {first_few(sorted(others))} beside it"
    chooses = parts[validation[0]] if validation else None
    return Layout(data_dir, parts.get(TRAIN), chooses, parts.get(TEST), [note] if others else [])


def folder_classes(data_dir: Path | None) -> list[str]:
    """Names of the classes of an image folder. Raises `UserError` as `layout` and `Layout.training`."""
    return layout(data_dir).training()[1]


def class_name(folder_name: str) -> str:
    """The class of a folder, in one line; whether é is one character or two, as from a Mac, makes no difference."""
    return printable(unicodedata.normalize("NFC", folder_name))


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The folders of each class in `folder`, in the order of the labels."""
    with reading(folder):
        paths = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: (unicodedata.normalize("NFC", path.name), path.name)):
        found.setdefault(class_name(path.name), []).append(path)
    return found


def check_known(folder: Path, classes: Sequence[str], whose: str) -> None:
    """Raise `UserError` if `folder` has a class folder of another class; `whose`: says which the classes are."""
    unknown = [f"'{name}'" for name in class_folders(folder) if name not in classes]
    if unknown:
        are = f"class {unknown[0]} is" if len(unknown) == 1 else f"classes {first_few(unknown)} are"
        raise UserError(f"--data_dir {folder}: {are} not among those of {whose}")


def reading(path: Path) -> AbstractContextManager[None]:
    """What cannot be read in this block becomes a `UserError` that names `path` and its flag."""
    return files.reading(f"--data_dir {path}")


def _has_files(folder: Path) -> bool:
    with reading(folder):
        return any(path.is_file() and not path.name.startswith(".") for path in folder.iterdir())
