"""Data sets as tf.data pipelines, all through one function: `load`. Run as a script: the commands of dataset_tools.py.

Whatever the source, images reach the network as float32 [batch, size, size, 3] in 0…255 with int32 labels [batch].
All are read before training begins (images.py), so an epoch decodes nothing and a broken file shows at once. The order
of an epoch depends on the seed and the epoch's number alone, so a run can be repeated or taken up again.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import utils
from images import KINDS, Encoded, Pixels, read, wrong_start
from options import TFDS_NAMES
from utils import UserError

if TYPE_CHECKING:
    import argparse

    import tensorflow as tf
    import tensorflow_datasets as tfds

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")  # whose content must be an image
# One fixed split: runs with different seeds stay comparable, and weights of one never saw the test images of another.
SPLIT_SEED = 0
_PROBE_STREAM = 1_000_003  # keeps the seeds of importance batches apart from those of epochs


class ImageData:
    """A data set at one input size and batch size.

    Args:
        name: of the data set.
        class_names: in the order of the labels.
        train, test: its images.
        batch_size: images a step.
        seed: of the training order.

    Attributes:
        num_classes: number of classes of the data set itself.
        train_count, test_count: images in each split.
        input_size: height and width in pixels.
        steps_per_epoch: training batches in an epoch; the incomplete last one is left out.
        skipped_images: broken images of both splits that were left out, and are in none of these counts.

    Raises:
        UserError: fewer training images than a batch.
    """

    def __init__(
        self, name: str, class_names: Sequence[str], train: Pixels, test: Pixels, batch_size: int, seed: int = 0
    ) -> None:
        self.name, self.class_names, self.num_classes = name, tuple(class_names), len(class_names)
        self.train_count, self.test_count = len(train.labels), len(test.labels)
        if self.train_count < batch_size:
            raise UserError(
                f"--batch_size {batch_size}: {name} has only {self.train_count} training images; choose at most that"
            )
        self.input_size, self.batch_size, self.seed = train.images.shape[1], batch_size, seed
        self.steps_per_epoch = self.train_count // batch_size
        self.skipped_images = len(train.broken) + len(test.broken)
        self._train, self._test = train, test

    def train(self, epoch: int, skip: int = 0) -> tf.data.Dataset:
        """The batches of epoch `epoch`, shuffled by seed and epoch: (images, labels), all of full size.

        The first `skip` batches are left out.
        """
        return self._shuffled(epoch, skip)

    def probe(self, index: int, count: int = 1) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Training batches for the `index`-th evaluation of importance, drawn apart from the epochs' order.

        At most `count`, fewer where an epoch has not so many.
        """
        return list(self._shuffled(_PROBE_STREAM + index).take(count))

    def test(self) -> tf.data.Dataset:
        """All test images in a fixed order: (images, labels), the last batch as large as what is left."""
        return self._batches(self._test, np.arange(self.test_count))

    def _shuffled(self, stream: int, skip: int = 0) -> tf.data.Dataset:
        order = np.random.default_rng([self.seed, stream]).permutation(self.train_count)
        return self._batches(self._train, order[skip * self.batch_size : self.steps_per_epoch * self.batch_size])

    def _batches(self, pixels: Pixels, order: np.ndarray) -> tf.data.Dataset:
        import tensorflow as tf

        size = self.input_size

        def rows(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return pixels.images[indices], pixels.labels[indices]

        def prepare(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch, labels = tf.numpy_function(rows, [indices], (tf.uint8, tf.int32))
            batch = tf.ensure_shape(batch, (*indices.shape, size, size, 3))
            return tf.cast(batch, tf.float32), tf.ensure_shape(labels, indices.shape)

        # Nothing here is for tf.data to tune, and taking its tuner down stalls the end of an epoch by up to 1.3 s.
        options = tf.data.Options()
        options.autotune.enabled = False
        batches = tf.data.Dataset.from_tensor_slices(order).batch(self.batch_size).map(prepare).prefetch(2)
        return batches.with_options(options)


class Source(NamedTuple):
    """A data set whose images are not yet read."""

    class_names: Sequence[str]
    train: Encoded
    test: Encoded


def count_classes(name: str, data_dir: Path | None) -> int:
    """Number of classes of a data set, without loading it. Raises `UserError` as `load`."""
    if name == "digits":
        return 10
    if name in TFDS_NAMES:
        return tfds_builder(name, data_dir).info.features["label"].num_classes
    return len(_train_classes(image_folder(data_dir)))


def load(
    name: str,
    input_size: int,
    batch_size: int,
    seed: int = 0,
    data_dir: Path | None = None,
    num_classes: int | None = None,
    skip_broken: bool = False,
    test_fraction: float | None = None,
    cache_dir: Path | None = None,
    image_memory: float | None = None,
) -> ImageData:
    """A data set by the name that `--dataset_name` takes, its images read; shows a progress bar.

    Args:
        name: digits, caltech_birds2011, oxford_iiit_pet, stanford_dogs, or image_folder.
        input_size: height and width in pixels.
        batch_size: images a step.
        seed: of the training order.
        data_dir: for image_folder the folder with train/<class>/ and test/<class>/ or val/<class>/, or with
            <class>/ alone; for the TFDS names the folder of TFDS.
        num_classes: outputs of the network, at least as many as the data set has classes.
        skip_broken: of image_folder, leave out images that cannot be decoded; says how many.
        test_fraction: of image_folder, the share of each class to test on where there is no test/ or val/.
        cache_dir, image_memory: where images go that are more than so many MB; see `images.read`.

    Raises:
        UserError: the data set is not there, cannot be downloaded, has files that are no images, or does not fit the
            other arguments.
    """
    source = find(name, data_dir, skip_broken, test_fraction)
    if num_classes is not None and num_classes < len(source.class_names):
        raise UserError(
            f"--num_classes {num_classes}: {name} has {len(source.class_names)} classes; give at least that or leave "
            "it out"
        )
    train, test = read([source.train, source.test], input_size, name, cache_dir, image_memory)
    broken = [*train.broken.values(), *test.broken.values()]
    if broken:
        count = f"{len(broken)} of {source.train.count + source.test.count} images"
        if name in TFDS_NAMES:
            raise UserError(f"{name}: {broken[0]} ({count} are broken); prepare it anew")
        if not skip_broken:
            raise _broken(broken, count)
        print(f"left out as broken: {count}; the first: {_printable(broken[0])}")
        _check_classes(source.class_names, train.labels, test.labels, data_dir)
    return ImageData(name, source.class_names, train, test, batch_size, seed)


def from_options(args: argparse.Namespace, input_size: int) -> ImageData:
    """The data set that the options of a command line ask for, at an input size; see `load`."""
    return load(
        args.dataset_name,
        input_size,
        args.batch_size,
        args.seed,
        args.data_dir,
        args.num_classes,
        args.skip_broken,
        args.test_fraction,
        args.logdir / "images",
        args.image_memory,
    )


def find(
    name: str, data_dir: Path | None = None, skip_broken: bool = False, test_fraction: float | None = None
) -> Source:
    """What `load` would read, with the same arguments and errors."""
    if name == "digits":
        return _digits()
    if name in TFDS_NAMES:
        return _tfds(name, data_dir)
    return _folder(image_folder(data_dir), skip_broken, test_fraction)


def _digits() -> Source:
    """The 1,797 handwritten digits (8×8 grey) in scikit-learn's wheel, half for training, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.repeat(np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    parts = train_test_split(images, digits.target, test_size=0.5, stratify=digits.target, random_state=SPLIT_SEED)
    train, test = (
        Encoded(len(labels), partial(zip, pixels, labels.tolist(), strict=True))
        for pixels, labels in ((parts[0], parts[2]), (parts[1], parts[3]))
    )
    return Source([str(digit) for digit in range(10)], train, test)


# --- tensorflow-datasets ----------------------------------------------------------------------------------------------


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


def _tfds(name: str, data_dir: Path | None) -> Source:
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
    return Source(builder.info.features["label"].names, train, test)


# --- image folders ----------------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the system refuses in this block becomes a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--data_dir {path}: cannot be read: {error.strerror or error}") from error


def image_folder(data_dir: Path | None) -> Path:
    """`data_dir`, which must be a folder. Raises `UserError`."""
    layout = "train/<class>/ and test/<class>/, or with <class>/ alone"
    if data_dir is None:
        raise UserError(f"--data_dir: image_folder needs the folder with {layout}")
    with _reading(data_dir):
        if not data_dir.is_dir():
            what = "is a file; it must be a folder" if data_dir.exists() else "there is no such folder"
            raise UserError(f"--data_dir {data_dir}: {what} with {layout}")
    return data_dir


def _class_folders(folder: Path) -> list[str]:
    with _reading(folder):
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _train_folder(folder: Path) -> Path:
    """Where the classes of an image folder lie: in train/, or in the folder itself."""
    with _reading(folder):
        return folder / "train" if (folder / "train").is_dir() else folder


def _train_classes(folder: Path) -> list[str]:
    """Names of the classes of an image folder, in the order of their labels."""
    train = _train_folder(folder)
    classes = _class_folders(train)
    if not classes:
        raise UserError(f"--data_dir {train}: holds no folders; it needs one for each class")
    if len(classes) == 1:
        raise UserError(f"--data_dir {train}: has one class only, '{classes[0]}'; there must be two to tell apart")
    return classes


def _folder(folder: Path, skip_broken: bool, test_fraction: float | None) -> Source:
    train_folder, classes = _train_folder(folder), _train_classes(folder)
    with _reading(folder):
        held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if train_folder == folder and held_out is not None:
        raise UserError(f"--data_dir {folder}: has '{held_out.name}' but no 'train' with one folder for each class")
    if held_out is None and test_fraction is None:
        raise UserError(
            f"--data_dir {folder}: has neither 'test' nor 'val' with one folder for each class; give "
            "--test_fraction 0.2 to test on a fifth of each class"
        )
    if held_out is not None and test_fraction is not None:
        raise UserError(f"--test_fraction {test_fraction:g}: {folder} has its own '{held_out.name}'; leave it out")
    if held_out is not None:
        unknown = sorted(set(_class_folders(held_out)) - set(classes))
        if unknown:
            names = ", ".join(f"'{name}'" for name in unknown[:5]) + (", …" if len(unknown) > 5 else "")
            raise UserError(f"--data_dir {held_out}: {_counted(names, unknown)} not among those of {train_folder}")
    found = [_image_files(place, classes) for place in (train_folder, held_out) if place is not None]
    broken = [f"{path}: {why}" for files, wrong in found for path, why in wrong.items()]
    if broken and not skip_broken:
        raise _broken(broken, f"{len(broken)} of {sum(len(files) for files, _ in found)} images")
    train, test = [files for files, _ in found] if held_out else _apart(found[0][0], len(classes), test_fraction or 0)
    train_labels, test_labels = ([label for _, label in files] for files in (train, test))
    _check_classes(classes, train_labels, test_labels, folder)
    return Source(
        classes, *(Encoded(len(files), partial(iter, files), [path for path, _ in files]) for files in (train, test))
    )


def _broken(broken: Sequence[str], count: str) -> UserError:
    more = f" ({count} are broken)" if len(broken) > 1 else ""
    return UserError(f"{broken[0]}{more}; mend or remove it, or leave out what is broken with --skip_broken")


def _counted(names: str, items: Sequence[str]) -> str:
    return f"class {names} is" if len(items) == 1 else f"classes {names} are"


def _printable(text: str) -> str:
    """`text` in letters that every terminal takes; a file's name may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def _image_files(folder: Path, classes: Sequence[str]) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Images in the class folders of `folder`, and those that cannot be any.

    Content decides, so a file without an ending can be an image. One that is none is broken if its name says that it is
    an image, and else passed over, which is said. Names that begin with a dot are not looked at: macOS leaves such
    files beside each photo.

    Returns:
        Paths with their labels, broken ones among them; and broken paths with what is wrong.
    """
    images: list[tuple[str, int]] = []
    broken: dict[str, str] = {}
    others: Counter[str] = Counter()
    for label, name in enumerate(classes):
        with _reading(folder / name):
            entries = os.scandir(folder / name) if (folder / name).is_dir() else ()
            paths = sorted(entry.path for entry in entries if not entry.name.startswith(".") and not entry.is_dir())
        for path in paths:
            why, ending = wrong_start(path), Path(path).suffix.lower()
            if why is not None and ending not in IMAGE_ENDINGS:
                others[ending] += 1
                continue
            images.append((path, label))
            if why is not None:
                broken[path] = why
    if others:
        kinds = ", ".join(f"{count} {ending or 'without ending'}" for ending, count in others.most_common(5))
        print(f"passed over in {folder}, being no {KINDS}: {_printable(kinds)}")
    return images, broken


def _apart(files: list[tuple[str, int]], classes: int, fraction: float) -> tuple[list[Any], list[Any]]:
    """`files` for training and for testing: of each class `fraction` for the test, one at least if it has two."""
    rng = np.random.default_rng(SPLIT_SEED)
    tested: set[str] = set()
    for label in range(classes):
        own = [path for path, of in files if of == label]
        count = min(max(round(fraction * len(own)), 1), len(own) - 1)
        tested.update(own[k] for k in rng.permutation(len(own))[: max(count, 0)])
    return [file for file in files if file[0] not in tested], [file for file in files if file[0] in tested]


def _check_classes(
    classes: Sequence[str],
    train_labels: Sequence[int] | np.ndarray,
    test_labels: Sequence[int] | np.ndarray,
    folder: Path | None,
) -> None:
    """Refuse a class without training images, and warn of one without test images."""
    for what, labels in (("training", train_labels), ("test", test_labels)):
        if not len(labels):
            raise UserError(f"--data_dir {folder}: holds no {what} images ({KINDS}) in its class folders")
    for what, labels in (("training", train_labels), ("test", test_labels)):
        counts = np.bincount(labels, minlength=len(classes))
        empty = [f"'{name}'" for name, count in zip(classes, counts, strict=True) if not count]
        if empty:
            shown = f"{', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
            without = f"no {what} images of {'class' if len(empty) == 1 else f'{len(empty)} classes'}: {shown}"
            if what == "training":
                raise UserError(
                    f"--data_dir {folder}: has {without}, which cannot be learned so; give some or remove the folder"
                )
            print(f"warning: {folder} has {without}; accuracy will not tell how well that is learned")


if __name__ == "__main__":
    import dataset_tools

    utils.run_cli(dataset_tools.main)
