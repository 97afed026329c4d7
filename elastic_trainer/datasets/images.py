"""Images read once: decoded, turned upright, resized to the network's input, and kept as uint8.

What a file holds shows in its content; its ending says nothing. Decoding is Pillow's, on all cores. The result stays in
memory if it is small enough, else in a file that later runs find again (`read`), from which the system loads what a
batch needs. An epoch then costs no decoding at all.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy
from PIL import Image, ImageOps
from tqdm import tqdm

import utils
from elastic_trainer.machine import available_memory_mb

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
KINDS = "JPEG, PNG, BMP, WebP or GIF"
MEMORY_SHARE = 4  # of the memory that is available, one in so many MB may hold images unless --image_memory says more
UNTOLD_MEMORY_MB = 1024  # what they may take where the system does not tell
_CHUNK = 64  # images in hand at one time while reading
_READER = 1  # raised when the same file would be read to other pixels

ImageSource = str | bytes | np.ndarray  # path of a file, encoded image, or pixels [height, width, 3]


@dataclass(frozen=True)
class Encoded:
    """Images not yet read.

    Attributes:
        count: how many.
        examples: yields each source with its label, always in the same order.
        files: what they lie in; when none of these has changed, images read before need not be read again.
    """

    count: int
    examples: Callable[[], Iterator[tuple[ImageSource, int]]]
    files: Sequence[str] = ()


class Pixels(NamedTuple):
    """Images as they were read.

    Attributes:
        images: uint8 [count, size, size, 3], in memory or mapped from a file.
        labels: int32 [count].
        broken: which of the sources could not be read, counted from 0, each with its name and why; not in `images`.
    """

    images: np.ndarray
    labels: np.ndarray
    broken: dict[int, str]


def wrong_start(path: str) -> str | None:
    """Why a file is no image by the first bytes of it, or None where it is one."""
    try:
        with Path(path).open("rb") as file:
            if not file.read(1):
                return "is empty"
            file.seek(0)
            with Image.open(file, formats=FORMATS):
                return None
    except OSError as error:
        if error.strerror:
            return f"cannot be read: {error.strerror}"
        return f"is no {KINDS}, whatever its name says"
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise many kinds for a damaged header
        return f"cannot be read as an image: {_reason(error)}"


def decode(source: ImageSource, size: int) -> np.ndarray:
    """One image as uint8 [size, size, 3], upright as its EXIF data says.

    Grey becomes RGB, what is transparent becomes white. The sides are stretched to a square.

    Raises:
        OSError, and whatever else Pillow raises for an image that is damaged.
    """
    if isinstance(source, np.ndarray):
        return _fitted(Image.fromarray(source), size)
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        return _decode_file(file, size)


def _decode_file(file: BinaryIO, size: int) -> np.ndarray:
    with Image.open(file, formats=FORMATS) as image:
        image.draft("RGB", (size, size))  # a JPEG much larger than that is decoded to a half, a quarter or an eighth
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits of grey
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) / 257).round().astype(np.uint8))
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return _fitted(upright.convert("RGB"), size)


def told(source: ImageSource, index: int, error: Exception) -> str:
    """What to say of the `index`-th image, which `decode` raised `error` for."""
    why = wrong_start(source) if isinstance(source, str) else None
    where = source if isinstance(source, str) else f"image {index}"
    return f"{where}: {why or f'cannot be read as an image: {_reason(error)}'}"


def _reason(error: Exception) -> str:
    return utils.first_line(error).rstrip(".")


def _fitted(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def read(
    parts: Sequence[Encoded],
    size: int,
    name: str,
    folder: Path | None = None,
    memory_mb: float | None = None,
) -> list[Pixels]:
    """Read all images of all `parts`, with a progress bar; broken ones are left out and reported.

    Args:
        parts: the images, such as of each split.
        size: height and width they are resized to.
        name: of the data set, for what is printed and for the file's name.
        folder: where a file may be put when they are more than fits; None: always in memory.
        memory_mb: how many MB they may take; None: a quarter of what the system can give now.

    Raises:
        UserError: the file cannot be written.
    """
    count = sum(part.count for part in parts)
    needed_mb = count * size * size * 3 / 1e6
    if memory_mb is None:
        available_mb = available_memory_mb()
        memory_mb = UNTOLD_MEMORY_MB if available_mb is None else available_mb / MEMORY_SHARE
    if folder is None or needed_mb <= memory_mb:
        images = np.empty((count, size, size, 3), np.uint8)
        found, whole = [], 0
        for image, label, why in _decoded(parts, size):
            if image is not None:
                images[whole] = image
                whole += 1
            found.append((label, why))
        return _apart(images, found, parts)
    stem = folder / f"{name}_{size}_{_digest(parts, size)}"
    record, pixels = stem.with_suffix(".json"), stem.with_suffix(".npy")
    kept = _kept(record, pixels)
    if kept is not None:
        print(f"{name}: images at {size}×{size} from {pixels}")
        return _apart(*kept, parts)
    print(
        f"{name}: {needed_mb:,.0f} MB of images at {size}×{size} are more than the {memory_mb:,.0f} MB they may "
        f"take in memory (--image_memory): they go into {pixels}"
    )
    found = _write(parts, size, record, pixels)
    return _apart(np.load(pixels, mmap_mode="r"), found, parts)


def _kept(record: Path, pixels: Path) -> tuple[np.ndarray, list[tuple[int, str | None]]] | None:
    """What `_write` wrote, unless it did not, or somebody damaged it."""
    try:
        found = [(label, why) for label, why in json.loads(record.read_text(encoding="utf-8"))]
        return np.load(pixels, mmap_mode="r"), found
    except (OSError, ValueError):
        return None


def _write(parts: Sequence[Encoded], size: int, record: Path, pixels: Path) -> list[tuple[int, str | None]]:
    """Read the images into file `pixels`, their labels and what is broken into `record`; returns the latter."""
    with utils.writing(pixels):
        pixels.parent.mkdir(parents=True, exist_ok=True)
    found: list[tuple[int, str | None]] = []
    whole = 0
    # Written row by row: on a full disk a mapped file would end the process without a word.
    with utils.atomic_path(pixels) as temporary, temporary.open("wb") as file:
        file.write(_header(0, size))
        for image, label, why in _decoded(parts, size):
            if image is not None:
                file.write(image.tobytes())
                whole += 1
            found.append((label, why))
        file.seek(0)
        file.write(_header(whole, size))
    utils.write_json(record, found)
    return found


def _header(count: int, size: int) -> bytes:
    """Start of a .npy file; of one length for any count, so that it can be written over."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count, size, size, 3)})
    return file.getvalue()


