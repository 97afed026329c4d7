"""Reads all images of a data set once, before training: decoded, resized to the input size, as uint8.

An epoch then decodes nothing, and a broken file is reported at the start. The images stay in memory if they fit, else
they go to a file that later runs use again; the system then loads only what a batch needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from elastic_trainer.datasets.decoding import ImageSource, decode, decode_failure
from elastic_trainer.files import atomic_large_path, remove_leftovers, write_json, writing
from elastic_trainer.machine import available_memory_mb

MEMORY_SHARE = 4  # without --image_memory, images may take one part in this many of the available memory
DEFAULT_MEMORY_MB = 1024  # what they may take if the system does not report its available memory
_TAIL_BYTES = 4096  # of a file that its fingerprint covers
_CHUNK = 64  # images that are decoded at a time
_READER_VERSION = 1  # increase it when `decode` returns different pixels: files of earlier versions are then ignored


@dataclass(frozen=True)
class ImageFiles:
    """Images that have not been read yet.

    Attributes:
        count: number of images.
        examples: yields each image source with its label, always in the same order.
        files: the files that hold the images. While none of them changes, decoded images can be used again.
    """

    count: int
    examples: Callable[[], Iterator[tuple[ImageSource, int]]]
    files: Sequence[str] = ()


class DecodedImages(NamedTuple):
    """Images that have been read.

    Attributes:
        images: uint8 [count, size, size, 3], in memory or mapped from a file.
        labels: int32 [count].
        broken: for each image that could not be read, its position in `ImageFiles.examples` and the reason. `images`
            and `labels` leave it out.
    """

    images: np.ndarray
    labels: np.ndarray
    broken: dict[int, str]


_Label = tuple[int, str | None]  # of one image: its label, and why it cannot be read (None if it can)


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
        UserError: the file cannot be written.
    """
    count = sum(part.count for part in parts)
    needed_mb = count * size * size * 3 / 1e6
    memory_mb = room_mb(memory_mb)
    if folder is not None:
        remove_leftovers(folder, ".npy")
    if folder is None or needed_mb <= memory_mb:
        return _by_part(*_read_into_memory(parts, size, count), parts)
    stem = folder / f"{name}_{size}_{_digest(parts, size)}"
    record, pixels = stem.with_suffix(".json"), stem.with_suffix(".npy")
    cached = _read_cached(record, pixels, size, count)
    if cached is not None:
        print(f"{name}: images at {size}×{size} from {pixels}")
        return _by_part(*cached, parts)
    print(
        f"{name}: {needed_mb:,.0f} MB of images at {size}×{size} exceed the {memory_mb:,.0f} MB that they may take in "
        f"memory (--image_memory); writing them to {pixels}"
    )
    labels = _write(parts, size, record, pixels)
    return _by_part(np.load(pixels, mmap_mode="r"), labels, parts)


def room_mb(limit_mb: float | None, taken_mb: float = 0.0) -> float:
    """MB that may be taken in memory: what `taken_mb` leaves of a limit, or a quarter of the available memory."""
    if limit_mb is not None:
        return max(limit_mb - taken_mb, 0.0)
    available_mb = available_memory_mb()
    return DEFAULT_MEMORY_MB if available_mb is None else available_mb / MEMORY_SHARE


def _read_into_memory(parts: Sequence[ImageFiles], size: int, count: int) -> tuple[np.ndarray, list[_Label]]:
    images = np.empty((count, size, size, 3), np.uint8)
    labels: list[_Label] = []
    row = 0
    for image, label, why in decoded(parts, size):
        if image is not None:
            images[row] = image
            row += 1
        labels.append((label, why))
    return images, labels


