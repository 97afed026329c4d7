"""Data sets as batches, all through one function: `load`. Run as a script: `data.py prepare`.

Images of every data set reach the network as float32 [batch, size, size, 3] in 0…255, with int32 labels [batch]. All
images are read before training starts, so an epoch decodes nothing and a broken file is reported at once. The order of
an epoch depends only on the seed and the epoch's number, so a run can be repeated or resumed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import utils
from elastic_trainer.datasets.decoding import KINDS
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import NO_IMAGES, Images, read
from elastic_trainer.datasets.layout import tested_digests
from elastic_trainer.datasets.named import DATASETS, find
from elastic_trainer.datasets.sources import DataSource, prepare_tfds
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import OneLineParser, one_of
from elastic_trainer.system.errors import UserError, first_few, printable


def load(settings: Settings, kept_mb: float | None = None, source: DataSource | None = None) -> ImageData:
    """The data set of these settings, with its images read. Shows a progress bar.

    Args:
        settings: which data set, the size of its images, the batch and the seed.
        kept_mb: how many MB images may take in memory; None: a quarter of what is available.
        source: the images, if they are found already.

    Raises:
        UserError: the data set is missing, cannot be downloaded, or has no image of a class.
    """
    name = settings.dataset_name
    source = source or find(settings)
    for note in source.notes:
        print(printable(note))
    start, count = time.perf_counter(), source.train.count + source.test.count
    (train, test), broken = read([source.train, source.test], settings.input_size, settings.logdir / "images", kept_mb)
    seconds = (time.perf_counter() - start) / max(count, 1)
    if broken:
        print(f"skipped (unreadable): {len(broken)} of {count} files; the first: {broken[0]}")
    if source.test_fraction is not None:
        photos = [*zip(train.labels.tolist(), train.digests.tolist(), strict=True)]
        is_tested = np.isin(train.digests, np.array([*tested_digests(photos, source.test_fraction)], np.uint64))
        train, test = train.part(~is_tested), train.part(is_tested)
    if DATASETS[name].is_folder:
        parts = {} if source.train is NO_IMAGES else {"training": train}
        parts["validation" if source.tested_later else "test"] = test
        _check_classes(source.class_names, parts, settings)
        _warn_of_copies(train, test)
    more = settings.batch_size, settings.seed, settings.augment, source.tested_later
    dataset = ImageData(name, source.class_names, train, test, *more)
    dataset.reading_seconds = seconds
    return dataset


def _check_classes(names: Sequence[str], parts: dict[str, Images], settings: Settings) -> None:
    """Print a warning if a class has no images in a part other than training.

    Raises `UserError` if a part has no images, or a class has no training images.
    """
    for part, images in parts.items():
        empty = [f"'{name}'" for label, name in enumerate(names) if label not in images.labels]
        which = "class" if len(empty) == 1 else f"{len(empty)} classes"
        without = f"{settings.data_dir} has no {part} images of {which}: {first_few(empty)}"
        if len(empty) == len(names):
            raise UserError(f"--data_dir {settings.data_dir}: has no {part} images ({KINDS}) in its class folders")
        if empty and part == "training":
            raise UserError(f"--data_dir {without}; add some or remove the folder")
        if empty:
            print(f"warning: {without}; the accuracy does not cover them")


def _warn_of_copies(train: Images, test: Images) -> None:
    """Print a line if images train and test, and one if a photo is in two classes."""
    shared = int(np.isin(test.digests, train.digests).sum())
    if shared:
        print(f"warning: {shared} of {len(test)} images that choose the best model are training images too")
    first: dict[int, tuple[int, str]] = {}  # digest of a photo -> label and file of its first copy
    pairs: dict[int, str] = {}  # of those in two classes
    for images in (train, test):
        for number, label, file in zip(images.digests.tolist(), images.labels.tolist(), images.names, strict=True):
            known, other = first.setdefault(number, (label, file))
            if label != known:
                pairs.setdefault(number, f"{other} and {file}")
    if pairs:
        more = f" ({len(pairs)} photos are in two classes)" if len(pairs) > 1 else ""
        line = f"warning: {next(iter(pairs.values()))} are one photo in two classes{more}; remove the wrong one"
        print(printable(line))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, by default that of the process."""
    parser = OneLineParser(prog="data.py", description="Download a data set and prepare it.")
    names = [name for name, entry in DATASETS.items() if entry.is_tfds]
    parser.add_argument("command", type=one_of(["prepare"]), metavar="prepare")
    parser.add_argument("--dataset_name", type=one_of(names), metavar="NAME", required=True, help=", ".join(names))
    parser.add_argument("--data_dir", type=Path, metavar="DIR", help="where tensorflow-datasets keeps its files")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Prepare a data set of tensorflow-datasets."""
    args = parse(words)
    builder = prepare_tfds(args.dataset_name, args.data_dir)
    splits = ", ".join(f"{split.num_examples} {split_name}" for split_name, split in builder.info.splits.items())
    print(f"{args.dataset_name} is ready in {builder.data_dir}: {splits}")


if __name__ == "__main__":
    utils.run_cli(main)
