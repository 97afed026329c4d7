"""Copies of photos: files with the same pixels are one photo, whatever their format, metadata and orientation."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from small_images import encoded, load_photos

from elastic_trainer.datasets.decoding import digest, read_photo

SIZE = 16


def metadata(kind):
    """Options of a copy that is shown as turned, with a text."""
    exif = Image.Exif()
    exif[0x0112] = 6
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "of a person")
    own: dict[str, dict[str, Any]] = {"JPEG": {"comment": b"a"}, "PNG": {"pnginfo": text}, "WEBP": {"xmp": b"<x/>"}}
    return {"exif": exif, **own[kind]}


def photo(seed):
    """A photo of 37×45 that was saved as a JPEG before."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((37, 45))
    with Image.open(io.BytesIO(encoded(image, "JPEG"))) as saved:
        return Image.fromarray(np.asarray(saved))


def copies(seed):
    """Files of one photo by their names."""
    image = photo(seed)
    files = {"first.png": encoded(image, "PNG"), "lossless.webp": encoded(image, "WEBP", lossless=True)}
    files |= {"same.bmp": encoded(image, "BMP"), "turned.png": encoded(image, "PNG", **metadata("PNG"))}
    return {**files, "turned.webp": encoded(image, "WEBP", lossless=True, **metadata("WEBP"))}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [8, SIZE, 64])
def test_copies_with_other_metadata_have_one_digest_and_other_photos_have_others(kind, size):
    plain, copy, other = (encoded(photo(seed), kind, **more) for seed, more in ((0, {}), (0, metadata(kind)), (1, {})))
    first, second, third = (digest(read_photo(content, size)) for content in (plain, copy, other))
    assert plain != copy and first == second != third
    assert (read_photo(plain, size) != read_photo(copy, size)).any(), "one is turned"


def test_copies_stay_on_one_side_whatever_their_format(tmp_path):
    for seed in range(40):
        folder = tmp_path / ("ant" if seed % 2 else "bee")
        folder.mkdir(exist_ok=True)
        for name, content in copies(seed).items():
            (folder / f"{seed}-{name}").write_bytes(content)
    images = load_photos(tmp_path, SIZE, 2)
    assert images.train_count + images.test_count == 200 and images.train_count % 5 == images.test_count % 5 == 0
    assert len(images.training_digests) == images.train_count / 5
    assert 10 <= images.test_count <= 80
