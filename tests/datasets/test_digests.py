"""The digests by which photos are known: copies with other metadata are one photo."""

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from small_images import encoded

from elastic_trainer.datasets.digests import digest, image_data

NOISE = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # shown as turned
    return exif


def text():
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "of a person")
    return info


FORMATS = {
    "jpeg": ("JPEG", {}, {"exif": turned(), "comment": b"a comment", "icc_profile": b"p" * 70_000}),
    "progressive": ("JPEG", {"progressive": True}, {"exif": turned()}),
    "png": ("PNG", {}, {"pnginfo": text(), "exif": turned(), "dpi": (300, 300)}),
    "webp": ("WEBP", {}, {"exif": turned(), "xmp": b"<x/>", "icc_profile": b"p" * 99}),
    "lossless webp": ("WEBP", {"lossless": True}, {"exif": turned()}),
    "gif": ("GIF", {}, {"comment": b"a comment" * 100}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_with_other_metadata_has_the_same_digest_and_another_image_has_not(name):
    kind, options, metadata = FORMATS[name]
    image = Image.fromarray(NOISE)
    plain, copy = encoded(image, kind, **options), encoded(image, kind, **options, **metadata)
    assert plain != copy, "the files differ"
    assert digest(plain) == digest(copy)
    other = NOISE.copy()
    other[20:] = 255 - other[20:]
    assert digest(encoded(Image.fromarray(other), kind, **options)) != digest(plain)
    assert len(image_data(plain)) > 0.9 * len(plain), "all of the pixels count"


def test_what_follows_a_jpeg_such_as_a_video_of_a_phone_is_not_of_the_photo():
    plain = encoded(Image.fromarray(NOISE), "JPEG")
    assert digest(plain + b"more" * 100) == digest(plain)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_has_a_digest(name):
    kind, options, metadata = FORMATS[name]
    whole = encoded(Image.fromarray(NOISE[:4, :4]), kind, **options, **metadata)
    rng = np.random.default_rng(1)
    for length in rng.integers(0, len(whole), 50):
        damaged = bytearray(whole[:length])
        for place in rng.integers(0, max(length, 1), 3 if length else 0):
            damaged[place] ^= 255
        digest(bytes(damaged))
    assert image_data(b"") == b"" and image_data(b"BM no metadata") == b"BM no metadata"
