"""A data set whose images are in memory, as shuffled batches.

The order of an epoch depends only on the seed and the number of the epoch, so a run can be repeated, and resumed in the
middle of an epoch. Importance is evaluated on training batches with an order of their own (`importance_batches`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from elastic_trainer.datasets.images import DecodedImages
from utils import UserError

if TYPE_CHECKING:
    import tensorflow as tf

    Batch = tuple[tf.Tensor, tf.Tensor]

T = TypeVar("T")
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

    def train(self, epoch: int, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
        """The batches of epoch `epoch`, shuffled by seed and epoch: at most `count`, without the first `skip`.

        Yields:
            Pairs of images float32 [batch, size, size, 3] in 0…255 and labels int32 [batch], each of full batch size.
        """
        return self._shuffled(epoch, skip, count)

    def importance_batches(self, index: int, count: int = 1) -> list[Batch]:
        """Training batches for the `index`-th evaluation of importance; their order is independent of the epochs'.

        Returns:
            `count` pairs as from `train`, or fewer if an epoch has fewer.
        """
        return [*self._shuffled(_IMPORTANCE_STREAM + index, 0, count)]

    def test(self) -> Iterator[Batch]:
        """All test images in a fixed order, as pairs like those of `train`; the last batch may be smaller."""
        return self._batches(self._test, np.arange(self.test_count))

    def _shuffled(self, stream: int, skip: int, count: int | None) -> Iterator[Batch]:
        order = np.random.default_rng([self.seed, stream]).permutation(self.train_count)
        end = self.steps_per_epoch if count is None else min(skip + count, self.steps_per_epoch)
        return self._batches(self._train, order[skip * self.batch_size : end * self.batch_size])

    def _batches(self, decoded: DecodedImages, order: np.ndarray) -> Iterator[Batch]:
        """The images of `order`. What is in memory needs no tf.data, which takes 1 to 2 ms for each batch."""
        import tensorflow as tf

        parts = (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))
        rows = ((decoded.images[part], decoded.labels[part]) for part in parts)
        for images, labels in _read_ahead(rows) if isinstance(decoded.images, np.memmap) else rows:
            yield tf.cast(tf.constant(images), tf.float32), tf.constant(labels)


def _read_ahead(rows: Iterator[T]) -> Iterator[T]:
    """The same, each read from its file in the background while the one before is used."""
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(next, rows, None)
        while (row := reading.result()) is not None:
            reading = reader.submit(next, rows, None)
            yield row
