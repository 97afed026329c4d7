"""Reads a folder of the user's photos, with one subfolder per class.

Two layouts: train/<class>/ beside test/<class>/ (or val/<class>/), or <class>/ alone, of which `TEST_FRACTION` or
another share is for testing. Whether a file is an image is decided by its content, not by its extension. Broken images
are found before training starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from elastic_trainer import files
from elastic_trainer.datasets.decoding import KINDS, content, digest, header_error
from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.errors import UserError, printable

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")  # a file with one of these must be an image

TEST_FRACTION = 0.2  # about this share of the images is for testing, unless another one is given

LabelledPaths = list[tuple[str, int]]


def reading(path: Path) -> AbstractContextManager[None]:
    """What cannot be read in this block becomes a `UserError` that names `path` and its flag."""
    return files.reading(f"--data_dir {path}")


def image_folder(data_dir: Path | None) -> Path:
    """`data_dir`, checked.

    Raises:
        UserError: it is not given, or not a folder.
    """
    layout = "train/<class>/ and test/<class>/, or with <class>/ alone"
    if data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {layout}")
    with reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with {layout}")
    return data_dir


def _class_folders(folder: Path) -> list[str]:
    with reading(folder):
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _train_folder(folder: Path) -> Path:
    """The folder that holds the class folders for training: train/ if there is one, else `folder` itself."""
    with reading(folder):
        return folder / "train" if (folder / "train").is_dir() else folder


def train_classes(folder: Path) -> list[str]:
    """Names of the classes of an image folder, in the order of their labels.

    Raises:
        UserError: there are fewer than two.
    """
    train = _train_folder(folder)
    classes = _class_folders(train)
    if not classes:
        raise UserError(f"--data_dir {train}: contains no folders; it needs one for each class")
    if len(classes) == 1:
        raise UserError(f"--data_dir {train}: has only one class, '{classes[0]}'; at least two are needed")
    return classes


def count_training_images(data_dir: Path | None, test_fraction: float | None = None) -> int:
    """About how many images there are to train on, by the number of files. Errors as `folder_classes`."""
    folder = image_folder(data_dir)
    train = _train_folder(folder)
    with reading(train):
        count = sum(1 for name in train_classes(folder) for _ in os.scandir(train / name))
    return count if train != folder else int((1 - (test_fraction or TEST_FRACTION)) * count)


def folder_classes(data_dir: Path | None) -> list[str]:
    """Names of the classes of an image folder, each in one line, as in labels.txt.

    Raises:
        UserError: as `image_folder` and `train_classes`.
    """
    return [printable(name) for name in train_classes(image_folder(data_dir))]


def read_image_folder(data_dir: Path | None, skip_broken: bool, test_fraction: float | None) -> DataSource:
    """List the images of an image folder and check their headers.

    Args:
        data_dir: the folder, with one of the layouts above.
        skip_broken: do not refuse broken images; `images.read` leaves them out later.
        test_fraction: share of the images to test on if there is no test/ or val/; None: `TEST_FRACTION`.

    Raises:
        UserError: the layout is wrong, a class has no training images, a split has no images, or an image is broken.
    """
    folder = image_folder(data_dir)
    train_folder, classes = _train_folder(folder), train_classes(folder)
    test_folder = _test_folder(folder, train_folder, test_fraction)
    if test_folder is not None:
        unknown = sorted(set(_class_folders(test_folder)) - set(classes))
        if unknown:
            names = ", ".join(f"'{name}'" for name in unknown[:5]) + (", …" if len(unknown) > 5 else "")
            are = f"class {names} is" if len(unknown) == 1 else f"classes {names} are"
            raise UserError(f"--data_dir {test_folder}: {are} not among those of {train_folder}")
    found = [_image_files(place, classes) for place in (train_folder, test_folder) if place is not None]
    broken = [f"{path}: {why}" for _, wrong in found for path, why in wrong.items()]
    if broken and not skip_broken:
        raise broken_images(broken, f"{len(broken)} of {sum(len(images) for images, _ in found)} images")
    if test_folder is None:
        train, test = _split_by_content(*found[0], test_fraction or TEST_FRACTION)
    else:
        train, test = (images for images, _ in found)
    train_labels, test_labels = ([label for _, label in images] for images in (train, test))
    shown = folder_classes(folder)
    check_classes(shown, train_labels, test_labels, folder)
    sources = (ImageFiles(len(part), partial(iter, part), [path for path, _ in part]) for part in (train, test))
    return DataSource(shown, *sources)


def _test_folder(folder: Path, train_folder: Path, test_fraction: float | None) -> Path | None:
    """test/ or val/; None if there is none. Raises `UserError` if `test_fraction` is given as well."""
    with reading(folder):
        test_folder = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if train_folder == folder and test_folder is not None:
        raise UserError(f"--data_dir {folder}: has '{test_folder.name}' but no 'train' with one folder for each class")
    if test_folder is not None and test_fraction is not None:
        raise UserError(f"--test_fraction {test_fraction:g}: {folder} has its own '{test_folder.name}'; leave it out")
    return test_folder


def broken_images(broken: Sequence[str], count: str) -> UserError:
    """The error for broken images: names the first one and says what to do.

    Args:
        broken: one line on each.
        count: "3 of 50 images".
    """
    more = f" ({count} are broken)" if len(broken) > 1 else ""
    return UserError(f"{broken[0]}{more}; replace or remove it, or leave out broken images with --skip_broken")


def _image_files(folder: Path, classes: Sequence[str]) -> tuple[LabelledPaths, dict[str, str]]:
    """The images in the class folders of `folder`.

    A file that is not an image is broken if its name has the extension of one. Otherwise it is ignored, as are folders
    in the folder of a class; a message gives their number. Names that start with a dot are skipped: macOS puts such a
    file beside each photo.

    Returns:
        Paths with labels, including broken images; and for the path of each broken image, what is wrong.
    """
    images: LabelledPaths = []
    broken: dict[str, str] = {}
    others: Counter[str] = Counter()
    folders: list[str] = []
    for label, name in enumerate(classes):
        with reading(folder / name):
            entries = os.scandir(folder / name) if (folder / name).is_dir() else ()
            visible = sorted((entry.path, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
        folders += [path for path, is_folder in visible if is_folder]
        for path in (path for path, is_folder in visible if not is_folder):
            why, extension = header_error(path), Path(path).suffix.lower()
            if why is not None and extension not in IMAGE_EXTENSIONS:
                others[extension] += 1
                continue
            images.append((path, label))
            if why is not None:
                broken[path] = why
    if others:
        kinds = ", ".join(f"{count} {extension or 'without extension'}" for extension, count in others.most_common(5))
        print(printable(f"ignored in {folder}, not {KINDS}: {kinds}"))
    if folders:
        count = f"{len(folders)} folder{'s' if len(folders) > 1 else ''}"
        print(
            printable(f"ignored: {count} within those of classes, such as {folders[0]}; move the images up to use them")
        )
    return images, broken


def _split_by_content(
    images: LabelledPaths, broken: Collection[str], fraction: float
) -> tuple[LabelledPaths, LabelledPaths]:
    """Split images for training and testing by digests of their content.

    A digest is an even draw from 0 to 2^64, and those below `fraction` of that are for testing. So an image stays where
    it is whatever is added, removed, renamed or copied, and copies of an image stay together. Only in a class that
    would be left without test images, its smallest digest is tested nevertheless; in one that would be left without
    training images, the largest trains.

    Args:
        images: to split.
        broken: paths of those that cannot be read; they count as training images.
        fraction: share of the images that are for testing, approximately.
    """
    intact = [image for image in images if image[0] not in broken]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(_digest_of, (path for path, _ in intact))
        digests = [*tqdm(found, total=len(intact), desc="splitting images", unit="image", leave=False)]
    tested = {number for number in digests if number < fraction * 2**64}
    of_class: dict[int, set[int]] = {}
    for (_, label), number in zip(intact, digests, strict=True):
        of_class.setdefault(label, set()).add(number)
    for numbers in of_class.values():
        if numbers.isdisjoint(tested):
            tested.add(min(numbers))
        if numbers <= tested:
            tested.remove(max(numbers))
    test = {image: None for image, number in zip(intact, digests, strict=True) if number in tested}
    return [image for image in images if image not in test], [*test]


def _digest_of(path: str) -> int:
    with reading(Path(path)):
        return digest(content(path))


def check_classes(
    classes: Sequence[str],
    train_labels: Sequence[int] | np.ndarray,
    test_labels: Sequence[int] | np.ndarray,
    folder: Path | None,
) -> None:
    """Print a warning if a class has no test images.

    Raises:
        UserError: a split has no images, or a class has no training images.
    """
    for what, labels in (("training", train_labels), ("test", test_labels)):
        if not len(labels):
            raise UserError(f"--data_dir {folder}: has no {what} images ({KINDS}) in its class folders")
    for what, labels in (("training", train_labels), ("test", test_labels)):
        counts = np.bincount(labels, minlength=len(classes))
        empty = [f"'{name}'" for name, count in zip(classes, counts, strict=True) if not count]
        if empty:
            shown = f"{', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
            without = f"no {what} images of {'class' if len(empty) == 1 else f'{len(empty)} classes'}: {shown}"
            if what == "training":
                raise UserError(f"--data_dir {folder}: has {without}; add some or remove the folder")
            print(f"warning: {folder} has {without}; the accuracy does not cover them")
