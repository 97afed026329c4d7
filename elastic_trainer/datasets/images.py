"""Reads all images of a data set once, before training: decoded, resized to the input size, as uint8.

An epoch then decodes nothing, and a broken file is reported at the start. The images stay in memory if they fit, else
they go to a file that later runs use again; the system then loads only what a batch needs.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from elastic_trainer.datasets.digests import digest
from elastic_trainer.system.files import atomic_path, read_record, trusting, write_record
from elastic_trainer.system.machine import available_memory_mb

if TYPE_CHECKING:
    from elastic_trainer.datasets.decoding import ImageSource

MEMORY_SHARE = 4  # images may take one part in this many of the available memory
DEFAULT_MEMORY_MB = 1024  # what they may take if the system does not report its available memory
_CHUNK = 64  # images that are decoded at a time
_READER_VERSION = 4  # increase it when what is kept of an image changes: files of earlier versions are then ignored


@dataclass(frozen=True)
class ImageFiles:
    """Images that have not been read yet."""

    count: int
    examples: Callable[[], Iterator[tuple[ImageSource, int]]]  # each image with its label, always in the same order
    files: Sequence[str] = ()  # that hold the images: while none changes, decoded images can be used again


NO_IMAGES = ImageFiles(0, lambda: iter(()))


class Example(NamedTuple):
    """An image without its pixels: its label; why it cannot be read, or None; its digest, 0 if it cannot be read."""

    label: int
    why_broken: str | None = None
    digest: int = 0


class DecodedImages(NamedTuple):
    """Images that have been read; digests and places are empty if they are not known."""

    images: np.ndarray  # uint8 [count, size, size, 3], in memory or mapped from a file
    labels: np.ndarray  # int32 [count]
    broken: Collection[str]  # a line on each image that could not be read; no other field includes it
    digests: np.ndarray = np.zeros(0, np.uint64)  # of each image, see `digests`
    places: np.ndarray = np.zeros(0, np.int64)  # of each image among the files of its part


def read(
    parts: Sequence[ImageFiles],
    size: int,
    name: str,
    folder: Path | None = None,
    memory_mb: float | None = None,
) -> list[DecodedImages]:
    """Read all images of all `parts`, with a progress bar. Broken images are left out and reported in the result.

    Args:
        parts: for example the training and the test split.
        size: height and width that the images are resized to.
        name: of the data set, for messages and for the name of the file.
        folder: where the file is written if the images do not fit in memory; None: they always stay in memory.
        memory_mb: how many MB they may take; None: a quarter of the memory that is available.

    Raises:
        UserError: the file cannot be written, or is damaged.
    """
    count = sum(part.count for part in parts)
    needed_mb, memory_mb = count * size * size * 3 / 1e6, room_mb() if memory_mb is None else memory_mb
    if folder is None or needed_mb <= memory_mb:
        images = np.empty((count, size, size, 3), np.uint8)
        rows = iter(images)
        return _by_part(images, _decode_all(parts, size, lambda pixels: np.copyto(next(rows), pixels)), parts)
    stem = folder / f"{name}_{size}_{_digest_of_files(parts, size)}"
    pixels, record = stem.with_suffix(".pixels"), stem.with_suffix(".json")
    examples = _recorded(record, pixels, size, count)
    if examples is not None:
        print(f"{name}: images at {size}×{size} from {pixels}")
    else:
        print(
            f"{name}: {needed_mb:,.0f} MB of images at {size}×{size} exceed the {memory_mb:,.0f} MB that they may take "
            f"in memory; writing them to {pixels}"
        )
        # Written row by row: on a full disk, writing to a mapped file ends the process without a message.
        with atomic_path(pixels) as temporary, temporary.open("wb") as file:
            examples = _decode_all(parts, size, lambda image: file.write(image.tobytes()))
        write_record(record, {"examples": examples})
    shape = (_intact(examples), size, size, 3)
    images = np.memmap(pixels, np.uint8, "r", shape=shape) if shape[0] else np.zeros(shape, np.uint8)
    return _by_part(images, examples, parts)


def room_mb() -> float:
    """MB that may be taken in memory: a quarter of the available memory."""
    available_mb = available_memory_mb()
    return DEFAULT_MEMORY_MB if available_mb is None else available_mb / MEMORY_SHARE


def taken(images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The `images` of these rows; those that are read from a file take no memory of the process afterwards."""
    found: np.ndarray = images[rows]
    file = getattr(images, "_mmap", None)
    if file is not None and hasattr(mmap, "MADV_DONTNEED"):
        file.madvise(mmap.MADV_DONTNEED)  # else each page that was read counts; the system keeps it outside
    return found


