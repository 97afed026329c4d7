"""A data set whose images are in memory, as shuffled batches.

The order of an epoch depends only on the seed and the number of the epoch, so a run can be repeated, and resumed in the
middle of an epoch. Importance is evaluated on training batches with an order of their own (`importance_batches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.datasets.images import DecodedImages
from utils import UserError

if TYPE_CHECKING:
    import tensorflow as tf


_IMPORTANCE_STREAM = 1_000_003  # seeds from here on are for importance batches, smaller ones for epochs


class ImageData:
    """A data set at one input size and batch size.

    Args:
        name: of the data set.
        class_names: in the order of the labels.
        train, test: the images of both splits.
        batch_size: images per step.
        seed: of the training order.
        fingerprints: of the training and the test images, see `images.fingerprint`.

    Attributes:
        num_classes: number of classes of the data set itself; a network may have more outputs.
        train_count, test_count: number of images in each split.
        input_size: height and width in pixels.
        steps_per_epoch: training batches per epoch; an incomplete last batch is dropped.
        skipped_images: number of broken images in both splits; no other count includes them.

    Raises:
        UserError: there are fewer training images than a batch needs.
    """

    def __init__(
        self,
        name: str,
        class_names: Sequence[str],
        train: DecodedImages,
        test: DecodedImages,
        batch_size: int,
        seed: int = 0,
        fingerprints: tuple[str, str] = ("", ""),
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
        self._fingerprints = fingerprints

    def record(self) -> dict[str, Any]:
        """What config.json keeps, so that a run is not continued with other images."""
        training, test = self._fingerprints
        return {"class_names": [*self.class_names], "training_images": training, "test_images": test}

    def train(self, epoch: int, skip: int = 0) -> tf.data.Dataset:
        """The batches of epoch `epoch`, shuffled by seed and epoch, without the first `skip` batches.

        Returns:
            Pairs of images float32 [batch, size, size, 3] in 0…255 and labels int32 [batch], each of full batch size.
        """
        return self._shuffled(epoch, skip)

    def importance_batches(self, index: int, count: int = 1) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Training batches for the `index`-th evaluation of importance; their order is independent of the epochs'.

        Returns:
            `count` pairs as from `train`, or fewer if an epoch has fewer.
        """
        return list(self._shuffled(_IMPORTANCE_STREAM + index).take(count))

    def test(self) -> tf.data.Dataset:
        """All test images in a fixed order, as pairs like those of `train`; the last batch may be smaller."""
        return self._batches(self._test, np.arange(self.test_count))

    def _shuffled(self, stream: int, skip: int = 0) -> tf.data.Dataset:
        order = np.random.default_rng([self.seed, stream]).permutation(self.train_count)
        return self._batches(self._train, order[skip * self.batch_size : self.steps_per_epoch * self.batch_size])

    def _batches(self, decoded: DecodedImages, order: np.ndarray) -> tf.data.Dataset:
        import tensorflow as tf

        size = self.input_size

        def rows(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return decoded.images[indices], decoded.labels[indices]

        def prepare(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch, labels = tf.numpy_function(rows, [indices], (tf.uint8, tf.int32))
            batch = tf.ensure_shape(batch, (*indices.shape, size, size, 3))
            return tf.cast(batch, tf.float32), tf.ensure_shape(labels, indices.shape)

        # There is nothing here for tf.data's autotuner to tune, and stopping it stalls the end of an epoch by up to
        # 1.3 s.
        options = tf.data.Options()
        options.autotune.enabled = False
        batches = tf.data.Dataset.from_tensor_slices(order).batch(self.batch_size).map(prepare).prefetch(2)
        return batches.with_options(options)
