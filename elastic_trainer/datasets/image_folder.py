"""Reads a folder of the user's photos, with one subfolder per class.

`layout` says which folders train, choose the best model, and test; without such folders, `TEST_FRACTION` or another
share of the images is for testing. Whether a file is an image is decided by its content, not by its extension. Broken
images are found before training starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from elastic_trainer.datasets.decoding import KINDS, content, header_error
from elastic_trainer.datasets.digests import digest, tested_digests
from elastic_trainer.datasets.images import NO_IMAGES, ImageFiles
from elastic_trainer.datasets.layout import Layout, check_known, class_folders, layout, reading
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.system.errors import UserError, first_few, printable

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")  # a file with one of these must be an image
TEST_FRACTION = 0.2  # about this share of the images is for testing, unless another one is given
NAMED_CLASSES = 3  # of those with few test images


class _Image(NamedTuple):
    """A file with its label; `why_broken`: what is wrong with it, judged by its first bytes, or None."""

    path: str
    label: int
    why_broken: str | None


def count_training_images(data_dir: Path | None, test_fraction: float | None = None) -> int:
    """About how many images there are to train on, by the number of files. Errors as `layout.folder_classes`."""
    places = layout(data_dir)
    train, _ = places.training()
    with reading(train):
        count = sum(1 for paths in class_folders(train).values() for path in paths for _ in os.scandir(path))
    return count if places.tested else int((1 - (test_fraction or TEST_FRACTION)) * count)


def read_image_folder(data_dir: Path | None, test_fraction: float | None) -> DataSource:
    """List the images of an image folder and check their headers. Prints which folder is for what.

    `images.read` leaves out broken images later. `test_fraction` is the share of the images to test on if there are no
    folders for that; None: `TEST_FRACTION`. Raises `UserError` if the layout is wrong, a class has no training images,
    or a part has no images.
    """
    places = layout(data_dir)
    train, classes = places.training()
    if places.tested and test_fraction is not None:
        own = places.tested[0].name
        raise UserError(f"--test_fraction {test_fraction:g}: {places.folder} has its own '{own}'; leave it out")
    for place in places.tested:
        check_known(place, classes, str(train))
    parts = _listed(places, [train, *places.tested], classes)
    if places.tested:
        chooses, *tests = places.tested
        ends = f", {tests[0]} is reported once at the end" if tests else " and tests it"
        print(printable(f"{train} trains, {chooses} chooses the best model{ends}"))
    else:
        fraction = test_fraction or TEST_FRACTION
        parts = _split_by_content(parts[0], fraction)
        _warn_of_few_test_images(classes, parts, fraction)
    source = DataSource(classes, *map(_image_files, parts))
    labels = {name: [image.label for image in part] for name, part in zip(source.parts(), parts, strict=True)}
    check_classes(classes, labels, places.folder)
    return source


def read_to_test(
    data_dir: Path | None,
    test_fraction: float | None,
    class_names: Sequence[str] | None,
    trained: np.ndarray,
) -> DataSource:
    """List the images of an image folder to test a model on: those of its test or validation folder, or all.

    Of all, the images that the model was trained on, whose digests are `trained`, are left out. Without a record of
    those, the images are tested that a run would not train on. Prints which they are. `class_names` are those of the
    model, in the order of its outputs; None: the classes are those of the folder. Raises `UserError` if the folder has
    other classes or no image to test.
    """
    places = layout(data_dir)
    own = places.test or places.validation
    if own is None and not len(trained):
        source = read_image_folder(data_dir, test_fraction)
        print(
            f"there is no record of what the model was trained on: {source.test.count} images are tested, those of "
            f"{data_dir} that a run would not train on; to test all, move them to a folder {places.folder / 'test'}"
        )
        return source._replace(train=NO_IMAGES)
    place, known = own or places.train or places.folder, places.train or own or places.folder
    classes = [*(class_names or class_folders(known))]
    whose = f"the model ({first_few(classes, 10)}); rename or remove it" if class_names else str(known)
    check_known(place, classes, printable(whose))
    [images] = _listed(places, [place], classes)
    which = f"{len(images)} images"
    if own is None:
        seen, found = {*trained.tolist()}, _digests(images)
        left = [image for image in images if found.get(image) not in seen]
        if images and not left:
            raise UserError(
                f"--data_dir {data_dir}: the model was trained on all {which}; give images that it has not seen"
            )
        images, which = left, f"{len(left)} of {which}, those that the model was not trained on"
    print(printable(f"tested in {place}: {which}"))
    check_classes(classes, {"test": [image.label for image in images]}, place)
    return DataSource(classes, NO_IMAGES, _image_files(images))


def _image_files(images: Sequence[_Image]) -> ImageFiles:
    examples = [(image.path, image.label) for image in images]
    return ImageFiles(len(images), partial(iter, examples), [path for path, _ in examples])


def _listed(layout: Layout, places: Sequence[Path], classes: Sequence[str]) -> list[list[_Image]]:
    """The images in the class folders of each of `places`, broken ones included."""
    found = [_images_in(place, classes) for place in places]
    for note in layout.notes:
        print(printable(note))
    return found


def _images_in(folder: Path, classes: Sequence[str]) -> list[_Image]:
    """The images in the class folders of `folder`, broken ones included.

    A file that is not an image is broken if its name has the extension of one. Otherwise it is ignored, as are folders
    in the folder of a class; a message gives their number. Names that start with a dot are skipped: macOS puts such a
    file beside each photo.
    """
    images: list[_Image] = []
    others: Counter[str] = Counter()
    folders: list[str] = []
    of_class = class_folders(folder)
    for label, place in ((label, place) for label, name in enumerate(classes) for place in of_class.get(name, ())):
        with reading(place):
            entries = sorted((entry.path, entry.is_dir()) for entry in os.scandir(place) if entry.name[0] != ".")
        for path, is_folder in entries:
            if is_folder:
                folders.append(path)
                continue
            why, extension = header_error(path), Path(path).suffix.lower()
            if why is None or extension in IMAGE_EXTENSIONS:
                images.append(_Image(path, label, why))
            else:
                others[extension] += 1
    if others:
        kinds = ", ".join(f"{count} {extension or 'without extension'}" for extension, count in others.most_common(5))
        print(printable(f"ignored in {folder}, not {KINDS}: {kinds}"))
    if folders:
        count = f"{len(folders)} folder{'s' if len(folders) > 1 else ''}"
        such_as = f"within those of classes, such as {folders[0]}; move the images up to use them"
        print(printable(f"ignored: {count} {such_as}"))
    return images


def _split_by_content(images: Sequence[_Image], fraction: float) -> list[list[_Image]]:
    """Split images for training and testing by their digests. Broken ones count as training images."""
    digest_of = _digests(images)
    tested = tested_digests([(image.label, number) for image, number in digest_of.items()], fraction)
    return [[image for image in images if (digest_of.get(image) in tested) == tests] for tests in (False, True)]


def _digests(images: Sequence[_Image]) -> dict[_Image, int]:
    """The digest of each image that is not broken, with a progress bar."""

    def of_file(image: _Image) -> int:
        with reading(Path(image.path)):
            return digest(content(image.path))

    intact = [image for image in images if image.why_broken is None]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = tqdm(pool.map(of_file, intact), total=len(intact), desc="comparing images", unit="image", leave=False)
        return dict(zip(intact, found, strict=True))


def _warn_of_few_test_images(classes: Sequence[str], parts: Sequence[Sequence[_Image]], fraction: float) -> None:
    """Print a line if classes have less than half of their share of the test images. Without any: `check_classes`."""
    trained, tested = (Counter(image.label for image in part) for part in parts)
    few = [
        f"'{classes[label]}' ({count} of {count + trained[label]})"
        for label, count in sorted(tested.items())
        if count < fraction * (count + trained[label]) / 2
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
    """Print a warning if a class has no images in a part other than training; `labels`: by part, training first.

    Raises `UserError` if a part has no images, or a class has no training images.
    """
    for part, found in labels.items():
        if not len(found):
            raise UserError(f"--data_dir {folder}: has no {part} images ({KINDS}) in its class folders")
    for part, found in labels.items():
        counts = np.bincount(found, minlength=len(classes))
        empty = [f"'{name}'" for name, count in zip(classes, counts, strict=True) if not count]
        if empty:
            which = "class" if len(empty) == 1 else f"{len(empty)} classes"
            without = f"no {part} images of {which}: {first_few(empty)}"
            if part == "training":
                raise UserError(f"--data_dir {folder}: has {without}; add some or remove the folder")
            print(f"warning: {folder} has {without}; the accuracy does not cover them")
