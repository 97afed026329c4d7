"""Data sets as tf.data pipelines, all through one function: `load`.

Whatever the source, images reach the network as float32 [batch, size, size, 3] in 0…255 with int32 labels [batch].
The order of an epoch depends on the seed and the epoch's number alone, so a run can be repeated or taken up again.

Broken images of an image_folder are found in two steps. Before training the first bytes of each file are read, which
is cheap, and tell what is empty or no image at all. What is damaged further in shows when it is decoded: then the batch
that failed is gone through image by image, to name the file. `skip_broken` decodes every file beforehand instead, for
how many images there are must be known when training begins.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from utils import UserError

TFDS_CLASSES = {"caltech_birds2011": 200, "oxford_iiit_pet": 37, "stanford_dogs": 120}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
# What JPEG, PNG, GIF and BMP begin with, then WebP and JPEG XL, which tf.io.decode_image reads since TensorFlow 2.21.
_IMAGE_START = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8|BM")
_NEWER_IMAGE_START = re.compile(rb"RIFF....WEBP|\xff\x0a|\x00\x00\x00\x0cJXL ", re.DOTALL)
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
        files: raw is the path of a file.
        skipped: how many broken images were left out.
    """

    examples: tf.data.Dataset
    count: int
    decode: Callable[[tf.Tensor], tf.Tensor]
    shuffled: int = MAX_SHUFFLED
    one_size: bool = False
    files: bool = False
    skipped: int = 0


class Batches:
    """Batches (images, labels) of a data set, to be iterated over any number of times.

    Args:
        batches: tf.data of them.
        culprit: finds out why batch i, counted from 0, cannot be read; None where it can.

    Raises:
        UserError: on the way, where an image cannot be read; names its file.
    """

    def __init__(self, batches: tf.data.Dataset, culprit: Callable[[int], UserError | None]) -> None:
        self._batches, self._culprit = batches, culprit

    def take(self, count: int) -> Batches:
        """The first `count` of them."""
        return Batches(self._batches.take(count), self._culprit)

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        done = 0
        try:
            for batch in self._batches:
                yield batch
                done += 1
        except tf.errors.ResourceExhaustedError:  # too little memory is no image's fault
            raise
        except tf.errors.OpError as error:  # tf.data keeps the order, so it is the next batch that failed
            culprit = self._culprit(done)
            if culprit is None:
                raise
            raise culprit from error


