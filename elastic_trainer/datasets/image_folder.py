"""Reads a folder of the user's photos, with one subfolder per class.

`layout` says which folders train, choose the best model, and test; without such folders, `TEST_FRACTION` or another
share of the images is for testing. Whether a file is an image is decided by its content, not by its extension. Broken
images are found before training starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from elastic_trainer.datasets.decoding import KINDS, content, header_error
from elastic_trainer.datasets.digests import digest, file_digest
from elastic_trainer.datasets.images import NO_IMAGES, ImageFiles
from elastic_trainer.datasets.layout import (
    check_known,
    class_folders,
    image_folder,
    layout,
    reading,
    train_classes,
    train_folder,
)
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.errors import UserError, printable

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")  # a file with one of these must be an image

TEST_FRACTION = 0.2  # about this share of the images is for testing, unless another one is given
NAMED_CLASSES = 3  # of those with few test images

LabelledPaths = list[tuple[str, int]]
T = TypeVar("T")


def count_training_images(data_dir: Path | None, test_fraction: float | None = None) -> int:
    """About how many images there are to train on, by the number of files. Errors as `layout.folder_classes`."""
    folder = image_folder(data_dir)
    places = layout(folder)
    train = train_folder(folder, places)
    train_classes(train)
    with reading(train):
        count = sum(1 for paths in class_folders(train).values() for path in paths for _ in os.scandir(path))
    if places.validation is None and places.test is None:
        return int((1 - (test_fraction or TEST_FRACTION)) * count)
    return count


def read_image_folder(data_dir: Path | None, skip_broken: bool, test_fraction: float | None) -> DataSource:
    """List the images of an image folder and check their headers. Prints which folder is for what.

    Args:
        data_dir: the folder, see `layout`.
        skip_broken: do not refuse broken images; `images.read` leaves them out later.
        test_fraction: share of the images to test on if there are no folders for that; None: `TEST_FRACTION`.

    Raises:
        UserError: the layout is wrong, a class has no training images, a part has no images, or an image is broken.
    """
    folder = image_folder(data_dir)
    places = layout(folder)
    train = train_folder(folder, places)
    classes = train_classes(train)
    tested = [place for place in (places.validation, places.test) if place is not None]
    if tested and test_fraction is not None:
        raise UserError(f"--test_fraction {test_fraction:g}: {folder} has its own '{tested[0].name}'; leave it out")
    for place in tested:
        check_known(place, classes, str(train))
    parts, broken = _listed([train, *tested], classes, skip_broken)
    _say(places.notes, [train, *tested])
    if not tested:
        parts = [*_split_by_content(parts[0], broken, test_fraction or TEST_FRACTION)]
        _warn_of_few_test_images(classes, parts[0], parts[1], test_fraction or TEST_FRACTION)
    source = DataSource(classes, *map(_image_files, parts))
    labels = {name: [label for _, label in part] for name, part in zip(source.parts(), parts, strict=True)}
    check_classes(classes, labels, folder)
    return source


def read_to_test(
    data_dir: Path | None,
    skip_broken: bool,
    test_fraction: float | None,
    class_names: Sequence[str] | None,
    trained: np.ndarray,
) -> DataSource:
    """List the images of an image folder to test a model on: those of its test or validation folder, or all.

    Of all, the images that the model was trained on are left out. Without a record of those, the images are tested
    that a run would not train on. Prints which they are.

    Args:
        data_dir, skip_broken, test_fraction: as of `read_image_folder`.
        class_names: of the model, in the order of its outputs; None: the classes are those of the folder.
        trained: digests, uint64, of the images that the model was trained on; empty if that is not recorded.

    Raises:
        UserError: the folder has other classes or no image to test, or an image is broken.
    """
    folder = image_folder(data_dir)
    places = layout(folder)
    place = places.test or places.validation
    if place is None and not len(trained):
        source = read_image_folder(data_dir, skip_broken, test_fraction)
        print(
            f"there is no record of what the model was trained on: {source.test.count} images are tested, those of "
            f"{folder} that a run would not train on; to test all, move them to a folder {folder / 'test'}"
        )
        return source._replace(train=NO_IMAGES)
    classes = [*(class_names or class_folders(places.train or place or folder))]
    place, is_all = place or places.train or folder, place is None
    own = printable(f"the model ({', '.join(classes[:10])}{', …' if len(classes) > 10 else ''}); rename or remove it")
    check_known(place, classes, own if class_names else str(places.train or folder))
    (images,), broken = _listed([place], classes, skip_broken)
    _say(places.notes, [])
    count = len(images)
    if is_all:
        images = _without(trained, images, broken)
        if count and not images:
            raise UserError(
                f"--data_dir {folder}: the model was trained on all {count} images; give images that it has not seen"
            )
    which = f"{len(images)} of {count} images, those that the model was not trained on" if is_all else f"{count} images"
    print(printable(f"tested in {place}: {which}"))
    check_classes(classes, {"test": [label for _, label in images]}, place)
    return DataSource(classes, NO_IMAGES, _image_files(images))


def _say(notes: Sequence[str], places: Sequence[Path]) -> None:
    """Print what the folders are for: those that train, choose the best model (if there are three), and test."""
    for note in notes:
        print(note)
    if len(places) > 1:
        chooses = f"{places[1]} chooses the best model"
        tests = f", {places[2]} is reported once at the end" if len(places) > 2 else " and tests it"
        print(printable(f"{places[0]} trains, {chooses}{tests}"))


def _image_files(images: LabelledPaths) -> ImageFiles:
    return ImageFiles(len(images), partial(iter, images), [path for path, _ in images])


def _listed(
    places: Sequence[Path], classes: Sequence[str], skip_broken: bool
) -> tuple[list[LabelledPaths], dict[str, str]]:
    """The images in the class folders of each of `places`, and what is wrong with broken ones, see `_images_in`.

    Raises:
        UserError: an image is broken, without `skip_broken`.
    """
    found = [_images_in(place, classes) for place in places]
    broken = {path: why for _, wrong in found for path, why in wrong.items()}
    if broken and not skip_broken:
        lines = [f"{path}: {why}" for path, why in broken.items()]
        raise broken_images(lines, f"{len(broken)} of {sum(len(images) for images, _ in found)} images")
    return [images for images, _ in found], broken


def broken_images(broken: Sequence[str], count: str) -> UserError:
    """The error for broken images: names the first one and says what to do.

    Args:
        broken: one line on each.
        count: "3 of 50 images".
    """
    more = f" ({count} are broken)" if len(broken) > 1 else ""
    return UserError(f"{broken[0]}{more}; replace or remove it, or leave out broken images with --skip_broken")


def _images_in(folder: Path, classes: Sequence[str]) -> tuple[LabelledPaths, dict[str, str]]:
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
    of_class = class_folders(folder)
    for label, place in ((label, place) for label, name in enumerate(classes) for place in of_class.get(name, ())):
        with reading(place):
            entries = os.scandir(place)
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
    """Split images for training and testing by their digests.

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
    digests = _of_contents(digest, [path for path, _ in intact])
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


