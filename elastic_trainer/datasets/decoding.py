"""Decodes one image with Pillow: upright, RGB, square, uint8; and describes why an image cannot be decoded.

The format is recognised from the content of a file, not from its extension.
"""

from __future__ import annotations

import errno
import io
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np

from elastic_trainer.system.errors import first_line, importing, printable

with importing("reading images"):
    from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
KINDS = "JPEG, PNG, BMP, WebP or GIF"
MAX_MB = 256  # that one image may take as RGBA before it is resized; decoding takes a few times as much for a moment

ImageSource = str | bytes | np.ndarray  # path of a file, encoded image, or pixels [height, width, 3]

_pillow_limit = threading.Lock()


def header_error(path: str) -> str | None:
    """What is wrong with an image file, judged by its first bytes; None if nothing is."""
    try:
        with _open_file(path) as file:
            if not file.read(1):
                return "is empty"
            file.seek(0)
            with _open_image(file):
                return None
    except OSError as error:
        return (
            f"cannot be read: {error.strerror}" if error.strerror else f"is not a {KINDS} image, whatever its name says"
        )
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many types for a damaged header
        return f"cannot be read as an image: {_first_line(error)}"


def content(source: ImageSource) -> bytes:
    """The bytes of an image: those of its file, or its pixels."""
    if isinstance(source, np.ndarray):
        return source.tobytes()
    if isinstance(source, bytes):
        return source
    with _open_file(source) as file:
        return file.read()


def decode(source: ImageSource, size: int) -> np.ndarray:
    """Decode one image to uint8 [size, size, 3]: upright by its EXIF data, stretched to a square, transparency white.

    A large JPEG is decoded at a half, a quarter or an eighth of its size. Raises `ValueError` if the image takes more
    than `MAX_MB`; Pillow raises many other types for a damaged one.
    """
    if isinstance(source, np.ndarray):
        return _resized(Image.fromarray(source), size)
    with _open_image(io.BytesIO(content(source))) as image:
        # A progressive JPEG is first read at its full size, as coefficients of 3 bytes for each pixel.
        read_bytes = 3 * image.width * image.height if image.info.get("progressive") else 0
        full_size = f"{image.width}×{image.height}"
        image.draft("RGB", (size, size))
        needed_mb = max(4 * image.width * image.height, read_bytes) / 1e6
        if needed_mb > MAX_MB:
            raise ValueError(
                f"{full_size} pixels take {needed_mb:,.0f} MB while they are decoded, and the limit is {MAX_MB} MB; "
                "make it smaller, or a baseline JPEG"
            )
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16-bit grey
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) / 257).round().astype(np.uint8))
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return _resized(upright.convert("RGB"), size)


def _open_file(path: str) -> BinaryIO:
    """A file for reading. Raises `OSError` for a pipe or a device, which opening might wait for without end."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    return Path(path).open("rb")


def _open_image(file: BinaryIO | io.BytesIO) -> Image.Image:
    """Read an image's header. Pillow's own limit on pixels, which counts those of a JPEG at full size, is off."""
    with _pillow_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file, formats=FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _resized(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def decode_failure(source: ImageSource, index: int, error: Exception) -> str:
    """One line on an image for which `decode` raised `error`: its path (or `index`, if it has none) and the reason."""
    reason = header_error(source) if isinstance(source, str) else None
    name = source if isinstance(source, str) else f"image {index}"
    return printable(f"{name}: {reason or f'cannot be read as an image: {_first_line(error)}'}")


def _first_line(error: Exception) -> str:
    return first_line(error).rstrip(".")
