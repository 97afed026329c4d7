"""Random changes of training images, as views: numbered variants of each image that can be made again at any time.

What an image looks like in an epoch depends only on the seed, the epoch and the image. So a resumed run sees what an
unbroken one would have seen, and what a network computes from a view can be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

MAX_ROTATION = 0.2  # of a turn, either way
# Last word of a random seed. Not 0: that seed draws the order of an epoch's images.
_CHOICE, _PARAMETERS = 1, 2
_VIEW_COUNTS = {"none": 1, "flip": 2, "flip_rotate": None}


class Augmentation:
    """The views of `count` training images: `view_count` of each, or None if every epoch has a new one.

    "none": an image as it is. "flip" (paper): view 1 is mirrored left-right. "flip_rotate" (the paper's published
    scripts): each view is mirrored or not, then rotated by up to ±0.2 of a turn, both at random.
    """

    def __init__(self, kind: str, seed: int, count: int) -> None:
        self.view_count = _VIEW_COUNTS[kind]
        self._seed, self._count = seed, count

    def views(self, epoch: int) -> np.ndarray:
        """The view, int64 [images], that each image shows in an epoch: drawn at random, or new if there is no limit."""
        if self.view_count is None:
            return np.full(self._count, epoch)
        return np.random.default_rng([self._seed, epoch, _CHOICE]).integers(self.view_count, size=self._count)

    def show(self, pixels: np.ndarray, rows: np.ndarray, views: np.ndarray) -> tf.Tensor:
        """Images float32 [batch, size, size, 3] in 0…255: the training images `rows`, each in its view.

        `pixels`, uint8, are the images as they were read.
        """
        import tensorflow as tf

        is_mirrored, turns = views == 1, np.zeros(len(rows))
        if self.view_count is None:
            for view in np.unique(views):
                shown = views == view
                is_mirrored[shown], turns[shown] = (values[rows[shown]] for values in self._turns(int(view)))
        mirrored = pixels.copy()
        columns = np.arange(pixels.shape[2])[::-1]
        mirrored[is_mirrored] = pixels[is_mirrored].take(columns, axis=2)  # four times as fast as a slice of step -1
        images = tf.cast(tf.constant(mirrored), tf.float32)
        return rotated(images, turns) if self.view_count is None else images

    def _turns(self, view: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether each training image is mirrored in a view, bool [images], and its rotation in turns, float64.

        They are drawn for all images at once: one generator for each image would take 20 µs.
        """
        rng = np.random.default_rng([self._seed, view, _PARAMETERS])
        return rng.random(self._count) < 0.5, rng.uniform(-MAX_ROTATION, MAX_ROTATION, self._count)


def rotated(images: tf.Tensor, turns: np.ndarray) -> tf.Tensor:
    """Images float32 [batch, height, width, 3], each rotated by its own share of a turn, as Keras' RandomRotation does.

    The centre stays in place; values between pixels are interpolated, and the image is reflected at its edges.
    """
    import keras

    angles = 2 * np.pi * turns
    cos, sin, zero = np.cos(angles), np.sin(angles), np.zeros(len(angles))
    y, x = ((side - 1) / 2 for side in images.shape[1:3])
    # Where each pixel comes from: the rows of a matrix that leaves the centre (x, y) where it is.
    matrix = np.stack([cos, -sin, x - x * cos + y * sin, sin, cos, y - x * sin - y * cos, zero, zero], axis=1)
    return keras.ops.image.affine_transform(images, matrix.astype(np.float32), "bilinear", "reflect")
