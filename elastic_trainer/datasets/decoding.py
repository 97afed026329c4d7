"""Reads a photo with Pillow: upright, RGB, square, uint8; and a digest by which it is known again.

The format is recognised from the content, not from the name. A board gets a copy of this file (`board.export`), so it
imports nothing but NumPy and Pillow, from Python 3.6 on.
"""

import hashlib
import io
import math
import os
import threading
from typing import IO, TYPE_CHECKING, Union

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
KINDS = "JPEG, PNG, BMP, WebP or GIF"
MAX_MB = 576  # that reading one photo may take: 64 megapixels of a PNG
PIXEL_BYTES, WEBP_BYTES = 9, 21  # that decoding takes at most, for each pixel (measured; libwebp makes copies)
ROWS = 64  # that are converted at a time
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"eXIf", b"IEND")  # of a PNG, and its orientation
ORIENTATION = 0x0112  # in EXIF data: one of these, which numbers the methods of `Image.transpose`
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
CENTRE = 7 / 8  # of each side: networks are made on crops, and usually tested on 224 pixels of 256
BILINEAR = 2  # Pillow 8, the last for Python 3.6, has these names elsewhere

_pillow_limit = threading.Lock()


def read_photo(photo: Union[str, "os.PathLike[str]", bytes], size: int, most_mb: float = MAX_MB) -> np.ndarray:
    """The pixels of a photo as every program of this project sees them: uint8 [size, size, 3].

    It is turned upright by its EXIF orientation, and the middle 7/8 of its width and height are stretched to a square:
    networks learn from crops, which show things larger than whole photos do ("Fixing the train-test resolution
    discrepancy", Touvron et al., NeurIPS 2019). Grey becomes RGB, transparent becomes white. A large JPEG is decoded at
    a half, a quarter or an eighth of its size. Texts are ignored.

    Args:
        photo: the path of a JPEG, PNG, BMP, WebP or GIF, or what it contains.
        size: height and width of the result.
        most_mb: MB that reading it may take.

    Raises:
        OSError: the file cannot be read, or is no photo.
        ValueError: it takes more than `most_mb`. Pillow raises many other types for a damaged file.
    """
    if not isinstance(photo, bytes) and os.path.exists(photo) and not os.path.isfile(photo):
        raise OSError("a pipe, a device or a folder, not a file")  # opening it might wait without end
    with io.BytesIO(photo) if isinstance(photo, bytes) else open(photo, "rb") as file:
        try:
            return _decoded(file, size, most_mb)
        except ValueError:
            file.seek(0)
            if file.read(4) != b"\x89PNG":
                raise
            file.seek(0)
            return _decoded(_without_texts(file.read()), size, most_mb)  # Pillow refuses large ones


def smaller_side(photo: Union[str, bytes, np.ndarray]) -> int:
    """Of a photo, in pixels; 0 if it cannot be read. Of a file, its header alone is read."""
    if isinstance(photo, np.ndarray):
        return min(photo.shape[:2])
    try:
        with io.BytesIO(photo) if isinstance(photo, bytes) else open(photo, "rb") as file, _opened(file) as image:
            return min(image.size)
    except Exception:  # Pillow raises many types for a damaged image
        return 0


def _decoded(file: IO[bytes], size: int, most_mb: float) -> np.ndarray:
    with _opened(file) as image:
        width, height = image.size
        # A progressive JPEG is first read at its full size, as coefficients of 3 bytes for each pixel.
        read_bytes = 3 * width * height if image.info.get("progressive") else 0
        image.draft("RGB", (math.ceil(size / CENTRE),) * 2)
        each = WEBP_BYTES if image.format == "WEBP" else PIXEL_BYTES
        needed_mb = (read_bytes + each * image.width * image.height) / 1e6
        if needed_mb > most_mb:
            raise ValueError(
                "{}×{} pixels take {:,.0f} MB while they are decoded, and the limit is {:,.0f} MB; make it smaller, "
                "or a baseline JPEG".format(width, height, needed_mb, most_mb)
            )
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
        is_plain = image.mode == "RGB" and "transparency" not in image.info
        # Resized before it is turned: so copies that differ in their orientation alone have the same pixels.
        left, top = (side * (1 - CENTRE) / 2 for side in image.size)
        box = (left, top, image.width - left, image.height - top)
        square = (image if is_plain else _in_rgb(image)).resize((size, size), BILINEAR, box)
        return np.asarray(square if turn is None else square.transpose(turn))  # type: ignore[arg-type]


def _opened(file: IO[bytes]) -> "Image.Image":
    """Read an image's header. Pillow's own limit on pixels, which counts those of a JPEG at full size, is off."""
    from PIL import Image, UnidentifiedImageError  # needs an extra

    with _pillow_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            raise OSError("no {} image, whatever its name says".format(KINDS)) from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _in_rgb(image: "Image.Image") -> "Image.Image":
    """Grey becomes RGB, transparent becomes white; some rows at a time, which takes less memory."""
    from PIL import Image

    converted = Image.new("RGB", image.size)
    for top in range(0, image.height, ROWS):
        rows = image.crop((0, top, image.width, min(top + ROWS, image.height)))
        if rows.mode.startswith("I"):  # 16-bit grey
            rows = Image.fromarray((np.asarray(rows).clip(0, 65535) / 257).round().astype(np.uint8))
        if rows.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in rows.info:
            rows = Image.alpha_composite(Image.new("RGBA", rows.size, "white"), rows.convert("RGBA"))
        converted.paste(rows.convert("RGB"), (0, top))
    return converted


def _without_texts(png: bytes) -> IO[bytes]:
    """A PNG with the chunks alone that decide on its pixels."""
    kept, start = png[:8], 8
    while start < len(png):
        end = start + 12 + int.from_bytes(png[start : start + 4], "big")
        if png[start + 4 : start + 8] in PIXEL_CHUNKS:
            kept += png[start:end]
        start = end
    return io.BytesIO(kept)


def digest(pixels: np.ndarray) -> int:
    """A digest of 64 bits of an image, uint8 [size, size, 3]: the same however it is turned or mirrored."""
    half = (len(pixels) + 1) // 2
    total = pixels[:half].astype(np.uint16) + pixels[::-1][:half]
    total = total[:, :half] + total[:, ::-1][:, :half]
    total = total + total.transpose(1, 0, 2)  # of all eight ways to turn it, of which a quarter says all
    return int.from_bytes(hashlib.blake2b(total.tobytes(), digest_size=8).digest(), "big")
