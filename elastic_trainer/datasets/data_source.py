"""A data set whose images have not been read yet: what each reader (digits, tfds, image_folder) returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic_trainer.datasets.images import ImageFiles

# Readers that split a data set themselves use this seed, whatever --seed is. All runs then share one test split: their
# accuracies can be compared, and the weights of one run have never seen the test images of another.
SPLIT_SEED = 0


class DataSource(NamedTuple):
    """The images of both splits, not yet read; a label is an index into `class_names`."""

    class_names: Sequence[str]
    train: ImageFiles
    test: ImageFiles