def _decoded(parts: Sequence[Encoded], size: int) -> Iterator[tuple[np.ndarray | None, int, str | None]]:
    """Of each image its pixels, its label, and None; or None, its label, and why it cannot be read."""

    def attempt(example: tuple[int, tuple[ImageSource, int]]) -> tuple[np.ndarray | None, int, str | None]:
        index, (source, label) = example
        try:
            return decode(source, size), label, None
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises many kinds for a damaged image
            return None, label, told(source, index, error)

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


def _apart(images: np.ndarray, found: Sequence[tuple[int, str | None]], parts: Sequence[Encoded]) -> list[Pixels]:
    """`images`, those of all `parts` one after the other, part by part."""
    result, begin, row = [], 0, 0
    for part in parts:
        own = found[begin : begin + part.count]
        labels = np.array([label for label, why in own if why is None], np.int32)
        broken = {k: why for k, (_, why) in enumerate(own) if why is not None}
        result.append(Pixels(images[row : row + len(labels)], labels, broken))
        begin, row = begin + part.count, row + len(labels)
    return result


def _digest(parts: Sequence[Encoded], size: int) -> str:
    """Changes when a file does that one of the images lies in."""
    told = hashlib.sha256(f"{_READER} {size}".encode())
    for part in parts:
        told.update(f"|{part.count}".encode())
        for path in part.files:
            status = Path(path).stat()
            told.update(f"|{path}|{status.st_size}|{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return told.hexdigest()[:16]
