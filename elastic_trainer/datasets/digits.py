"""The handwritten digits that come with scikit-learn: a data set that needs no download."""

from __future__ import annotations

from functools import partial

import numpy as np

from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.datasets.sources import DataSource

_SPLIT_SEED = 0  # whatever --seed is: runs of every seed are tested on the same images


def read_digits() -> DataSource:
    """The 1,797 digits (8×8, grey) as RGB images, half of them for training, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.repeat(np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    parts = train_test_split(images, digits.target, test_size=0.5, stratify=digits.target, random_state=_SPLIT_SEED)
    train, test = (
        ImageFiles(len(labels), partial(zip, pixels, labels.tolist(), strict=True))
        for pixels, labels in ((parts[0], parts[2]), (parts[1], parts[3]))
    )
    return DataSource([str(digit) for digit in range(10)], train, test)
