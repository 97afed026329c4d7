"""Reads data sets of tensorflow-datasets (TFDS), among them the three of the paper (section 6)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.errors import UserError
from elastic_trainer.machine import load_tensorflow

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def tfds_builder(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    """TFDS' builder of a data set. It knows the classes and the folder, whether or not the data set is prepared."""
    load_tensorflow()
    import tensorflow_datasets as tfds

    return tfds.builder(name, data_dir=data_dir)


def tfds_classes(name: str, data_dir: Path | None) -> list[str]:
    """Names of the classes of a data set, whether or not it is prepared."""
    return tfds_builder(name, data_dir).info.features["label"].names


def prepare_tfds(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    """Download a data set and write it in TFDS' format, unless that is done already; returns its builder.

    Raises:
        UserError: a download fails, or a file does not have the published checksum. The message says which files to
            download by hand, and where to put them.
    """
    builder = tfds_builder(name, data_dir)
    import tensorflow_datasets as tfds

    root = Path(builder.data_dir).parents[1]  # <root>/<name>/<version>
    downloads = root / "downloads"
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # the error below is enough; urllib3 warns at each attempt
    try:
        config = tfds.download.DownloadConfig(manual_dir=downloads / "manual")
        builder.download_and_prepare(download_dir=downloads, download_config=config)
    except Exception as error:  # TFDS raises many types when a download or a file fails
        why = " ".join(str(error).split())[:300] or type(error).__name__
        files = {info.filename: f"{info.filename} from {url}" for url, info in builder.url_infos.items()}
        raise UserError(
            f"--dataset_name {name}: not prepared in {root}, and downloading or preparing it failed ({why}); prepare "
            "it on a machine with a network (python data.py prepare) and copy it here (python data.py pack, unpack), "
            f"or put into {downloads / 'manual'}: {', '.join(files.values())}"
        ) from error
    return builder


def read_tfds(name: str, data_dir: Path | None) -> DataSource:
    """The train and test splits of a data set, prepared first if necessary.

    Raises:
        UserError: see `prepare_tfds`.
    """
    import tensorflow_datasets as tfds

    builder = prepare_tfds(name, data_dir)
    config = tfds.ReadConfig(interleave_cycle_length=1)  # the same order on every machine
    decoders = tfds.decode.PartialDecoding(
        {"image": True, "label": True}, decoders={"image": tfds.decode.SkipDecoding()}
    )

    def examples(split: str) -> Iterator[tuple[bytes, int]]:
        for example in tfds.as_numpy(
            builder.as_dataset(split=split, decoders=decoders, read_config=config, shuffle_files=False)
        ):
            yield example["image"], int(example["label"])

    train, test = (
        ImageFiles(split.num_examples, partial(examples, split.name), [str(path) for path in split.filepaths])
        for split in (builder.info.splits["train"], builder.info.splits["test"])
    )
    return DataSource(builder.info.features["label"].names, train, test)
