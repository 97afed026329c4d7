"""A data set whose images are in memory, as shuffled batches.

The order of an epoch, and which view of each image it shows (`augmentation`), depend only on the seed and the number of
the epoch, so a run can be repeated, and resumed in the middle of an epoch. Importance is evaluated on training batches
with another order and other views (`importance_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.datasets.augmentation import Augmentation
from elastic_trainer.datasets.images import DecodedImages, room_mb
from elastic_trainer.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf

_IMPORTANCE_STREAM = 1_000_003  # seeds from here on are for importance batches, smaller ones for epochs


class Batch:
    """Images of one split, each in one view; they are read and made when they are asked for.

    Args:
        decoded: all images of the split.
        augmentation: makes the views.
        rows, views: see below.

    Attributes:
        rows: int64 [batch], which images of the split they are.
        views: int64 [batch], the view that each shows.
        labels: tf.Tensor int32 [batch].
        make: returns `images`.
    """

    def __init__(self, decoded: DecodedImages, augmentation: Augmentation, rows: np.ndarray, views: np.ndarray) -> None:
        import tensorflow as tf

        self.rows, self.views, self.labels = rows, views, tf.constant(decoded.labels[rows])
        self.make: Callable[[], tf.Tensor] = lambda: augmentation.show(decoded.images[rows], rows, views)

    @cached_property
    def images(self) -> tf.Tensor:
        """Float32 [batch, size, size, 3] in 0…255."""
        return self.make()

    @property
    def is_shown(self) -> bool:
        """Whether the images were asked for."""
        return "images" in vars(self)


class ImageOrder(NamedTuple):
    """Training images in an order, each in one view: `rows` and `views` are int64 [n], as of a `Batch`."""

    rows: np.ndarray
    views: np.ndarray

    def after(self, count: int) -> ImageOrder:
        """Without the first `count`."""
        return ImageOrder(self.rows[count:], self.views[count:])


class ImageData:
    """A data set at one input size and batch size.

    Args:
        name: of the data set.
        class_names: in the order of the labels.
        train, test: the images of both splits.
        batch_size: images per step.
        seed: of the training order and of augmentation.
        fingerprints: of the training and the test images, see `images.fingerprint`.
        augment, cached_views: kind and number of views of training images, see `Augmentation`.
        image_memory: MB that images and their features may take in memory, see `images.room_mb`.

    Attributes:
        num_classes: number of classes of the data set itself; a network may have more outputs.
        train_count, test_count: number of images in each split.
        input_size: height and width in pixels.
        steps_per_epoch: training batches per epoch; an incomplete last batch is dropped.
        skipped_images: number of broken images in both splits; no other count includes them.
        view_count: number of views of each training image; None if every epoch has a new one.

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
        augment: str = "none",
        cached_views: int | None = None,
        image_memory: float | None = None,
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
        self._fingerprints, self._image_memory = fingerprints, image_memory
        self._augmentation = Augmentation(augment, seed, self.train_count, cached_views)
        self.view_count = self._augmentation.view_count

    def record(self) -> dict[str, Any]:
        """What config.json keeps, so that a run is not continued with other images."""
        training, test = self._fingerprints
        return {"class_names": [*self.class_names], "training_images": training, "test_images": test}

    def train(self, epoch: int, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
        """The batches of epoch `epoch`, shuffled by seed and epoch: at most `count`, without the first `skip`.

        All are of full batch size. Of images in a file, the next batch's are read in the background once a batch's
        images were asked for.
        """
        return self._shuffled(epoch, skip, count)

    def order(self, epoch: int, skip: int = 0, count: int | None = None) -> ImageOrder:
        """The images of the batches that `train` yields for the same arguments, one after the other."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.train_count)
        end = self.steps_per_epoch if count is None else min(skip + count, self.steps_per_epoch)
        rows = order[skip * self.batch_size : end * self.batch_size]
        return ImageOrder(rows, self._augmentation.views(epoch)[rows])

    def distinct_views(self, steps: int) -> float:
        """How many different views of different images so many steps are expected to show.

        An epoch shows every image once, in a view drawn at random.
        """
        epochs = steps * self.batch_size / self.train_count
        if self.view_count is None or epochs <= 1:
            return steps * self.batch_size
        return self.train_count * self.view_count * (1 - (1 - 1 / self.view_count) ** epochs)

    @property
    def room_mb(self) -> float:
        """MB that may be taken in memory besides the images (`--image_memory`)."""
        in_memory = (part.images for part in (self._train, self._test) if not isinstance(part.images, np.memmap))
        return room_mb(self._image_memory, sum(images.nbytes for images in in_memory) / 1e6)

    @property
    def test_batches(self) -> int:
        """How many batches of test images there are; the last may be smaller."""
        return -(-self.test_count // self.batch_size)

    @property
    def guessing_loss(self) -> float:
        """Cross-entropy of predicting each class's share of the training images, whatever the image."""
        shares = np.bincount(self._train.labels) / self.train_count
        return float(-np.sum(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))))

    def training_images(self, rows: np.ndarray, views: np.ndarray) -> tf.Tensor:
        """Training images float32 [n, size, size, 3] in 0…255.

        Args:
            rows: int [n], which images; those of `Batch.rows`.
            views: int [n], the view of each.
        """
        return self._augmentation.show(self._train.images[rows], rows, views)

    def importance_batches(self, index: int, count: int = 1) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Training batches for the `index`-th evaluation of importance; their order is independent of the epochs'.

        Returns:
            `count` pairs of images float32 [batch, size, size, 3] in 0…255, augmented as in training, and labels int32
            [batch]; or fewer if an epoch has fewer.
        """
        return [(batch.images, batch.labels) for batch in self._shuffled(_IMPORTANCE_STREAM + index, 0, count)]

    def test(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """All test images as they are, in a fixed order, as pairs like those of `importance_batches`.

        The last batch may be smaller.
        """
        order = np.arange(self.test_count)
        as_they_are = Augmentation("none", self.seed, self.test_count)
        for batch in self._batches(self._test, as_they_are, order, np.zeros_like(order)):
            yield batch.images, batch.labels

    def _shuffled(self, stream: int, skip: int, count: int | None) -> Iterator[Batch]:
        order = self.order(stream, skip, count)
        return self._batches(self._train, self._augmentation, order.rows, order.views)

    def _batches(
        self, decoded: DecodedImages, augmentation: Augmentation, rows: np.ndarray, views: np.ndarray
    ) -> Iterator[Batch]:
        """Images in memory need no tf.data, which takes 1 to 2 ms for each batch."""
        parts = (slice(start, start + self.batch_size) for start in range(0, len(rows), self.batch_size))
        batches = (Batch(decoded, augmentation, rows[part], views[part]) for part in parts)
        return _made_ahead(batches)


def _made_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same; while the images of batches are asked for, each is made in the background during the one before."""
    with ThreadPoolExecutor(1) as reader:
        is_wanted = False
        for batch, following in pairwise(chain(batches, [None])):
            assert batch is not None
            if following is not None and is_wanted:
                following.make = reader.submit(following.make).result
            yield batch
            is_wanted = batch.is_shown
