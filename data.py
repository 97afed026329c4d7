"""Data sets as tf.data pipelines, all through one function: `load`. Run as a script: the commands of dataset_tools.py.

Whatever the source, images reach the network as float32 [batch, size, size, 3] in 0…255 with int32 labels [batch].
All are read before training begins (images.py), so an epoch decodes nothing and a broken file shows at once. The order
of an epoch depends on the seed and the epoch's number alone, so a run can be repeated or taken up again.
"""

from __future__ import annotations

from pathlib import Path

import utils
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.image_folder import broken_images, check_classes, printable
from elastic_trainer.datasets.images import read
from elastic_trainer.datasets.names import TFDS_NAMES
from elastic_trainer.datasets.sources import find
from elastic_trainer.settings import DataSettings
from utils import UserError


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
) -> ImageData:
    """A data set by the name that `--dataset_name` takes, its images read; shows a progress bar.

    Args:
        name: digits, caltech_birds2011, oxford_iiit_pet, stanford_dogs, or image_folder.
        input_size: height and width in pixels.
        batch_size: images a step.
        seed: of the training order.
        data_dir: for image_folder the folder with train/<class>/ and test/<class>/ or val/<class>/, or with
            <class>/ alone; for the TFDS names the folder of TFDS.
        num_classes: outputs of the network, at least as many as the data set has classes.
        skip_broken: of image_folder, leave out images that cannot be decoded; says how many.
        test_fraction: of image_folder, the share of each class to test on where there is no test/ or val/.
        cache_dir, image_memory: where images go that are more than so many MB; see `images.read`.

    Raises:
        UserError: the data set is not there, cannot be downloaded, has files that are no images, or does not fit the
            other arguments.
    """
    source = find(name, data_dir, skip_broken, test_fraction)
    if num_classes is not None and num_classes < len(source.class_names):
        raise UserError(
            f"--num_classes {num_classes}: {name} has {len(source.class_names)} classes; give at least that or leave "
            "it out"
        )
    train, test = read([source.train, source.test], input_size, name, cache_dir, image_memory)
    broken = [*train.broken.values(), *test.broken.values()]
    if broken:
        count = f"{len(broken)} of {source.train.count + source.test.count} images"
        if name in TFDS_NAMES:
            raise UserError(f"{name}: {broken[0]} ({count} are broken); prepare it anew")
        if not skip_broken:
            raise broken_images(broken, count)
        print(f"left out as broken: {count}; the first: {printable(broken[0])}")
        check_classes(source.class_names, train.labels, test.labels, data_dir)
    return ImageData(name, source.class_names, train, test, batch_size, seed)


def load_settings(
    data: DataSettings, input_size: int, batch_size: int, seed: int = 0, num_classes: int | None = None
) -> ImageData:
    """The data set of these settings; arguments and errors as `load`."""
    return load(
        data.dataset_name,
        input_size,
        batch_size,
        seed,
        data.data_dir,
        num_classes,
        data.skip_broken,
        data.test_fraction,
        data.cache_dir,
        data.image_memory,
    )


if __name__ == "__main__":
    from elastic_trainer.datasets import commands

    utils.run_cli(commands.main)