def _read_cached(record: Path, pixels: Path, size: int, count: int) -> tuple[np.ndarray, list[_Label]] | None:
    """What `_write` has written for `count` images, or None if a file is missing, or damaged, which is printed."""
    from pydantic import NonNegativeInt, TypeAdapter

    try:
        labels = TypeAdapter(list[tuple[NonNegativeInt, str | None]]).validate_json(record.read_bytes(), strict=True)
        rows = sum(why is None for _, why in labels)
        header = _header(rows, size)
        with pixels.open("rb") as file:
            is_intact = len(labels) == count and file.read(len(header)) == header
            is_intact &= file.seek(0, os.SEEK_END) == len(header) + rows * size * size * 3
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        is_intact = False
    if not is_intact:
        print(f"{pixels} or {record.name}: is damaged; writing both again")
        return None
    return np.load(pixels, mmap_mode="r"), labels


def _write(parts: Sequence[ImageFiles], size: int, record: Path, pixels: Path) -> list[_Label]:
    """Read the images into the file `pixels`; write labels and reasons to `record`, and return them."""
    with writing(pixels):
        pixels.parent.mkdir(parents=True, exist_ok=True)
    labels: list[_Label] = []
    rows = 0
    # Written row by row: on a full disk, writing to a mapped file ends the process without a message.
    with atomic_large_path(pixels) as temporary, temporary.open("wb") as file:
        file.write(_header(0, size))
        for image, label, why in decoded(parts, size):
            if image is not None:
                file.write(image.tobytes())
                rows += 1
            labels.append((label, why))
        file.seek(0)
        file.write(_header(rows, size))
    write_json(record, labels)
    return labels


def _header(count: int, size: int) -> bytes:
    """The header of a .npy file. Its length does not depend on `count`, so it can be overwritten."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count, size, size, 3)})
    return file.getvalue()


def decoded(parts: Sequence[ImageFiles], size: int) -> Iterator[tuple[np.ndarray | None, int, str | None]]:
    """Decode all images on all cores, in order.

    Yields:
        (pixels, label, None) for an image, or (None, label, reason) for one that cannot be read.
    """

    def attempt(example: tuple[int, tuple[ImageSource, int]]) -> tuple[np.ndarray | None, int, str | None]:
        index, (source, label) = example
        try:
            return decode(source, size), label, None
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises many types for a damaged image
            return None, label, decode_failure(source, index, error)

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


def _by_part(images: np.ndarray, labels: Sequence[_Label], parts: Sequence[ImageFiles]) -> list[DecodedImages]:
    """Divide the images and labels of all `parts`, one after the other, into those of each part."""
    result, start, row = [], 0, 0
    for part in parts:
        part_labels = labels[start : start + part.count]
        read_labels = np.array([label for label, why in part_labels if why is None], np.int32)
        broken = {k: why for k, (_, why) in enumerate(part_labels) if why is not None}
        result.append(DecodedImages(images[row : row + len(read_labels)], read_labels, broken))
        start, row = start + part.count, row + len(read_labels)
    return result


def fingerprint(part: ImageFiles) -> str:
    """The number of images, and a digest that changes with the order, names, sizes and last bytes of their files.

    It stays the same where the folder is moved or copied. Reading all bytes would take minutes of a large data set;
    the last ones distinguish images that are not compressed, whose sizes agree.
    """
    digest = hashlib.sha256()
    for name in part.files:
        path = Path(name)
        digest.update("|".join(path.parts[-2:]).encode(errors="surrogateescape"))
        with contextlib.suppress(OSError), path.open("rb") as file:  # it may be an image that --skip_broken leaves out
            size = file.seek(0, os.SEEK_END)
            file.seek(-min(size, _TAIL_BYTES), os.SEEK_END)
            digest.update(f"|{size}|".encode() + file.read())
    return f"{part.count}, digest {digest.hexdigest()[:16]}"


def _digest(parts: Sequence[ImageFiles], size: int) -> str:
    """A digest that changes when one of the files that hold the images changes."""
    digest = hashlib.sha256(f"{_READER_VERSION} {size}".encode())
    for part in parts:
        digest.update(f"|{part.count}".encode())
        for path in part.files:
            status = Path(path).stat()
            digest.update(f"|{path}|{status.st_size}|{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