class ImageData:
    """A data set at one input size and batch size.

    Attributes:
        num_classes: number of classes of the data set itself.
        class_names: what they are called, in the order of the labels.
        train_count, test_count: images in each split.
        steps_per_epoch: training batches in an epoch; the incomplete last one is left out.
        skipped_images: broken images of both splits that were left out, and are in none of these counts.
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
        self.skipped_images = train.skipped + test.skipped
        self._train, self._test = train, test

    def train(self, epoch: int, skip: int = 0) -> Batches:
        """The batches of epoch `epoch`, shuffled by seed and epoch: (images, labels), all of full size.

        The first `skip` batches are left out, without decoding them.
        """
        return self._shuffled(epoch, skip)

    def probe(self, index: int, count: int = 1) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Training batches for the `index`-th evaluation of importance, drawn apart from the epochs' order.

        At most `count`, fewer where an epoch has not so many.
        """
        return list(self._shuffled(_PROBE_STREAM + index).take(count))

    def test(self) -> Batches:
        """All test images in a fixed order: (images, labels), the last batch as large as what is left."""
        return self._batches(self._test.examples, self._test, drop_remainder=False)

    def _shuffled(self, stream: int, skip: int = 0) -> Batches:
        seed = int(np.random.SeedSequence([self.seed, stream]).generate_state(1)[0]) >> 1
        buffer = min(self._train.count, self._train.shuffled)
        examples = self._train.examples.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)
        return self._batches(examples.skip(skip * self.batch_size), self._train, drop_remainder=True)

    def _batches(self, examples: tf.data.Dataset, split: Split, drop_remainder: bool) -> Batches:
        """The batches of `examples`, which are `split`'s in some order."""
        size = (self.input_size, self.input_size)

        def prepare(raw: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = tf.image.resize(split.decode(raw), size)
            return tf.ensure_shape(images, (*images.shape[:-3], *size, 3)), tf.cast(label, tf.int32)

        if split.one_size:
            batches = examples.batch(self.batch_size, drop_remainder=drop_remainder).map(prepare)
        else:
            prepared = examples.map(prepare, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            batches = prepared.batch(self.batch_size, drop_remainder=drop_remainder)
        return Batches(batches.prefetch(2), lambda index: self._culprit(examples, split, index))

    def _culprit(self, examples: tf.data.Dataset, split: Split, index: int) -> UserError | None:
        """Why batch `index` of `examples` cannot be read: its images are decoded one by one."""
        try:
            for raw, _ in examples.skip(index * self.batch_size).take(self.batch_size):
                try:
                    split.decode(raw)
                except tf.errors.ResourceExhaustedError:
                    raise
                except tf.errors.OpError as error:
                    if not split.files:
                        return UserError(f"{self.name}: one of its images is broken: {_reason(error)}; prepare it anew")
                    path = os.fsdecode(raw.numpy())
                    return UserError(
                        f"{path}: cannot be read as an image: {_reason(error, path)}; mend or remove it, "
                        "or leave out what is broken with --skip_broken"
                    )
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            return UserError(f"{self.name}: its files cannot be read: {_reason(error)}; prepare it anew")
        return None


def count_classes(name: str, data_dir: Path | None) -> int:
    """Number of classes of a data set, without loading it. Raises `UserError` as `load`."""
    if name == "digits":
        return 10
    if name in TFDS_CLASSES:
        return TFDS_CLASSES[name]
    return len(_train_classes(_image_folder(data_dir)))


def load(
    name: str,
    input_size: int,
    batch_size: int,
    seed: int = 0,
    data_dir: Path | None = None,
    num_classes: int | None = None,
    skip_broken: bool = False,
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
        skip_broken: of image_folder, decode every image now and leave out those that cannot be; says how many.

    Raises:
        UserError: the data set is not there, cannot be downloaded, has files that are no images, or does not fit the
            other arguments.
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
        train, test = _folder_splits(folder, skip_broken)
        class_names = _train_classes(folder)
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


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the system refuses in this block becomes a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--data_dir {path}: cannot be read: {error.strerror or error}") from error


def _image_folder(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise UserError("--data_dir: image_folder needs the folder that holds train/<class>/ and test/<class>/")
    with _reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with train/<class>/ and test/<class>/")
        if not (data_dir / "train").is_dir():
            raise UserError(f"--data_dir {data_dir}: has no folder 'train' with one folder for each class")
    return data_dir


def _class_folders(folder: Path) -> list[str]:
    with _reading(folder):
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _train_classes(folder: Path) -> list[str]:
    """Names of the classes of an image folder, in the order of their labels."""
    classes = _class_folders(folder / "train")
    if not classes:
        raise UserError(f"--data_dir {folder / 'train'}: holds no folders; it needs one for each class")
    if len(classes) == 1:
        raise UserError(
            f"--data_dir {folder / 'train'}: has one class only, '{classes[0]}'; there must be two to tell apart"
        )
    return classes


def _folder_splits(folder: Path, skip_broken: bool) -> tuple[Split, Split]:
    with _reading(folder):
        held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if held_out is None:
        raise UserError(f"--data_dir {folder}: has neither 'test' nor 'val' with one folder for each class")
    classes = _train_classes(folder)
    unknown = sorted(set(_class_folders(held_out)) - set(classes))
    if unknown:
        names = ", ".join(f"'{name}'" for name in unknown[:5]) + (", …" if len(unknown) > 5 else "")
        raise UserError(f"--data_dir {held_out}: {_counted(names, unknown)} not among those of {folder / 'train'}")
    train, test = _image_files(folder / "train", classes), _image_files(held_out, classes)
    broken = _find_broken([path for path, _ in train + test], decode=skip_broken)
    if broken:
        count = f"{len(broken)} of {len(train) + len(test)} images"
        path, why = next(iter(broken.items()))
        if not skip_broken:
            more = f" ({count} are broken)" if len(broken) > 1 else ""
            raise UserError(f"{path}: {why}{more}; mend or remove it, or leave out what is broken with --skip_broken")
        print(f"left out as broken: {count}; the first: {_printable(path)}: {why}")
    return _folder_split(folder / "train", classes, train, broken), _folder_split(held_out, classes, test, broken)


def _counted(names: str, items: Sequence[str]) -> str:
    return f"class {names} is" if len(items) == 1 else f"classes {names} are"


def _printable(path: str) -> str:
    """`path` in letters that every terminal takes; a file's name may be any bytes."""
    return path.encode(errors="backslashreplace").decode()


def _image_files(folder: Path, classes: list[str]) -> list[tuple[str, int]]:
    """Paths of the images in the class folders of `folder`, with their labels; says what it passes over.

    Files whose name begins with a dot are none: macOS leaves such beside each photo.
    """
    images: list[tuple[str, int]] = []
    others: Counter[str] = Counter()
    for label, name in enumerate(classes):
        with _reading(folder / name):
            found = sorted(os.scandir(folder / name), key=lambda entry: entry.name) if (folder / name).is_dir() else []
            files = [entry for entry in found if not entry.name.startswith(".") and not entry.is_dir()]
        endings = [Path(entry.name).suffix.lower() for entry in files]
        images += [(entry.path, label) for entry, end in zip(files, endings, strict=True) if end in IMAGE_ENDINGS]
        others.update(end for end in endings if end not in IMAGE_ENDINGS)
    if others:
        kinds = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in others.most_common(5))
        print(f"passed over in {folder}, not being {' '.join(IMAGE_ENDINGS)}: {_printable(kinds)}")
    return images


def _folder_split(folder: Path, classes: list[str], files: list[tuple[str, int]], broken: dict[str, str]) -> Split:
    """The split of `files` less those that are `broken`."""
    whole = [(path, label) for path, label in files if path not in broken]
    if not whole:
        raise UserError(f"--data_dir {folder}: holds no images ({', '.join(IMAGE_ENDINGS)}) in its class folders")
    counts = np.bincount([label for _, label in whole], minlength=len(classes))
    empty = [f"'{name}'" for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        without = f"no images of class {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
        if folder.name == "train":
            raise UserError(
                f"--data_dir {folder}: has {without}, which cannot be learned so; give some or remove the folder"
            )
        print(f"warning: {folder} has {without}: accuracy will not tell how well that is learned")
    paths, labels = zip(*whole, strict=True)
    # Paths go as bytes: a file's name need not be UTF-8.
    examples = tf.data.Dataset.from_tensor_slices(([os.fsencode(path) for path in paths], np.array(labels, np.int32)))
    return Split(examples, len(whole), _decode_file, shuffled=len(whole), files=True, skipped=len(files) - len(whole))


def _decode_file(path: tf.Tensor) -> tf.Tensor:
    return _decode_image(tf.io.read_file(path))


# --- broken images ----------------------------------------------------------------------------------------------------


def _find_broken(paths: list[str], decode: bool) -> dict[str, str]:
    """Those of `paths` that are no images TensorFlow can read, each with what is wrong.

    Without `decode` the first bytes alone are read: damage further in is not found.
    """
    if not decode:
        return {path: why for path in paths if (why := _wrong_start(path))}
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(total=len(paths), desc="checking images", unit="image") as bar,
    ):
        broken = {}
        for path, why in zip(
            paths, pool.map(lambda path: _wrong_start(path) or _wrong_inside(path), paths), strict=True
        ):
            bar.update()
            if why:
                broken[path] = why
    return broken


def _wrong_start(path: str) -> str | None:
    """Why the first bytes of a file cannot begin an image, or None where they can."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(16)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not start:
        return "is empty"
    if _IMAGE_START.match(start):
        return None
    if _NEWER_IMAGE_START.match(start):
        return None if hasattr(tf.io, "decode_webp") else "is WebP or JPEG XL, which this TensorFlow does not read"
    return "is no JPEG, PNG, GIF or BMP, whatever its name says"


def _wrong_inside(path: str) -> str | None:
    """Why a file cannot be decoded, or None where it can."""
    try:
        _decode_file(os.fsencode(path))
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        return f"cannot be read as an image: {_reason(error, path)}"
    return None


def _reason(error: tf.errors.OpError, path: str = "") -> str:
    """What TensorFlow says of an error, without the names of its own parts and the file's `path`."""
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*|\[\[.*|; Input filename.*", "", " ".join(str(error.message).split()))
    return text.strip().removeprefix(f"{path}; ").strip(" .:") or type(error).__name__
