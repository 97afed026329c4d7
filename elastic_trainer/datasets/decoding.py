"""Decodes one image with Pillow: upright, RGB, square, uint8; and describes why an image cannot be decoded.

The format is recognised from the content of a file, not from its extension.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from elastic_trainer.errors import first_line, printable

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
KINDS = "JPEG, PNG, BMP, WebP or GIF"

ImageSource = str | bytes | np.ndarray  # path of a file, encoded image, or pixels [height, width, 3]


def header_error(path: str) -> str | None:
    """What is wrong with an image file, judged by its first bytes; None if nothing is."""
    try:
        with _open(path) as file:
            if not file.read(1):
                return "is empty"
            file.seek(0)
            with Image.open(file, formats=FORMATS):
                return None
    except OSError as error:
        if error.strerror:
            return f"cannot be read: {error.strerror}"
        return f"is not a {KINDS} image, whatever its name says"
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many types for a damaged header
        return f"cannot be read as an image: {_first_line(error)}"


def decode(source: ImageSource, size: int) -> np.ndarray:
    """Decode one image to uint8 [size, size, 3].

    The image is turned upright by its EXIF data and stretched to a square. Grey becomes RGB, transparent becomes white.

    Raises:
        OSError: the file cannot be read. Pillow raises many other types for a damaged image.
    """
    if isinstance(source, np.ndarray):
        return _resized(Image.fromarray(source), size)
    with io.BytesIO(source) if isinstance(source, bytes) else _open(source) as file:
        return _decode_file(file, size)


def _open(path: str) -> BinaryIO:
    """A file for reading. Raises `OSError` for a pipe or a device, which opening might wait for without end."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    return Path(path).open("rb")


def _decode_file(file: BinaryIO, size: int) -> np.ndarray:
    with Image.open(file, formats=FORMATS) as image:
        image.draft("RGB", (size, size))  # a much larger JPEG is decoded at a half, a quarter or an eighth of its size
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16-bit grey
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) / 257).round().astype(np.uint8))
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return _resized(upright.convert("RGB"), size)


def _resized(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def decode_failure(source: ImageSource, index: int, error: Exception) -> str:
    """One line on an image for which `decode` raised `error`: its path (or `index`, if it has none) and the reason."""
    reason = header_error(source) if isinstance(source, str) else None
    name = source if isinstance(source, str) else f"image {index}"
    return printable(f"{name}: {reason or f'cannot be read as an image: {_first_line(error)}'}")


def _first_line(error: Exception) -> str:
    return first_line(error).rstrip(".")
