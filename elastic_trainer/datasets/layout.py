"""What the folders of the user's photos are for: which hold the classes of which part, and which are classes."""

from __future__ import annotations

import unicodedata
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from elastic_trainer import files
from elastic_trainer.errors import UserError, printable

TRAIN, VALIDATION, TEST = "train", ("val", "valid", "validation"), "test"


class Layout(NamedTuple):
    """The folders that hold the class folders of each part; None: there is none.

    Attributes:
        train: the whole folder if it is not divided into parts.
        notes: lines for the user on what may not be as it seems.
    """

    train: Path | None
    validation: Path | None = None
    test: Path | None = None
    notes: tuple[str, ...] = ()


def reading(path: Path) -> AbstractContextManager[None]:
    """What cannot be read in this block becomes a `UserError` that names `path` and its flag."""
    return files.reading(f"--data_dir {path}")


def image_folder(data_dir: Path | None) -> Path:
    """`data_dir`, checked.

    Raises:
        UserError: it is not given, or not a folder.
    """
    wanted = "train/<class>/ and test/<class>/, or with <class>/ alone"
    if data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {wanted}")
    with reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with {wanted}")
    return data_dir


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


def layout(folder: Path) -> Layout:
    """What the folders in `folder` are for.

    They are parts if one is called train, or if one with the name of a part holds folders. A folder with such a name
    that holds only files, and has no other part beside it, is a class.

    Raises:
        UserError: there are two folders for validation.
    """
    beside = {path.name: path for paths in class_folders(folder).values() for path in paths}
    parts = {name: beside.pop(name) for name in (TRAIN, *VALIDATION, TEST) if name in beside}
    holds_folders = any(class_folders(path) for path in parts.values())
    if not holds_folders and (TRAIN not in parts or (len(parts) == 1 and _has_files(parts[TRAIN]))):
        notes = [f"{path}: has no folders in it, so it is read as a class" for path in parts.values()]
        return Layout(folder, notes=tuple(map(printable, notes)))
    validation = [parts[name] for name in VALIDATION if name in parts]
    if len(validation) > 1:
        raise UserError(f"--data_dir {folder}: has '{validation[0].name}' and '{validation[1].name}'; keep one of them")
    names = ", ".join(sorted(beside)[:5]) + (", …" if len(beside) > 5 else "")
    notes = [f"not read, since '{next(iter(parts))}' in {folder} is no class: {names} beside it"] if beside else []
    return Layout(parts.get(TRAIN), next(iter(validation), None), parts.get(TEST), tuple(map(printable, notes)))


def _has_files(folder: Path) -> bool:
    with reading(folder):
        return any(path.is_file() for path in folder.iterdir() if not path.name.startswith("."))


def train_folder(folder: Path, places: Layout) -> Path:
    """The folder that holds the class folders for training. Raises `UserError` if other parts are there alone."""
    if places.train is None:
        other = places.test or places.validation
        assert other is not None, "there is one of them"
        raise UserError(f"--data_dir {folder}: has '{other.name}' but no 'train' with one folder for each class")
    return places.train


def train_classes(train: Path) -> list[str]:
    """Names of the classes in the folder for training, in the order of their labels.

    Raises:
        UserError: there are fewer than two.
    """
    classes = [*class_folders(train)]
    if not classes:
        raise UserError(f"--data_dir {train}: contains no folders; it needs one for each class")
    if len(classes) == 1:
        raise UserError(f"--data_dir {train}: has only one class, '{classes[0]}'; at least two are needed")
    return classes


def folder_classes(data_dir: Path | None) -> list[str]:
    """Names of the classes of an image folder. Raises `UserError` as `image_folder` and `train_classes`."""
    folder = image_folder(data_dir)
    return train_classes(train_folder(folder, layout(folder)))


def check_known(folder: Path, classes: list[str], whose: str) -> None:
    """Raise `UserError` if `folder` has a class folder of another class; `whose`: says which the classes are."""
    unknown = [f"'{name}'" for name in class_folders(folder) if name not in classes]
    if unknown:
        names = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
        are = f"class {names} is" if len(unknown) == 1 else f"classes {names} are"
        raise UserError(f"--data_dir {folder}: {are} not among those of {whose}")
