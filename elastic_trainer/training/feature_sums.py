"""What the closed-form head needs of images: sums of their features, which add up over the parts of a data set.

So many boards together get the head of all their images, and no image, and no feature of a single one, leaves a board
(Fed3R, Fanì et al., arXiv 2406.01116). The scatter is that within classes, around the means of the part, which keeps
its precision in float32; where parts meet, what lies between their means is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_IMAGES = -1e4  # bias of a class without images


class Head(NamedTuple):
    """A dense layer: float32 `kernel` [features, classes] and `bias` [classes]."""

    kernel: np.ndarray
    bias: np.ndarray

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Of features [n, features]: [n, classes]."""
        result: np.ndarray = features @ self.kernel + self.bias
        return result


class FeatureSums(NamedTuple):
    """Sums over images: `counts` int64 [classes], `means` float64 [classes, features] of each class (0 without images),
    and `within` float32 [features, features], the sum of (x − mean of its class)(x − mean of its class)'.
    """

    counts: np.ndarray
    means: np.ndarray
    within: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray, labels: np.ndarray, classes: int) -> FeatureSums:
        """Of features float32 [n, features] and labels int [n]; n may be 0."""
        counts = np.bincount(labels, minlength=classes)
        centre = features.mean(axis=0) if len(features) else np.zeros(features.shape[1], np.float32)
        centred = features - centre
        means = np.zeros((classes, features.shape[1]), np.float32)
        np.add.at(means, labels, centred)
        means /= np.maximum(counts, 1)[:, None].astype(np.float32)
        centred -= means[labels]
        return cls(counts, np.where(counts[:, None], means.astype(np.float64) + centre, 0.0), centred.T @ centred)

    @classmethod
    def together(cls, parts: Sequence[FeatureSums]) -> FeatureSums:
        """Of all images of at least one part."""
        counts = np.sum([part.counts for part in parts], axis=0)
        weighted = np.sum([part.counts[:, None] * part.means for part in parts], axis=0)
        means = weighted / np.maximum(counts, 1)[:, None]
        within = np.asarray(np.sum([part.within for part in parts], axis=0, dtype=np.float32))
        for part in parts:
            apart = (np.sqrt(part.counts)[:, None] * (part.means - means)).astype(np.float32)
            within += apart.T @ apart
        return cls(counts, means, within)

    def heads(self, shrinkages: Sequence[float]) -> list[Head]:
        """The linear discriminant for each shrinkage of the covariance, from 0 (as it is) to 1 (a multiple of the
        identity); there must be images."""
        count, features = int(self.counts.sum()), self.means.shape[1]
        centre = self.counts @ self.means / count
        means = np.where(self.counts[:, None], self.means - centre, 0.0).astype(np.float32)
        covariance = self.within / np.float32(count)
        variance = float(covariance.trace()) / features
        if (self.counts <= 1).all():  # images of a class do not differ, but classes do
            variance += float((self.counts @ (means.astype(np.float64) ** 2)).sum()) / (count * features)
        target = max(variance, 1e-12) * np.eye(features, dtype=np.float32)
        log_shares = np.log(np.maximum(self.counts, 1e-6) / count)
        found = []
        for shrinkage in shrinkages:
            kernel = np.linalg.solve((1 - shrinkage) * covariance + shrinkage * target, means.T)
            bias = log_shares - 0.5 * (means.T * kernel).sum(axis=0) - centre @ kernel
            found.append(Head(kernel.astype(np.float32), bias.astype(np.float32)))
        return found

    def head(self, shrinkage: float, scale: float) -> Head:
        """The discriminant with all logits times `scale`; classes without images get the smallest."""
        [head] = self.heads([shrinkage])
        bias = np.where(self.counts, head.bias * np.float32(scale), np.float32(NO_IMAGES))
        return Head(head.kernel * np.float32(scale), bias)
