"""Data sets as tf.data pipelines, all through one function: `load`.

Whatever the source, images reach the network as float32 [batch, size, size, 3] in 0…255 with int32 labels [batch].
The order of an epoch depends on the seed and the epoch's number alone, so a run can be repeated or taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from utils import UserError

TFDS_CLASSES = {"caltech_birds2011": 200, "oxford_iiit_pet": 37, "stanford_dogs": 120}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
DIGITS_SPLIT_SEED = 0  # one fixed split: runs with different seeds stay comparable
MAX_SHUFFLED = 10_000  # examples held in memory while shuffling
_PROBE_STREAM = 1_000_003  # keeps the seeds of importance batches apart from those of epochs


@dataclass(frozen=True)
class Split:
    """Examples not yet decoded.

    Attributes:
        examples: tf.data of (raw, label), in a fixed order.
        count: how many there are.
        decode: raw -> image [height, width, 3] of any size and type.
        shuffled: how many examples a shuffle may hold; encoded images are larger than paths.
        one_size: all images have one size, so that a batch can be decoded and resized in one go.
    """

    examples: tf.data.Dataset
    count: int
    decode: Callable[[tf.Tensor], tf.Tensor]
    shuffled: int = MAX_SHUFFLED
    one_size: bool = False


class ImageData:
    """A data set at one input size and batch size.

    Attributes:
        num_classes: number of classes of the data set itself.
        class_names: what they are called, in the order of the labels.
        train_count, test_count: images in each split.
        steps_per_epoch: training batches in an epoch; the incomplete last one is left out.
    """

    def __init__(
        self,
        name: str,
        num_classes: int,
        train: Split,
        test: Split,
        input_size: int,
        batch_size: int,
        seed: int,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if train.count < batch_size:
            raise UserError(
                f"--batch_size {batch_size}: {name} has only {train.count} training images; choose at most that"
            )
        self.name, self.num_classes = name, num_classes
        self.class_names = tuple(class_names or map(str, range(num_classes)))
        self.train_count, self.test_count = train.count, test.count
        self.input_size, self.batch_size, self.seed = input_size, batch_size, seed
        self.steps_per_epoch = train.count // batch_size
        self._train, self._test = train, test

    def train(self, epoch: int) -> tf.data.Dataset:
        """The batches of epoch `epoch`, shuffled by seed and epoch: (images, labels), all of full size."""
        return self._shuffled(epoch)

    def probe(self, index: int) -> tuple[tf.Tensor, tf.Tensor]:
        """A training batch for the `index`-th evaluation of importance, drawn apart from the epochs' order."""
        return next(iter(self._shuffled(_PROBE_STREAM + index).take(1)))

    def test(self) -> tf.data.Dataset:
        """All test images in a fixed order: (images, labels), the last batch as large as what is left."""
        return self._batches(self._test.examples, self._test, drop_remainder=False)

    def _shuffled(self, stream: int) -> tf.data.Dataset:
        seed = int(np.random.SeedSequence([self.seed, stream]).generate_state(1)[0]) >> 1
        buffer = min(self._train.count, self._train.shuffled)
        examples = self._train.examples.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)
        return self._batches(examples, self._train, drop_remainder=True)

    def _batches(self, examples: tf.data.Dataset, split: Split, drop_remainder: bool) -> tf.data.Dataset:
        size = (self.input_size, self.input_size)

        def prepare(raw: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = tf.image.resize(split.decode(raw), size)
            return tf.ensure_shape(images, (*images.shape[:-3], *size, 3)), tf.cast(label, tf.int32)

        if split.one_size:
            return examples.batch(self.batch_size, drop_remainder=drop_remainder).map(prepare).prefetch(2)
        examples = examples.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        return examples.batch(self.batch_size, drop_remainder=drop_remainder).prefetch(2)


def count_classes(name: str, data_dir: Path | None) -> int:
    """Number of classes of a data set, without loading it. Raises `UserError` as `load`."""
    if name == "digits":
        return 10
    if name in TFDS_CLASSES:
        return TFDS_CLASSES[name]
    folder = _image_folder(data_dir) / "train"
    classes = len(_class_folders(folder))
    if not classes:
        raise UserError(f"--data_dir {folder}: holds no folders; it needs one for each class")
    return classes


def load(
    name: str,
    input_size: int,
    batch_size: int,
    seed: int = 0,
    data_dir: Path | None = None,
    num_classes: int | None = None,
) -> ImageData:
    """A data set by the name that `--dataset_name` takes.

    Args:
        name: digits, caltech_birds2011, oxford_iiit_pet, stanford_dogs, or image_folder.
        input_size: height and width in pixels.
        batch_size: images a step.
        seed: of the training order.
        data_dir: for image_folder the folder with train/<class>/ and test/<class>/ or val/<class>/; for the TFDS
            names the folder of TFDS.
        num_classes: outputs of the network, at least as many as the data set has classes.

    Raises:
        UserError: the data set is not there, cannot be downloaded, or does not fit the other arguments.
    """
    own_classes = count_classes(name, data_dir)
    if num_classes is not None and num_classes < own_classes:
        raise UserError(
            f"--num_classes {num_classes}: {name} has {own_classes} classes; give at least that or leave it out"
        )
    class_names = None
    if name == "digits":
        train, test = _digits()
    elif name in TFDS_CLASSES:
        train, test, class_names = _tfds(name, data_dir)
    else:
        folder = _image_folder(data_dir)
        train, test = _folder_splits(folder)
        class_names = _class_folders(folder / "train")
    return ImageData(name, own_classes, train, test, input_size, batch_size, seed, class_names)


def _digits() -> tuple[Split, Split]:
    """The 1,797 handwritten digits (8×8 grey) in scikit-learn's wheel, half for training, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.repeat(np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    labels = digits.target.astype(np.int32)
    parts = train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=DIGITS_SPLIT_SEED)
    train_images, test_images, train_labels, test_labels = parts
    return _array_split(train_images, train_labels), _array_split(test_images, test_labels)


def _array_split(images: np.ndarray, labels: np.ndarray) -> Split:
    return Split(tf.data.Dataset.from_tensor_slices((images, labels)), len(images), lambda image: image, one_size=True)


def _tfds(name: str, data_dir: Path | None) -> tuple[Split, Split, list[str]]:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir)
        builder.download_and_prepare()
        read = tfds.ReadConfig(interleave_cycle_length=1)  # one order on every machine
        decoders = tfds.decode.PartialDecoding(
            {"image": True, "label": True}, decoders={"image": tfds.decode.SkipDecoding()}
        )
        datasets = [
            builder.as_dataset(split=split, decoders=decoders, read_config=read, shuffle_files=False)
            for split in ("train", "test")
        ]
    except Exception as error:  # TFDS raises many kinds when a download or a file fails
        where = data_dir or "TFDS' own folder"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--dataset_name {name}: not prepared in {where} and cannot be downloaded ({lines[0][:200]}); "
            "prepare it where there is a network and give --data_dir"
        ) from error
    train, test = (
        Split(
            dataset.map(lambda example: (example["image"], example["label"])),
            builder.info.splits[split].num_examples,
            _decode_image,
            shuffled=1_000,
        )
        for split, dataset in zip(("train", "test"), datasets, strict=True)
    )
    return train, test, builder.info.features["label"].names


def _decode_image(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def _image_folder(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise UserError("--data_dir: image_folder needs the folder that holds train/<class>/ and test/<class>/")
    if not (data_dir / "train").is_dir():
        raise UserError(f"--data_dir {data_dir}: has no folder 'train' with one folder for each class")
    return data_dir


def _class_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _folder_splits(folder: Path) -> tuple[Split, Split]:
    held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if held_out is None:
        raise UserError(f"--data_dir {folder}: has neither 'test' nor 'val' with one folder for each class")
    classes = _class_folders(folder / "train")
    unknown = sorted(set(_class_folders(held_out)) - set(classes))
    if unknown:
        raise UserError(f"--data_dir {held_out}: class '{unknown[0]}' is not among those of {folder / 'train'}")
    return _folder_split(folder / "train", classes), _folder_split(held_out, classes)


def _folder_split(folder: Path, classes: list[str]) -> Split:
    files = [
        (str(path), label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in IMAGE_ENDINGS
    ]
    if not files:
        raise UserError(f"--data_dir {folder}: holds no images ({', '.join(IMAGE_ENDINGS)}) in its class folders")
    paths, labels = zip(*files, strict=True)
    examples = tf.data.Dataset.from_tensor_slices((list(paths), np.array(labels, np.int32)))
    return Split(examples, len(files), lambda path: _decode_image(tf.io.read_file(path)), shuffled=len(files))