def _recorded(record: Path, pixels: Path, size: int, count: int) -> list[Example] | None:
    """What `read` has recorded of `count` images; None if a file is missing. Raises `UserError` if one is damaged."""
    if not (record.is_file() and pixels.is_file()):
        return None
    with trusting(record):
        examples = [Example(*row) for row in read_record(record)["examples"]]
    with trusting(pixels):
        if len(examples) != count or pixels.stat().st_size != _intact(examples) * size * size * 3:
            raise ValueError
    return examples


def _intact(examples: Sequence[Example]) -> int:
    return sum(example.why_broken is None for example in examples)


def _decode_all(parts: Sequence[ImageFiles], size: int, keep: Callable[[np.ndarray], object]) -> list[Example]:
    """Decode all images, and call `keep` with the pixels of each that can be read."""
    examples = []
    for pixels, example in decoded(parts, size):
        if pixels is not None:
            keep(pixels)
        examples.append(example)
    return examples


def decoded(parts: Sequence[ImageFiles], size: int) -> Iterator[tuple[np.ndarray | None, Example]]:
    """Decode all images on all cores, in order: uint8 [size, size, 3], or None if it cannot be read, and the rest."""
    from elastic_trainer.datasets.decoding import content, decode, decode_failure  # needs an extra

    def attempt(example: tuple[int, tuple[ImageSource, int]]) -> tuple[np.ndarray | None, Example]:
        index, (source, label) = example
        try:
            encoded = content(source)
            pixels = decode(source if isinstance(source, np.ndarray) else encoded, size)
            return pixels, Example(label, None, digest(encoded))
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises many types for a damaged image
            return None, Example(label, decode_failure(source, index, error))

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(total=sum(part.count for part in parts), desc="reading images", unit="image", leave=False) as bar,
    ):
        for part in parts:
            examples = enumerate(part.examples())
            while chunk := [*itertools.islice(examples, _CHUNK)]:
                for result in pool.map(attempt, chunk):
                    bar.update()
                    yield result


def _by_part(images: np.ndarray, examples: Sequence[Example], parts: Sequence[ImageFiles]) -> list[DecodedImages]:
    """Divide the images of all `parts`, one after the other, into those of each part."""
    result, rest, row = [], iter(examples), 0
    for part in parts:
        own = [*itertools.islice(rest, part.count)]
        places = np.array([place for place, example in enumerate(own) if example.why_broken is None], np.int64)
        intact, end = [own[place] for place in places], row + len(places)
        labels = np.array([example.label for example in intact], np.int32)
        digests = np.array([example.digest for example in intact], np.uint64)
        broken = [example.why_broken for example in own if example.why_broken is not None]
        result.append(DecodedImages(images[row:end], labels, broken, digests, places))
        row = end
    return result


def _digest_of_files(parts: Sequence[ImageFiles], size: int) -> str:
    """A digest that changes when one of the files that hold the images changes. It reads none of them."""
    total = hashlib.sha256(f"{_READER_VERSION} {size}".encode())
    for part in parts:
        total.update(f"|{part.count}".encode())
        for path in part.files:
            status = Path(path).stat()
            total.update(f"|{path}|{status.st_size}|{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return total.hexdigest()[:16]
