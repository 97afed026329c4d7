"""Data sets as batches, all through one function: `load`. Run as a script: `data.py show|prepare`.

Images of every data set reach the network as float32 [batch, size, size, 3] in 0…255, with int32 labels [batch]. All
images are read before training starts, so an epoch decodes nothing and a broken file is reported at once. The order of
an epoch depends only on the seed and the epoch's number, so a run can be repeated or resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import utils
from elastic_trainer.cli.data_command import parse_data
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import DecodedImages, ImageFiles, read
from elastic_trainer.datasets.sources import DataSource, find, prepare_tfds
from elastic_trainer.errors import UserError, printable
from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import DataSettings


def load(
    data: DataSettings,
    input_size: int,
    batch_size: int,
    seed: int = 0,
    num_classes: int | None = None,
    kept_mb: float | None = None,
    source: DataSource | None = None,
) -> ImageData:
    """The data set of these settings, with its images read. Shows a progress bar.

    Args:
        data: which data set, see `DataSettings`.
        input_size: height and width in pixels.
        batch_size: images per step.
        seed: of the training order and of augmentation.
        num_classes: outputs of the network, at least as many as the data set has classes.
        kept_mb: how many MB images may take in memory; None: a quarter of what is available.
        source: the images, if they are found already.

    Raises:
        UserError: the data set is missing, cannot be downloaded, contains broken images, or does not fit the other
            arguments.
    """
    from elastic_trainer.datasets.image_folder import check_classes  # needs an extra

    name = data.dataset_name
    source = source or find(data)
    if num_classes is not None and num_classes < len(source.class_names):
        raise UserError(
            f"--num_classes {num_classes}: {name} has {len(source.class_names)} classes; give at least that or leave "
            "it out"
        )
    parts = source.parts()
    images = dict(zip(parts, read([*parts.values()], input_size, name, data.cache_dir, kept_mb), strict=True))
    broken = [line for part in images.values() for line in part.broken]
    count = sum(part.count for part in parts.values())
    if broken and DATASETS[name].is_tfds:
        raise UserError(f"{name}: {broken[0]} ({len(broken)} of {count} images are broken); prepare it again")
    if broken:
        print(f"skipped (unreadable): {len(broken)} of {count} images; the first: {broken[0]}")
        labels = {part: found.labels for part, found in images.items() if parts[part].count}
        check_classes(source.class_names, labels, data.data_dir)
    _warn_of_copies(name, parts, images)
    train, test, *others = images.values()
    dataset = ImageData(name, source.class_names, train, test, batch_size, seed, data.augment)
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


def main(words: Sequence[str] | None = None) -> None:
    """Run one of the commands; `words` are those of the process if not given."""
    args = parse_data(words)
    if args.command == "show":
        from elastic_trainer.datasets.show import show  # needs an extra

        show(DataSettings(args.dataset_name, args.data_dir, args.test_fraction), args.output)
        return
    builder = prepare_tfds(args.dataset_name, args.data_dir)
    splits = ", ".join(f"{split.num_examples} {split_name}" for split_name, split in builder.info.splits.items())
    print(f"{args.dataset_name} is ready in {builder.data_dir}: {splits}")


if __name__ == "__main__":
    utils.run_cli(main)