def _of_contents(function: Callable[[bytes], T], paths: Sequence[str]) -> list[T]:
    """What `function` returns for the content of each file, with a progress bar."""

    def of_file(path: str) -> T:
        with reading(Path(path)):
            return function(content(path))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(of_file, paths)
        return [*tqdm(found, total=len(paths), desc="comparing images", unit="image", leave=False)]


def _without(trained: np.ndarray, images: LabelledPaths, broken: Collection[str]) -> LabelledPaths:
    """The `images` without those that have one of the digests `trained`; runs of earlier versions kept others."""
    known, paths = {*trained.tolist()}, [path for path, _ in images if path not in broken]
    of_each = _of_contents(lambda encoded: {digest(encoded), file_digest(encoded)}, paths)
    seen = {path for path, digests in zip(paths, of_each, strict=True) if digests & known}
    return [image for image in images if image[0] not in seen]


def _warn_of_few_test_images(
    classes: Sequence[str], train: LabelledPaths, test: LabelledPaths, fraction: float
) -> None:
    """Print a line if classes have less than half of their share of the test images. Without any: `check_classes`."""
    tested, count = Counter(label for _, label in test), Counter(label for _, label in [*train, *test])
    few = [
        f"'{classes[label]}' ({tested[label]} of {count[label]})"
        for label in sorted(tested)
        if tested[label] < fraction * count[label] / 2
    ]
    if few:
        named, more = ", ".join(few[:NAMED_CLASSES]), len(few) - NAMED_CLASSES
        others = f" and {more} more {'class' if more == 1 else 'classes'}" if more > 0 else ""
        print(
            f"few test images of {named}{others}, since an image's content decides whether it tests; a larger "
            "--test_fraction gives more, or a folder test/ of your choice"
        )


def check_classes(
    classes: Sequence[str], labels: Mapping[str, Sequence[int] | np.ndarray], folder: Path | None
) -> None:
    """Print a warning if a class has no images in a part other than training.

    Args:
        classes: their names.
        labels: of the images of each part, by its name: training, validation, test.
        folder: for messages.

    Raises:
        UserError: a part has no images, or a class has no training images.
    """
    for what, found in labels.items():
        if not len(found):
            raise UserError(f"--data_dir {folder}: has no {what} images ({KINDS}) in its class folders")
    for what, found in labels.items():
        counts = np.bincount(found, minlength=len(classes))
        empty = [f"'{name}'" for name, count in zip(classes, counts, strict=True) if not count]
        if empty:
            shown = f"{', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
            without = f"no {what} images of {'class' if len(empty) == 1 else f'{len(empty)} classes'}: {shown}"
            if what == "training":
                raise UserError(f"--data_dir {folder}: has {without}; add some or remove the folder")
            print(f"warning: {folder} has {without}; the accuracy does not cover them")
