"""A data set whose images are in memory or in a file, as shuffled batches (`batches`), augmented (`augmentation`).

The digests of the images that a model was trained on are recorded in its run's folder, so that none of them tests it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.datasets.augmentation import Augmentation
from elastic_trainer.datasets.batches import Order, ShuffledData
from elastic_trainer.datasets.images import Images, evenly
from elastic_trainer.settings import TRAINED_IMAGES
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import atomic_path, trusting

if TYPE_CHECKING:
    import tensorflow as tf


class ImageData(ShuffledData):
    """A data set at one input size and batch size. Inputs of a batch are images float32 [batch, size, size, 3] in
    0…255, targets are labels int32 [batch].

    Args:
        name: of the data set.
        class_names: in the order of the labels.
        train, test: the images of both splits.
        batch_size: images per step.
        seed: of the training order and of augmentation.
        augment: kind of views of training images, see `Augmentation`.
        tested_later: how many other images test the best model after training; then `test` only chooses it.

    Raises `UserError` if there are training images, but fewer than a batch needs.
    """

    def __init__(
        self,
        name: str,
        class_names: Sequence[str],
        train: Images,
        test: Images,
        batch_size: int,
        seed: int = 0,
        augment: str = "none",
        tested_later: int = 0,
    ) -> None:
        super().__init__(name, (train, train.labels, None), (test, test.labels, None), batch_size, seed)
        self.train_images, self.test_images = train, test
        self.class_names, self.num_classes = tuple(class_names), len(class_names)
        self.input_size, self.tested_later = train.pixels.shape[1], tested_later
        self.training_digests = np.unique(train.digests)
        self._augmentation = Augmentation(augment, seed, self.train_count)
        self.view_count = self._augmentation.view_count

    def record(self) -> dict[str, Any]:
        """What config.json keeps, so that a run is not continued with other images."""
        own = {"training_images": _fingerprint(self.train_images), "test_images": _fingerprint(self.test_images)}
        return {"class_names": [*self.class_names], **own}

    @property
    def counts(self) -> str:
        """How many images each part has, in words."""
        if not self.tested_later:
            return f"{self.train_count} training and {self.test_count} test images"
        return f"{self.train_count} training, {self.test_count} validation and {self.tested_later} test images"

    def leave_out_of_test(self, digests: np.ndarray) -> int:
        """Test without the images that have one of these `digests`, uint64. Returns how many are left out."""
        before = self.test_count
        self.test_images = test = self.test_images.part(~np.isin(self.test_images.digests, digests))
        self._test, self.test_count = (test, test.labels, None), len(test)
        return before - self.test_count

    def views(self, epoch: int) -> np.ndarray:
        return self._augmentation.views(epoch)

    def views_seen(self, first: int, epochs: float) -> float:
        return self._augmentation.views_seen(first, epochs)

    def training_inputs(self, order: Order) -> tf.Tensor:
        return self._augmentation.show(self.train_images[order.rows], *order)

    def test_inputs(self, rows: np.ndarray) -> tf.Tensor:
        import tensorflow as tf

        return tf.cast(super().test_inputs(rows), tf.float32)

    def images_to_calibrate(self, most: int) -> np.ndarray:
        """At most this many images to train on as they are, evenly spread; where none train, of those that test.

        Returns float32 [images, size, size, 3] in 0…255.
        """
        images = self.train_images if self.train_count else self.test_images
        return images[evenly(len(images), most)].astype(np.float32)

    @property
    def guessing_loss(self) -> float:
        """Cross-entropy of predicting each class's share of the training images, whatever the image."""
        shares = np.unique(self.train_images.labels, return_counts=True)[1] / self.train_count
        return float(-np.sum(shares * np.log(shares)))


def _fingerprint(images: Images) -> str:
    """The number of images, and a digest of their content, order and labels; of their files' names only the order."""
    total = hashlib.sha256(images.digests.astype("<u8").tobytes() + images.labels.astype("<i4").tobytes())
    return f"{len(images)}, digest {total.hexdigest()[:16]}"


# --- the images that a model was trained on, so that none tests it ----------------------------------------------------


def trained_images(model: Path) -> np.ndarray:
    """Digests, uint64, of the images that a model was trained on; none if that is not recorded.

    `model` is a file of weights, or the folder of a run; it need not exist. Raises `UserError` for a damaged record.
    """
    path = (model if model.is_dir() else model.parent) / TRAINED_IMAGES
    if not path.is_file():
        return np.zeros(0, np.uint64)
    with trusting(path):
        return np.frombuffer(path.read_bytes(), "<u8")


def write_trained_images(folder: Path, digests: np.ndarray, earlier: np.ndarray) -> None:
    """Record in a run's folder which images its model is trained on, unless they are recorded already.

    Both uint64: `digests` of its training images, `earlier` of those of the weights that it starts from.
    """
    path = folder / TRAINED_IMAGES
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_bytes(np.union1d(digests, earlier).astype("<u8").tobytes())


def leave_out_trained(dataset: ImageData, model: Path, flag: str) -> None:
    """Leave the images that `model` was trained on out of the tests of `dataset`, and print how many they are.

    Raises `UserError` if no test image is left; `flag` named the model.
    """
    count, name = dataset.test_count, "validation" if dataset.tested_later else "test"
    trained = dataset.leave_out_of_test(trained_images(model))
    if trained == count:
        raise UserError(f"{flag} {model}: was trained on all {count} {name} images; give images that it has not seen")
    if trained:
        print(f"{flag} {model}: was trained on {trained} of {count} {name} images; they are left out of the test")
