"""Random changes of training images, as views: numbered variants of each image that can be made again at any time.

What an image looks like in an epoch depends only on the seed, the epoch and the image. So a resumed run sees what an
unbroken one would have seen, and what a network computes from a view can be kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

MAX_ROTATION = 0.2  # of a turn, either way
FIRST_CROP, EPOCHS_A_CROP = 8, 2  # epochs: in short runs, crops gain nothing (docs/log/head_first.md)
LEAST_AREA = 0.25  # of a crop, as a share of the image's
WHOLE = np.array([0, 0, 1, 1], np.float32)  # of an image: top, left, bottom, right
# Last word of a random seed. Not 0: that seed draws the order of an epoch's images.
_CHOICE, _PARAMETERS = 1, 2
_VIEW_COUNTS = {"none": 1, "flip": 2, "flip_crop": 8, "flip_rotate": None}


class Augmentation:
    """The views of `count` training images: `view_count` of each, or None if every epoch has a new one.

    "none": an image as it is. "flip" (paper): view 1 is mirrored left-right. "flip_crop": after 8 epochs, another
    random crop joins these two every 2 epochs; every second one is mirrored. "flip_rotate" (the paper's published
    scripts): each view is mirrored or not, then rotated by up to ±0.2 of a turn, both at random.
    """

    def __init__(self, kind: str, seed: int, count: int) -> None:
        self.view_count = _VIEW_COUNTS[kind]
        self._seed, self._count = seed, count

    def views(self, epoch: int) -> np.ndarray:
        """The view, int64 [images], that each image shows in an epoch: drawn at random, or new if there is no limit."""
        if self.view_count is None:
            return np.full(self._count, epoch)
        count = self._views_in(np.array(epoch))
        return np.random.default_rng([self._seed, epoch, _CHOICE]).integers(count, size=self._count)

    def views_seen(self, first: int, epochs: float) -> float:
        """How many of an image's views are expected to be shown in so many epochs, from epoch `first` on."""
        each = np.arange(math.ceil(epochs))
        counts = self._views_in(first + each)
        missed = (1 - 1 / counts) ** np.minimum(epochs - each, 1)  # the chance that an epoch shows another of its views
        return float(sum(1 - np.prod(missed[counts > view]) for view in range(counts.max())))

    def _views_in(self, epochs: np.ndarray) -> np.ndarray:
        """How many of an image's views each of `epochs` draws from, int of their shape; `view_count` is known."""
        most = self.view_count or 1
        return np.clip(3 + (epochs - FIRST_CROP) // EPOCHS_A_CROP, min(most, 2), most)

    def show(self, pixels: np.ndarray, rows: np.ndarray, views: np.ndarray) -> tf.Tensor:
        """Images float32 [batch, size, size, 3] in 0…255: the training images `rows`, each in its view.

        `pixels`, uint8, are the images as they were read.
        """
        import tensorflow as tf

        is_mirrored, turns, boxes = views % 2 == 1, np.zeros(len(rows)), np.tile(WHOLE, (len(rows), 1))
        for view in np.unique(views):
            shown = views == view
            if self.view_count is None:
                is_mirrored[shown], turns[shown] = (values[rows[shown]] for values in self._turns(int(view)))
            elif view > 1:
                boxes[shown] = self._crops(int(view))[rows[shown]]
        mirrored = pixels.copy()
        columns = np.arange(pixels.shape[2])[::-1]
        mirrored[is_mirrored] = pixels[is_mirrored].take(columns, axis=2)  # four times as fast as a slice of step -1
        images = tf.cast(tf.constant(mirrored), tf.float32)
        if (boxes != WHOLE).any():
            images = tf.image.crop_and_resize(images, boxes, np.arange(len(rows)), images.shape[1:3])
        return rotated(images, turns) if turns.any() else images

    def _turns(self, view: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether each training image is mirrored in a view, bool [images], and its rotation in turns, float64.

        They are drawn for all images at once: one generator for each image would take 20 µs.
        """
        rng = np.random.default_rng([self._seed, view, _PARAMETERS])
        return rng.random(self._count) < 0.5, rng.uniform(-MAX_ROTATION, MAX_ROTATION, self._count)

    def _crops(self, view: int) -> np.ndarray:
        """The part of each training image that a view shows, float32 [images, 4]: top, left, bottom, right in 0…1."""
        rng = np.random.default_rng([self._seed, view, _PARAMETERS])
        side = np.sqrt(rng.uniform(LEAST_AREA, 1, self._count))
        top, left = rng.uniform(0, 1 - side), rng.uniform(0, 1 - side)
        return np.stack([top, left, top + side, left + side], axis=1).astype(np.float32)


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
