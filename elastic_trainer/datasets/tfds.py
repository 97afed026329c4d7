"""Data sets of tensorflow-datasets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import utils
from elastic_trainer.datasets.image_data import DataSource
from elastic_trainer.datasets.images import Encoded
from utils import UserError

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def tfds_builder(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    """TFDS' builder of a data set: knows its classes, and where it is or would be prepared."""
    utils.load_tensorflow()
    import tensorflow_datasets as tfds

    return tfds.builder(name, data_dir=data_dir)


def prepare_tfds(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    """The builder of a data set that is prepared, downloaded if it was not.

    Raises:
        UserError: a download fails or is not what its author published; says which file can be put where by hand.
    """
    builder = tfds_builder(name, data_dir)
    import tensorflow_datasets as tfds

    root = Path(builder.data_dir).parents[1]  # <root>/<name>/<version>
    downloads = root / "downloads"
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # what is wrong is said once, not at every new attempt
    try:
        config = tfds.download.DownloadConfig(manual_dir=downloads / "manual")
        builder.download_and_prepare(download_dir=downloads, download_config=config)
    except Exception as error:  # TFDS raises many kinds when a download or a file fails
        why = " ".join(str(error).split())[:300] or type(error).__name__
        files = {info.filename: f"{info.filename} from {url}" for url, info in builder.url_infos.items()}
        raise UserError(
            f"--dataset_name {name}: not prepared in {root}, and downloading or preparing it failed ({why}); prepare "
            "it where there is a network (python data.py prepare) and "
            f"carry it here (pack, unpack), or put into {downloads / 'manual'}: {', '.join(files.values())}"
        ) from error
    return builder


def read_tfds(name: str, data_dir: Path | None) -> DataSource:
    import tensorflow_datasets as tfds

    builder = prepare_tfds(name, data_dir)
    config = tfds.ReadConfig(interleave_cycle_length=1)  # one order on every machine
    decoders = tfds.decode.PartialDecoding(
        {"image": True, "label": True}, decoders={"image": tfds.decode.SkipDecoding()}
    )

    def examples(split: str) -> Iterator[tuple[bytes, int]]:
        for example in tfds.as_numpy(
            builder.as_dataset(split=split, decoders=decoders, read_config=config, shuffle_files=False)
        ):
            yield example["image"], int(example["label"])

    train, test = (
        Encoded(split.num_examples, partial(examples, split.name), [str(path) for path in split.filepaths])
        for split in (builder.info.splits["train"], builder.info.splits["test"])
    )
    return DataSource(builder.info.features["label"].names, train, test)
