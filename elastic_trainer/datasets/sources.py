"""Reads the digits of scikit-learn, which need no download, and the paper's data sets, of tensorflow-datasets (TFDS).

`image_folder` reads the user's photos.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError, importing
from elastic_trainer.system.machine import load_tensorflow

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

_SPLIT_SEED = 0  # of the digits, whatever --seed is: runs of every seed are tested on the same images
DIGITS = [str(digit) for digit in range(10)]
ANSWER_SECONDS = 15  # that the host of a data set may take


class DataSource(NamedTuple):
    """The images of all parts, not yet read; a label is an index into `class_names`.

    `test` chooses the best model, and tests it unless `tested_later` images do, once, after training. There may be none
    to train on where a model is only tested.
    """

    class_names: Sequence[str]
    train: ImageFiles
    test: ImageFiles
    test_fraction: float | None = None  # instead of `test`: the share of `train` that is for testing, by its content
    tested_later: int = 0
    notes: Sequence[str] = ()  # lines for the user

    @property
    def training_count(self) -> int:
        """About how many images are for training."""
        return self.train.count - round((self.test_fraction or 0.0) * self.train.count)


def read_digits(_: Settings) -> DataSource:
    """The 1,797 digits (8×8, grey) as RGB images, half of them for training, stratified by class."""
    with importing("--dataset_name digits"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.repeat(np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    parts = train_test_split(images, digits.target, test_size=0.5, stratify=digits.target, random_state=_SPLIT_SEED)
    train, test = (
        ImageFiles(len(labels), partial(zip, pixels, labels.tolist(), strict=True))
        for pixels, labels in ((parts[0], parts[2]), (parts[1], parts[3]))
    )
    return DataSource(DIGITS, train, test)


# --- tensorflow-datasets ----------------------------------------------------------------------------------------------


def _builder(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    load_tensorflow()
    with importing(f"--dataset_name {name}"):
        import tensorflow_datasets as tfds

    return tfds.builder(name, data_dir=data_dir)


def tfds_classes(settings: Settings) -> list[str]:
    """Names of the classes of a data set, whether or not it is prepared."""
    return _builder(settings.dataset_name, settings.data_dir).info.features["label"].names


def prepare_tfds(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    """Download a data set and write it in TFDS' format, unless that is done already; returns its builder.

    Raises `UserError`, which says what to download by hand and where to put it, if a download fails, or if a file does
    not have the published checksum.
    """
    builder = _builder(name, data_dir)
    import requests
    import tensorflow_datasets as tfds

    root = Path(builder.data_dir).parents[1]
    manual = root / "downloads/manual"
    are_there = all((manual / info.filename).is_file() for info in builder.url_infos.values())
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # the error below is enough; urllib3 warns at each attempt
    try:
        if not are_there and not Path(builder.data_dir).is_dir():  # TFDS itself tries for minutes
            requests.head(next(iter(builder.url_infos)), timeout=ANSWER_SECONDS)
        config = tfds.download.DownloadConfig(manual_dir=manual)
        builder.download_and_prepare(download_dir=root / "downloads", download_config=config)
    except Exception as error:  # TFDS raises many types when a download or a file fails
        why = " ".join(str(error).split())[:300] or type(error).__name__
        urls = {info.filename: url for url, info in builder.url_infos.items()}  # of one of its hosts
        files = ", ".join(f"{file} from {url}" for file, url in urls.items())
        raise UserError(
            f"--dataset_name {name}: not prepared in {root}, and downloading or preparing it failed ({why}); prepare "
            f"it on a machine with a network (python data.py prepare --dataset_name {name}) and copy its folder to "
            f"{root / name}, or put into {manual}: {files} (ImageNet's weights are another file: docs/offline.md); "
            "python main.py --dataset_name digits needs no download"
        ) from error
    return builder


def read_tfds(settings: Settings) -> DataSource:
    """The train and test splits of a data set, prepared first if necessary."""
    builder = prepare_tfds(settings.dataset_name, settings.data_dir)
    import tensorflow_datasets as tfds

    config = tfds.ReadConfig(interleave_cycle_length=1)  # the same order on every machine
    features = {"image": True, "label": True}
    decoders = tfds.decode.PartialDecoding(features, decoders={"image": tfds.decode.SkipDecoding()})

    def examples(split: str) -> Iterator[tuple[bytes, int]]:
        images = builder.as_dataset(split=split, decoders=decoders, read_config=config, shuffle_files=False)
        for example in tfds.as_numpy(images):
            yield example["image"], int(example["label"])

    train, test = (
        ImageFiles(builder.info.splits[part].num_examples, partial(examples, part)) for part in ("train", "test")
    )
    return DataSource(builder.info.features["label"].names, train, test)
