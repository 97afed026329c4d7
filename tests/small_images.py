"""Small image folders that tests write, and helpers that read batches."""

import io

import numpy as np
from PIL import Image

import data
from elastic_trainer.datasets.decoding import digest, read_photo
from elastic_trainer.settings import Settings


def write_red_and_blue(folder):
    """Write an image folder of the classes blue and red: 5 images each to train, 2 to test, in various formats."""
    for split, count in (("train", 5), ("test", 2)):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            where = folder / split / name
            where.mkdir(parents=True)
            for i in range(count):
                pixels = np.tile(np.array(colour, np.uint8), (20 + i, 30, 1))
                Image.fromarray(pixels).save(where / f"{i}.{'png' if i % 2 else 'jpg'}")
    return folder


def write_noise(folder, seed=0, **counts):
    """Write an image folder of noise, 12×12, of the classes ant, bee, cat: so many images each in a part.

    By default 4 train and 3 test images.
    """
    rng = np.random.default_rng(seed)
    for split, count in (counts or {"train": 4, "test": 3}).items():
        for name in ("ant", "bee", "cat"):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for k in range(count):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{k}.png")
    return folder


def load_photos(folder, size=16, batch_size=2, seed=0, kept_mb=None, source=None, **settings):
    """The data set of an image folder, as `data.load` gives it."""
    about = {"dataset_name": "image_folder", "data_dir": folder, "augment": "none", **settings}
    return data.load(Settings(**about, input_size=size, batch_size=batch_size, seed=seed), kept_mb, source)


def digests_of(folder, pattern, size=12):
    """The digests of photos at a size, sorted by path."""
    return np.array([digest(read_photo(path, size)) for path in sorted(folder.glob(pattern))], np.uint64)


def encoded(image, kind, **options):
    """The bytes of a Pillow image in a file format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pairs(batches):
    """The images and labels of batches."""
    return ((batch.inputs, batch.targets) for batch in batches)


def labels_of(batches):
    """The labels of all batches, [images]."""
    return np.concatenate([batch.targets.numpy() for batch in batches])


def shades(batches):
    """{label: brightness of each image, sorted} of all batches."""
    found: dict[int, list[int]] = {}
    for images, labels in pairs(batches):
        for image, label in zip(images.numpy(), labels.numpy(), strict=True):
            found.setdefault(int(label), []).append(int(image.max()))
    return {label: sorted(values) for label, values in found.items()}
