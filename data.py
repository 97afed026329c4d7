"""Data sets as batches, all through one function: `load`. Run as a script: `data.py show|prepare|pack|unpack`.

Images of every data set reach the network as float32 [batch, size, size, 3] in 0…255, with int32 labels [batch]. All
images are read before training starts, so an epoch decodes nothing and a broken file is reported at once. The order of
an epoch depends only on the seed and the epoch's number, so a run can be repeated or resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import utils
from elastic_trainer.cli.data_command import parse_data
from elastic_trainer.datasets.archive import pack, prepare, unpack
from elastic_trainer.datasets.copies import warn_of_copies
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.image_folder import broken_images, check_classes
from elastic_trainer.datasets.images import read
from elastic_trainer.datasets.show import show
from elastic_trainer.datasets.sources import DataSource, find
from elastic_trainer.errors import UserError
from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import DataSettings


def load(
    name: str,
    input_size: int,
    batch_size: int,
    seed: int = 0,
    data_dir: Path | None = None,
    num_classes: int | None = None,
    skip_broken: bool = False,
    test_fraction: float | None = None,
    cache_dir: Path | None = None,
    image_memory: float | None = None,
    augment: str = "none",
    kept_mb: float | None = None,
) -> ImageData:
    """The data set that `--dataset_name` names, with its images read. Shows a progress bar.

    Args:
        name: a key of `registry.DATASETS`.
        input_size: height and width in pixels.
        batch_size: images per step.
        seed: of the training order and of augmentation.
        data_dir: for image_folder the folder with the photos, see `datasets.layout`; for the TFDS names the folder of
            TFDS.
        num_classes: outputs of the network, at least as many as the data set has classes.
        skip_broken: for image_folder, leave out images that cannot be decoded, and print how many.
        test_fraction: for image_folder without folders of parts, the share of the images to test on.
        cache_dir, image_memory: folder for images that take more than `image_memory` MB; see `images.read`.
        kept_mb: how many MB they may take where `image_memory`, which also limits their features, is not given.
        augment: of training images, see `augmentation.Augmentation`.

    Raises:
        UserError: the data set is missing, cannot be downloaded, contains broken images, or does not fit the other
            arguments.
    """
    settings = DataSettings(name, data_dir, test_fraction, skip_broken, image_memory, cache_dir, augment)
    return load_settings(settings, input_size, batch_size, seed, num_classes, kept_mb)


def load_settings(
    data: DataSettings,
    input_size: int,
    batch_size: int,
    seed: int = 0,
    num_classes: int | None = None,
    kept_mb: float | None = None,
    source: DataSource | None = None,
) -> ImageData:
    """The data set of these settings; arguments and errors as `load`. `source` has its images if they are found."""
    name = data.dataset_name
    source = source or find(name, data.data_dir, data.skip_broken, data.test_fraction)
    if num_classes is not None and num_classes < len(source.class_names):
        raise UserError(
            f"--num_classes {num_classes}: {name} has {len(source.class_names)} classes; give at least that or leave "
            "it out"
        )
    parts = source.parts()
    images = read(
        [*parts.values()], input_size, name, data.cache_dir, kept_mb if data.image_memory is None else data.image_memory
    )
    broken = [line for part in images for line in part.broken]
    if broken:
        count = f"{len(broken)} of {sum(part.count for part in parts.values())} images"
        if DATASETS[name].is_tfds:
            raise UserError(f"{name}: {broken[0]} ({count} are broken); prepare it again")
        if not data.skip_broken:
            raise broken_images(broken, count)
        print(f"skipped (unreadable): {count}; the first: {broken[0]}")
        labels = {part: found.labels for part, found in zip(parts, images, strict=True) if parts[part].count}
        check_classes(source.class_names, labels, data.data_dir)
    warn_of_copies(name, source, images)
    train, test, *others = images
    dataset = ImageData(name, source.class_names, train, test, batch_size, seed, data.augment, data.image_memory)
    for held_out in others:
        dataset.hold_out(held_out)
    return dataset


def main(words: Sequence[str] | None = None) -> None:
    """Run one of the commands; `words` are those of the process if not given."""
    args = parse_data(words)
    if args.command == "show":
        show(args.dataset_name, args.data_dir, args.test_fraction, args.output)
    elif args.command == "prepare":
        prepare(args.dataset_name, args.data_dir)
    elif args.command == "pack":
        pack(args.dataset_name, args.data_dir, args.output)
    else:
        unpack(args.archive, args.data_dir)


if __name__ == "__main__":
    utils.run_cli(main)
