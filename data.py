"""Data sets as tf.data pipelines, all through one function: `load`. Run as a script: the commands of dataset_tools.py.

Whatever the source, images reach the network as float32 [batch, size, size, 3] in 0…255 with int32 labels [batch].
All are read before training begins (images.py), so an epoch decodes nothing and a broken file shows at once. The order
of an epoch depends on the seed and the epoch's number alone, so a run can be repeated or taken up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import utils
from elastic_trainer.cli.options import TFDS_NAMES
from elastic_trainer.datasets.images import Pixels, read
from elastic_trainer.datasets.sources import broken_images, check_classes, find, printable
from utils import UserError

if TYPE_CHECKING:
    import argparse

    import tensorflow as tf

_PROBE_STREAM = 1_000_003  # keeps the seeds of importance batches apart from those of epochs


class ImageData:
    """A data set at one input size and batch size.

    Args:
        name: of the data set.
        class_names: in the order of the labels.
        train, test: its images.
        batch_size: images a step.
        seed: of the training order.

    Attributes:
        num_classes: number of classes of the data set itself.
        train_count, test_count: images in each split.
        input_size: height and width in pixels.
        steps_per_epoch: training batches in an epoch; the incomplete last one is left out.
        skipped_images: broken images of both splits that were left out, and are in none of these counts.

    Raises:
        UserError: fewer training images than a batch.
    """

    def __init__(
        self, name: str, class_names: Sequence[str], train: Pixels, test: Pixels, batch_size: int, seed: int = 0
    ) -> None:
        self.name, self.class_names, self.num_classes = name, tuple(class_names), len(class_names)
        self.train_count, self.test_count = len(train.labels), len(test.labels)
        if self.train_count < batch_size:
            raise UserError(
                f"--batch_size {batch_size}: {name} has only {self.train_count} training images; choose at most that"
            )
        self.input_size, self.batch_size, self.seed = train.images.shape[1], batch_size, seed
        self.steps_per_epoch = self.train_count // batch_size
        self.skipped_images = len(train.broken) + len(test.broken)
        self._train, self._test = train, test

    def train(self, epoch: int, skip: int = 0) -> tf.data.Dataset:
        """The batches of epoch `epoch`, shuffled by seed and epoch: (images, labels), all of full size.

        The first `skip` batches are left out.
        """
        return self._shuffled(epoch, skip)

    def probe(self, index: int, count: int = 1) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Training batches for the `index`-th evaluation of importance, drawn apart from the epochs' order.

        At most `count`, fewer where an epoch has not so many.
        """
        return list(self._shuffled(_PROBE_STREAM + index).take(count))

    def test(self) -> tf.data.Dataset:
        """All test images in a fixed order: (images, labels), the last batch as large as what is left."""
        return self._batches(self._test, np.arange(self.test_count))

    def _shuffled(self, stream: int, skip: int = 0) -> tf.data.Dataset:
        order = np.random.default_rng([self.seed, stream]).permutation(self.train_count)
        return self._batches(self._train, order[skip * self.batch_size : self.steps_per_epoch * self.batch_size])

    def _batches(self, pixels: Pixels, order: np.ndarray) -> tf.data.Dataset:
        import tensorflow as tf

        size = self.input_size

        def rows(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return pixels.images[indices], pixels.labels[indices]

        def prepare(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch, labels = tf.numpy_function(rows, [indices], (tf.uint8, tf.int32))
            batch = tf.ensure_shape(batch, (*indices.shape, size, size, 3))
            return tf.cast(batch, tf.float32), tf.ensure_shape(labels, indices.shape)

        # Nothing here is for tf.data to tune, and taking its tuner down stalls the end of an epoch by up to 1.3 s.
        options = tf.data.Options()
        options.autotune.enabled = False
        batches = tf.data.Dataset.from_tensor_slices(order).batch(self.batch_size).map(prepare).prefetch(2)
        return batches.with_options(options)


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


def from_options(args: argparse.Namespace, input_size: int) -> ImageData:
    """The data set that the options of a command line ask for, at an input size; see `load`."""
    return load(
        args.dataset_name,
        input_size,
        args.batch_size,
        args.seed,
        args.data_dir,
        args.num_classes,
        args.skip_broken,
        args.test_fraction,
        args.logdir / "images",
        args.image_memory,
    )


if __name__ == "__main__":
    from elastic_trainer.datasets import commands

    utils.run_cli(commands.main)
