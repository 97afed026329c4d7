"""Warnings about copies: of a training image among those that test, and of one photo in two classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_trainer.datasets.images import DecodedImages
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.errors import printable
from elastic_trainer.registry import DATASETS


def warn_of_copies(name: str, source: DataSource, images: Sequence[DecodedImages]) -> None:
    """Print a line for each part that has training images, and one if a photo is in two classes.

    Args:
        name: of the data set.
        source: its images.
        images: those of `source.parts()`, read.
    """
    train, *others = images
    for part, found in zip([*source.parts()][1:], others, strict=True):
        shared = int(np.isin(found.digests, train.digests).sum())
        if shared:
            print(f"warning: {name}: {shared} of {len(found.labels)} {part} images are training images too")
    pairs = _in_two_classes(source, images) if DATASETS[name].is_folder else []
    if pairs:
        more = f" ({len(pairs)} photos are in two classes)" if len(pairs) > 1 else ""
        print(printable(f"warning: {' and '.join(pairs[0])} are one photo in two classes{more}; remove the wrong one"))


def _in_two_classes(source: DataSource, images: Sequence[DecodedImages]) -> list[tuple[str, str]]:
    """Two files of each photo that is in two classes."""
    first: dict[int, tuple[int, str]] = {}
    pairs: dict[int, tuple[str, str]] = {}
    for files, found in zip(source.parts().values(), images, strict=True):
        for number, label, place in zip(found.digests.tolist(), found.labels.tolist(), found.places, strict=True):
            known, path = first.setdefault(number, (label, files.files[place]))
            if known != label:
                pairs.setdefault(number, (path, files.files[place]))
    return [*pairs.values()]
