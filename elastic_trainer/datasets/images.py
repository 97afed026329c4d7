"""Reads all images of a data set once, before training: decoded, resized to the input size, as uint8.

An epoch then decodes nothing, and a broken file is reported at the start. The images stay in memory if they fit, else
in a temporary file; the system then loads only what a batch needs.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from elastic_trainer.datasets.decoding import BILINEAR, digest, read_photo
from elastic_trainer.system.errors import first_line, importing, printable
from elastic_trainer.system.files import writing
from elastic_trainer.system.memory import free_memory_mb

MEMORY_SHARE = 4  # images may take one part in this many of the available memory
DEFAULT_MEMORY_MB = 1024  # what they may take if the system does not report its available memory
AT_ONCE = 128  # images that all cores decode together, before the next ones

ImageSource = str | bytes | np.ndarray  # path of a file, encoded image, or pixels [height, width, 3]


@dataclass(frozen=True)
class ImageFiles:
    """Images that have not been read yet: their number, and each with its label, always in the same order."""

    count: int
    examples: Callable[[], Iterable[tuple[ImageSource, int]]]

    def some(self, most: int) -> ImageFiles:
        """At most `most` of them, evenly spread."""
        kept = {*evenly(self.count, most).tolist()}
        return ImageFiles(len(kept), lambda: (one for number, one in enumerate(self.examples()) if number in kept))


NO_IMAGES = ImageFiles(0, lambda: ())


@dataclass(frozen=True)
class Images:
    """Images of one part that have been read; digests and names are empty if they are not known."""

    pixels: np.ndarray  # uint8 [images, size, size, 3], in memory or in a file; of other parts too, if there are `rows`
    labels: np.ndarray  # int32 [count]
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))  # see `decoding.digest`
    names: np.ndarray = field(default_factory=lambda: np.zeros(0, object))  # of files
    rows: np.ndarray | None = None  # of `pixels`, [count]; None: all

    def part(self, chosen: np.ndarray) -> Images:
        """The images of these places, by their numbers or a mask."""
        rows = np.arange(len(self)) if self.rows is None else self.rows
        digests, names = (each[chosen] if len(each) else each for each in (self.digests, self.names))
        return Images(self.pixels, self.labels[chosen], digests, names, rows[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Their pixels; those that are read from a file take no memory of the process afterwards."""
        found: np.ndarray = self.pixels[places if self.rows is None else self.rows[places]]
        file = getattr(self.pixels, "_mmap", None)
        if file is not None and hasattr(mmap, "MADV_DONTNEED"):
            file.madvise(mmap.MADV_DONTNEED)  # else each page that was read counts; the system keeps it outside
        return found


def evenly(count: int, most: int) -> np.ndarray:
    """At most `most` of the numbers from 0 to count - 1, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))


def room_mb() -> float:
    """MB that may be taken in memory: a quarter of the available memory."""
    available_mb = free_memory_mb()
    return DEFAULT_MEMORY_MB if available_mb is None else available_mb / MEMORY_SHARE


def read(
    parts: Sequence[ImageFiles], size: int, folder: Path, memory_mb: float | None = None
) -> tuple[list[Images], list[str]]:
    """Read all images of all `parts`, with a progress bar; a line for each that cannot be read is the second result.

    Args:
        parts: for example the training and the test split.
        size: height and width that the images are resized to.
        folder: where the file is if the images do not fit in memory.
        memory_mb: how many MB they may take; None: a quarter of the memory that is available.

    Raises:
        UserError: the file cannot be written.
    """
    with importing("reading images"):
        import PIL  # noqa: F401
    count = sum(part.count for part in parts)
    shape, needed_mb = (count, size, size, 3), count * size * size * 3 / 1e6
    memory_mb = room_mb() if memory_mb is None else memory_mb
    if needed_mb <= memory_mb:
        pixels = np.empty(shape, np.uint8)
        rows = iter(pixels)
        return _read_parts(parts, size, pixels, lambda image: np.copyto(next(rows), image))
    print(
        f"{needed_mb:,.0f} MB of images at {size}×{size} exceed the {memory_mb:,.0f} MB that they may take in memory; "
        f"they are in a temporary file in {folder}"
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # it lasts as long as it is mapped
            file.truncate(count * size * size * 3)
            pixels = np.memmap(file, np.uint8, "r", shape=shape)
            file.seek(0)
            # On a full disk, writing to a mapped file would end the process without a message.
            return _read_parts(parts, size, pixels, lambda image: file.write(image.tobytes()))


def _read_parts(
    parts: Sequence[ImageFiles], size: int, pixels: np.ndarray, keep: Callable[[np.ndarray], object]
) -> tuple[list[Images], list[str]]:
    """Read all `parts` on all cores, and call `keep` with each image that can be read, in order."""
    found, broken, end = [], list[str](), 0
    total = sum(part.count for part in parts)
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(total=total, desc="reading images", unit="image", leave=False) as bar,
    ):
        for part in parts:
            labels, digests, names, examples = list[int](), list[int](), list[str](), enumerate(part.examples())
            while some := [*islice(examples, AT_ONCE)]:
                results = pool.map(lambda one: _decoded(one[1][0], size), some)
                for (number, (source, label)), result in zip(some, results, strict=True):
                    name = source if isinstance(source, str) else f"image {number}"
                    bar.update()
                    if isinstance(result, str):
                        broken.append(printable(f"{name}: cannot be read: {result}"))
                    else:
                        keep(result[0])
                        labels.append(label)
                        digests.append(result[1])
                        names.append(name)
            rows = np.arange(end, end := end + len(labels))
            columns = np.array(labels, np.int32), np.array(digests, np.uint64), np.array(names, object)
            found.append(Images(pixels, *columns, rows))
    return found, broken


def _decoded(source: ImageSource, size: int) -> tuple[np.ndarray, int] | str:
    """The pixels of an image and their digest, or why it cannot be read."""
    try:
        pixels = resized(source, size) if isinstance(source, np.ndarray) else read_photo(source, size)
        return pixels, digest(pixels)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many types for a damaged image
        return getattr(error, "strerror", None) or first_line(error)


def resized(pixels: np.ndarray, size: int) -> np.ndarray:
    """An image uint8 [height, width, 3] as [size, size, 3]."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize((size, size), BILINEAR))
