"""Data sets as batches, all through one function: `load`. Run as a script: `data.py prepare`.

Images of every data set reach the network as float32 [batch, size, size, 3] in 0…255, with int32 labels [batch]. All
images are read before training starts, so an epoch decodes nothing and a broken file is reported at once. The order of
an epoch depends only on the seed and the epoch's number, so a run can be repeated or resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import utils
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import DecodedImages, ImageFiles, read
from elastic_trainer.datasets.named import DATASETS, find
from elastic_trainer.datasets.sources import DataSource, prepare_tfds
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import OneLineParser, one_of
from elastic_trainer.system.errors import UserError, printable


def load(settings: Settings, kept_mb: float | None = None, source: DataSource | None = None) -> ImageData:
    """The data set of these settings, with its images read. Shows a progress bar.

    Args:
        settings: which data set, the size of its images, the batch, the seed, and `num_classes`, if that is known.
        kept_mb: how many MB images may take in memory; None: a quarter of what is available.
        source: the images, if they are found already.

    Raises:
        UserError: the data set is missing, cannot be downloaded, contains broken images, or has more classes than the
            network has outputs.
    """
    from elastic_trainer.datasets.image_folder import check_classes  # needs an extra

    name, outputs = settings.dataset_name, settings.num_classes
    source = source or find(settings)
    if outputs is not None and outputs < len(source.class_names):
        raise UserError(
            f"--dataset_name {name}: has {len(source.class_names)} classes, but the network has {outputs} outputs"
        )
    parts = source.parts()
    images = dict(
        zip(parts, read([*parts.values()], settings.input_size, name, settings.cache_dir, kept_mb), strict=True)
    )
    broken = [line for part in images.values() for line in part.broken]
    count = sum(part.count for part in parts.values())
    if broken and DATASETS[name].is_tfds:
        raise UserError(f"{name}: {broken[0]} ({len(broken)} of {count} images are broken); prepare it again")
    if broken:
        print(f"skipped (unreadable): {len(broken)} of {count} images; the first: {broken[0]}")
        labels = {part: found.labels for part, found in images.items() if parts[part].count}
        check_classes(source.class_names, labels, settings.data_dir)
    _warn_of_copies(name, parts, images)
    train, test, *others = images.values()
    dataset = ImageData(name, source.class_names, train, test, settings.batch_size, settings.seed, settings.augment)
    for held_out in others:
        dataset.hold_out(held_out)
    return dataset


def _warn_of_copies(name: str, parts: Mapping[str, ImageFiles], images: Mapping[str, DecodedImages]) -> None:
    """Print a line for each part that has training images, and one if a photo of a folder is in two classes."""
    for part, found in images.items():
        shared = int(np.isin(found.digests, images["training"].digests).sum())
        if shared and part != "training":
            print(f"warning: {name}: {shared} of {len(found.labels)} {part} images are training images too")
    if not DATASETS[name].is_folder:
        return
    files_of: dict[int, dict[int, str]] = {}  # digest of a photo -> label -> one of its files
    for part, found in images.items():
        for number, label, place in zip(found.digests.tolist(), found.labels.tolist(), found.places, strict=True):
            files_of.setdefault(number, {}).setdefault(label, parts[part].files[place])
    pairs = [[*files.values()][:2] for files in files_of.values() if len(files) > 1]
    if pairs:
        more = f" ({len(pairs)} photos are in two classes)" if len(pairs) > 1 else ""
        print(printable(f"warning: {' and '.join(pairs[0])} are one photo in two classes{more}; remove the wrong one"))


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
