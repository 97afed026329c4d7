"""A head without gradients: the linear discriminant of what the network returns below its head.

Features of a class are taken to be normal, with one covariance for all classes: the logit of class c is then
μ_c'Σ⁻¹x − μ_c'Σ⁻¹μ_c/2 + log π_c, with its mean μ_c and its share π_c of the images. Σ is shrunk towards a multiple of
the identity (Ledoit and Wolf, J. Multivariate Analysis 2004), and all logits are scaled by one number (Guo et al., ICML
2017). Both are chosen on training images that are held back for that.

All that it needs of images are sums of their features, which add up over the parts of a data set. So many boards
together get the head of all their images, and no image, and no feature of a single one, leaves a board (Fed3R, Fanì et
al., arXiv 2406.01116). The scatter is that within classes, around the means of the part, which keeps its precision in
float32; where parts meet, what lies between their means is added.

A board gets a copy of this file (`board.export`), so it imports nothing but NumPy, and runs on Python 3.6.
"""

from typing import List, NamedTuple, Sequence, Tuple

import numpy as np

SHRINKAGES = (0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
SCALES = np.geomspace(0.02, 2, 24)  # of logits
HELD_BACK = 5  # one image in HELD_BACK of each class
SURE = 0.01  # a loss at which the scale of logits is not known: training has shaped the features of images held back
NO_IMAGES = -1e4  # bias of a class without images


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of matrices. On some Arm processors NumPy warns of errors in it that did not happen (its issue 28687)."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        result: np.ndarray = left @ right
    return result


class Head(NamedTuple):
    """A dense layer: float32 `kernel` [features, classes] and `bias` [classes]."""

    kernel: np.ndarray
    bias: np.ndarray

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Of features [n, features]: [n, classes]."""
        return product(features, self.kernel) + self.bias


class FeatureSums(NamedTuple):
    """Sums over images: `counts` int64 [classes], `means` float64 [classes, features] of each class (0 without images),
    and `within` float32 [features, features], the sum of (x − mean of its class)(x − mean of its class)'.
    """

    counts: np.ndarray
    means: np.ndarray
    within: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray, labels: np.ndarray, classes: int) -> "FeatureSums":
        """Of features float32 [n, features] and labels int [n]; n may be 0."""
        counts = np.bincount(labels, minlength=classes)
        centre = features.mean(axis=0) if len(features) else np.zeros(features.shape[1], np.float32)
        centred = features - centre
        means = np.zeros((classes, features.shape[1]), np.float32)
        np.add.at(means, labels, centred)
        means /= np.maximum(counts, 1)[:, None].astype(np.float32)
        centred -= means[labels]
        means = np.where(counts[:, None], means.astype(np.float64) + centre, 0.0)
        return cls(counts, means, product(centred.T, centred))

    @classmethod
    def together(cls, parts: Sequence["FeatureSums"]) -> "FeatureSums":
        """Of all images of at least one part."""
        counts = np.sum([part.counts for part in parts], axis=0)
        weighted = np.sum([part.counts[:, None] * part.means for part in parts], axis=0)
        means = weighted / np.maximum(counts, 1)[:, None]
        within = np.asarray(np.sum([part.within for part in parts], axis=0, dtype=np.float32))
        for part in parts:
            apart = (np.sqrt(part.counts)[:, None] * (part.means - means)).astype(np.float32)
            within += product(apart.T, apart)
        return cls(counts, means, within)

    def heads(self, shrinkages: Sequence[float]) -> List[Head]:
        """The linear discriminant for each shrinkage of the covariance, from 0 (as it is) to 1 (a multiple of the
        identity); there must be images. Raises `LinAlgError` if the sums are not finite."""
        count, features = int(self.counts.sum()), self.means.shape[1]
        centre = self.counts @ self.means / count
        means = np.where(self.counts[:, None], self.means - centre, 0.0).astype(np.float32)
        covariance = self.within / np.float32(count)
        if not np.isfinite(covariance).all():  # some libraries solve it nevertheless
            raise np.linalg.LinAlgError("the sums of the features are not finite")
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


def fit_head(features: np.ndarray, labels: np.ndarray, classes: int) -> Head:
    """The linear discriminant of features float32 [n, features] and labels int [n].

    Of `classes` outputs, those without an image get the smallest logits.
    """
    is_held = held_back(labels)
    losses = np.zeros((len(SHRINKAGES), len(SCALES)))
    if is_held.any():
        heads = FeatureSums.of(features[~is_held], labels[~is_held], classes).heads(SHRINKAGES)
        losses = held_losses(heads, features[is_held], labels[is_held])
    return FeatureSums.of(features, labels, classes).head(*chosen(losses))


def mean_head(trained: Head, closed: Head, is_scaled: np.ndarray, loss: float) -> Head:
    """The mean of a trained head and of the closed form, which has this mean `loss` on images.

    Outputs that are not bool [classes] `is_scaled` stay as trained. Where the closed form is `SURE`, its scale means
    nothing: the mean then has the spread of the trained head, which changes no prediction, but how sure it is.
    """
    mean = Head((trained.kernel + closed.kernel) / 2, (trained.bias + closed.bias) / 2)
    spread, wide = (_spread(each.kernel[:, is_scaled]) for each in (trained, mean))
    factor = np.float32(spread / wide if loss < SURE and spread < wide else 1.0)
    kernel, bias = np.where(is_scaled, factor * mean.kernel, trained.kernel), factor * mean.bias
    return Head(kernel, np.where(is_scaled, bias, trained.bias))


def _spread(kernel: np.ndarray) -> float:
    """How far the outputs of a kernel [features, classes] are apart."""
    return float(np.linalg.norm(kernel - kernel.mean(axis=1, keepdims=True)))


def held_back(labels: np.ndarray) -> np.ndarray:
    """Bool [n], the images of labels int [n] by which shrinkage and scale are chosen."""
    turn = np.zeros(len(labels), int)
    order = np.random.default_rng(0).permutation(len(labels))
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        turn[of_class] = np.arange(len(of_class))
    return turn % HELD_BACK == HELD_BACK - 1


def held_losses(heads: Sequence[Head], features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The loss [SHRINKAGES, SCALES] of all images held back, added up, with the head for each shrinkage."""
    held_logits = [head.logits(features) for head in heads]
    return np.array(
        [[len(labels) * cross_entropy(scale * logits, labels) for scale in SCALES] for logits in held_logits]
    )


def chosen(losses: np.ndarray) -> Tuple[float, float]:
    """The shrinkage and the scale of the smallest of `losses`, as of `held_losses`; where all are 0, the default."""
    if not losses.any():  # no class has enough images
        return max(SHRINKAGES), 1.0
    shrinkage, scale = np.unravel_index(np.argmin(losses), losses.shape)
    return SHRINKAGES[shrinkage], float(SCALES[scale])


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """The mean over logits [n, classes] and labels int [n]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]))
