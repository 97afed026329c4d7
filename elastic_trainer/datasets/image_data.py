"""A data set whose images are in memory, as batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elastic_trainer.datasets.images import Encoded, Pixels
from utils import UserError

if TYPE_CHECKING:
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


class DataSource(NamedTuple):
    """A data set whose images are not yet read."""

    class_names: Sequence[str]
    train: Encoded
    test: Encoded
