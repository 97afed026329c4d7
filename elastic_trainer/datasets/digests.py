"""Digests by which photos are known again, and damage of a board's records is found.

A photo's is of its coded pixels, whatever the name, place and metadata of its file.

A board gets a copy of this file (`board.export`), so it imports nothing but Python's own modules, from 3.6 on.
"""

import hashlib
import json
import re
from typing import Any, Collection, Dict, Iterator, Mapping, Set, Tuple

# Of the next segment of a JPEG. After FF, a 0 belongs to the coded pixels, as do the markers from which they restart.
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


def digest(encoded: bytes) -> int:
    """A digest of 64 bits of an image's `image_data`: the same for copies with other comments, dates or orientation."""
    return int.from_bytes(hashlib.blake2b(image_data(encoded), digest_size=8).digest(), "big")


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of what a JSON file holds, without the field "digest", which is for it."""
    content = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def tested_digests(photos: Collection[Tuple[int, int]], fraction: float) -> Set[int]:
    """The digests of the photos that are for testing, from the label and the digest of each.

    A digest is an even draw from 0 to 2^64, and those below `fraction` of that are for testing. So a photo stays where
    it is whatever is added, removed, renamed or copied, and copies of a photo stay together. Only in a class that would
    be left without test photos, its smallest digest is tested nevertheless; in one that would be left without training
    photos, the largest trains.
    """
    tested = {number for _, number in photos if number < fraction * 2**64}
    of_class: Dict[int, Set[int]] = {}
    for label, number in photos:
        of_class.setdefault(label, set()).add(number)
    for numbers in of_class.values():
        if numbers.isdisjoint(tested):
            tested.add(min(numbers))
        if numbers <= tested:
            tested.remove(max(numbers))
    return tested


def image_data(encoded: bytes) -> bytes:
    """The coded pixels of an image: its file without metadata, such as comments, EXIF data and previews.

    Pixels are not decoded, which takes far longer: a copy that was coded again is another image. A BMP, which has no
    metadata, what is no image file, and a damaged one are returned as they are.
    """
    try:
        if encoded[:2] == b"\xff\xd8":
            parts = _jpeg_parts(encoded)
        elif encoded[:4] == b"\x89PNG":
            parts = _png_parts(encoded)
        elif encoded[:4] == b"RIFF":
            parts = _webp_parts(encoded)
        elif encoded[:3] == b"GIF":
            parts = _gif_parts(encoded)
        else:
            return encoded
        return b"".join(parts) or encoded
    except IndexError:  # it ends too early
        return encoded


def _jpeg_parts(encoded: bytes) -> Iterator[bytes]:
    """All segments but APPn and COM, and the coded pixels between them, up to the end of the first image."""
    end = 2
    while True:
        marker = _JPEG_MARKER.search(encoded, end)
        start = marker.start() if marker else len(encoded)
        yield encoded[end:start]
        if marker is None or encoded[start + 1] == 0xD9:
            return
        end = start + 2 + int.from_bytes(encoded[start + 2 : start + 4], "big")
        if not (0xE0 <= encoded[start + 1] <= 0xEF or encoded[start + 1] == 0xFE):
            yield encoded[start:end]


def _png_parts(encoded: bytes) -> Iterator[bytes]:
    """The contents of the chunks that hold size, colours and pixels of the first picture."""
    start = 8
    while start + 8 <= len(encoded):
        length, kind = int.from_bytes(encoded[start : start + 4], "big"), encoded[start + 4 : start + 8]
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT"):
            yield encoded[start + 8 : start + 8 + length]
        start += length + 12


def _webp_parts(encoded: bytes) -> Iterator[bytes]:
    """The contents of the chunks that hold pixels."""
    start = 12
    while start + 8 <= len(encoded):
        kind, length = encoded[start : start + 4], int.from_bytes(encoded[start + 4 : start + 8], "little")
        if kind in (b"VP8 ", b"VP8L", b"ALPH", b"ANMF"):
            yield encoded[start + 8 : start + 8 + length]
        start += 8 + length + length % 2


def _gif_parts(encoded: bytes) -> Iterator[bytes]:
    """Size and colours, and of what follows the images and what says which colour is transparent."""
    end = 13 + _colours(encoded[10])
    yield encoded[6:end]
    while encoded[end] != 0x3B:
        start, is_image = end, encoded[end] == 0x2C
        end += 11 + _colours(encoded[end + 9]) if is_image else 2
        while encoded[end]:
            end += encoded[end] + 1
        end += 1
        if is_image or encoded[start + 1] == 0xF9:
            yield encoded[start:end]


def _colours(flags: int) -> int:
    """Bytes of the table of colours that a GIF has after such flags."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
