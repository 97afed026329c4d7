"""Folders of the user's own photos, one folder for each class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.datasets.image_data import DataSource
from elastic_trainer.datasets.images import KINDS, Encoded, wrong_start
from elastic_trainer.datasets.sources import SPLIT_SEED
from utils import UserError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")  # whose content must be an image


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the system refuses in this block becomes a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--data_dir {path}: cannot be read: {error.strerror or error}") from error


def image_folder(data_dir: Path | None) -> Path:
    """`data_dir`, which must be a folder. Raises `UserError`."""
    layout = "train/<class>/ and test/<class>/, or with <class>/ alone"
    if data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {layout}")
    with _reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with {layout}")
    return data_dir


def _class_folders(folder: Path) -> list[str]:
    with _reading(folder):
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _train_folder(folder: Path) -> Path:
    """Where the classes of an image folder lie: in train/, or in the folder itself."""
    with _reading(folder):
        return folder / "train" if (folder / "train").is_dir() else folder


def train_classes(folder: Path) -> list[str]:
    """Names of the classes of an image folder, in the order of their labels."""
    train = _train_folder(folder)
    classes = _class_folders(train)
    if not classes:
        raise UserError(f"--data_dir {train}: holds no folders; it needs one for each class")
    if len(classes) == 1:
        raise UserError(f"--data_dir {train}: has one class only, '{classes[0]}'; there must be two to tell apart")
    return classes


def read_image_folder(folder: Path, skip_broken: bool, test_fraction: float | None) -> DataSource:
    train_folder, classes = _train_folder(folder), train_classes(folder)
    with _reading(folder):
        held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if train_folder == folder and held_out is not None:
        raise UserError(f"--data_dir {folder}: has '{held_out.name}' but no 'train' with one folder for each class")
    if held_out is None and test_fraction is None:
        raise UserError(
            f"--data_dir {folder}: has neither 'test' nor 'val' with one folder for each class; give "
            "--test_fraction 0.2 to test on a fifth of each class"
        )
    if held_out is not None and test_fraction is not None:
        raise UserError(f"--test_fraction {test_fraction:g}: {folder} has its own '{held_out.name}'; leave it out")
    if held_out is not None:
        unknown = sorted(set(_class_folders(held_out)) - set(classes))
        if unknown:
            names = ", ".join(f"'{name}'" for name in unknown[:5]) + (", …" if len(unknown) > 5 else "")
            raise UserError(f"--data_dir {held_out}: {_counted(names, unknown)} not among those of {train_folder}")
    found = [_image_files(place, classes) for place in (train_folder, held_out) if place is not None]
    broken = [f"{path}: {why}" for files, wrong in found for path, why in wrong.items()]
    if broken and not skip_broken:
        raise broken_images(broken, f"{len(broken)} of {sum(len(files) for files, _ in found)} images")
    train, test = [files for files, _ in found] if held_out else _apart(found[0][0], len(classes), test_fraction or 0)
    train_labels, test_labels = ([label for _, label in files] for files in (train, test))
    check_classes(classes, train_labels, test_labels, folder)
    return DataSource(
        classes, *(Encoded(len(files), partial(iter, files), [path for path, _ in files]) for files in (train, test))
    )


def broken_images(broken: Sequence[str], count: str) -> UserError:
    more = f" ({count} are broken)" if len(broken) > 1 else ""
    return UserError(f"{broken[0]}{more}; mend or remove it, or leave out what is broken with --skip_broken")


def _counted(names: str, items: Sequence[str]) -> str:
    return f"class {names} is" if len(items) == 1 else f"classes {names} are"


def printable(text: str) -> str:
    """`text` in letters that every terminal takes; a file's name may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def _image_files(folder: Path, classes: Sequence[str]) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Images in the class folders of `folder`, and those that cannot be any.

    Content decides, so a file without an ending can be an image. One that is none is broken if its name says that it is
    an image, and else passed over, which is said. Names that begin with a dot are not looked at: macOS leaves such
    files beside each photo.

    Returns:
        Paths with their labels, broken ones among them; and broken paths with what is wrong.
    """
    images: list[tuple[str, int]] = []
    broken: dict[str, str] = {}
    others: Counter[str] = Counter()
    for label, name in enumerate(classes):
        with _reading(folder / name):
            entries = os.scandir(folder / name) if (folder / name).is_dir() else ()
            paths = sorted(entry.path for entry in entries if not entry.name.startswith(".") and not entry.is_dir())
        for path in paths:
            why, ending = wrong_start(path), Path(path).suffix.lower()
            if why is not None and ending not in IMAGE_ENDINGS:
                others[ending] += 1
                continue
            images.append((path, label))
            if why is not None:
                broken[path] = why
    if others:
        kinds = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in others.most_common(5))
        print(f"passed over in {folder}, being no {KINDS}: {printable(kinds)}")
    return images, broken


def _apart(files: list[tuple[str, int]], classes: int, fraction: float) -> tuple[list[Any], list[Any]]:
    """`files` for training and for testing: of each class `fraction` for the test, one at least if it has two."""
    rng = np.random.default_rng(SPLIT_SEED)
    tested: set[str] = set()
    for label in range(classes):
        own = [path for path, of in files if of == label]
        count = min(max(round(fraction * len(own)), 1), len(own) - 1)
        tested.update(own[k] for k in rng.permutation(len(own))[: max(count, 0)])
    return [file for file in files if file[0] not in tested], [file for file in files if file[0] in tested]


def check_classes(
    classes: Sequence[str],
    train_labels: Sequence[int] | np.ndarray,
    test_labels: Sequence[int] | np.ndarray,
    folder: Path | None,
) -> None:
    """Refuse a class without training images, and warn of one without test images."""
    for what, labels in (("training", train_labels), ("test", test_labels)):
        if not len(labels):
            raise UserError(f"--data_dir {folder}: holds no {what} images ({KINDS}) in its class folders")
    for what, labels in (("training", train_labels), ("test", test_labels)):
        counts = np.bincount(labels, minlength=len(classes))
        empty = [f"'{name}'" for name, count in zip(classes, counts, strict=True) if not count]
        if empty:
            shown = f"{', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
            without = f"no {what} images of {'class' if len(empty) == 1 else f'{len(empty)} classes'}: {shown}"
            if what == "training":
                raise UserError(
                    f"--data_dir {folder}: has {without}, which cannot be learned so; give some or remove the folder"
                )
            print(f"warning: {folder} has {without}; accuracy will not tell how well that is learned")
