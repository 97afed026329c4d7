"""Reading one photo: formats, colour modes, orientation, files that are none, and copies."""

import io
import os
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin
from small_images import encoded, load_photos

import elastic_trainer
from elastic_trainer.datasets.decoding import FORMATS, KINDS, digest, read_photo

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def halves(mode="RGB"):
    """An image 60 wide and 40 high: red above blue."""
    image = Image.new("RGB", (60, 40), RED)
    image.paste(BLUE, (0, 20, 60, 40))
    return image.convert(mode)


def close(pixels, colour, tolerance=6):
    """Whether all pixels have nearly this colour."""
    return np.abs(pixels.astype(int) - np.array(colour)).max() <= tolerance


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_decoded_and_stretched_to_a_square(kind, tmp_path):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    content = encoded(halves(), kind, **options)
    pixels = read_photo(content, 16)
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.uint8
    assert close(pixels[:6], RED) and close(pixels[10:], BLUE)
    path = tmp_path / "without_ending"
    path.write_bytes(content)
    np.testing.assert_array_equal(read_photo(path, 16), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_pillow_does(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    corners = Image.fromarray(np.arange(27, dtype=np.uint8).reshape(3, 3, 3) * 9)
    unturned = encoded(Image.fromarray(read_photo(encoded(corners, "PNG"), 3)), "PNG", exif=exif)
    with Image.open(io.BytesIO(unturned)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(read_photo(encoded(corners, "PNG", exif=exif), 3), expected)


@pytest.mark.parametrize(("width", "height"), [(160, 160), (320, 80)])
def test_the_middle_seven_eighths_of_each_side_are_seen(width, height):
    unseen, seen = (Image.new("RGB", (width, height), RED) for _ in range(2))
    for image, border in ((unseen, 1 / 32), (seen, 3 / 32)):
        left, top = round(width * border), round(height * border)
        image.paste(BLUE, (left, top, width - left, height - top))
    assert close(read_photo(encoded(unseen, "PNG"), 20), BLUE, 0)
    pixels = read_photo(encoded(seen, "PNG"), 20)
    assert close(pixels[1:-1, 1:-1], BLUE, 70) and all(edge[:, 0].min() > 100 for edge in (pixels[0], pixels[:, -1]))


def test_a_large_jpeg_decodes_to_nearly_the_same_pixels():
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((1600, 1200))
    expected = np.asarray(smooth.resize((32, 32), Image.Resampling.BILINEAR, box=(100, 75, 1500, 1125)))
    pixels = read_photo(encoded(smooth, "JPEG", quality=95), 32)
    assert np.abs(pixels.astype(int) - expected).mean() < 2


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("LA", "PNG"), ("P", "GIF")]
)
def test_other_colour_modes_become_rgb(mode, kind):
    pixels = read_photo(encoded(halves(mode), kind), 8)
    assert pixels.shape == (8, 8, 3)
    assert (np.ptp(pixels, axis=-1).max() <= 1) == (mode in ("L", "1", "LA"))


def test_alpha_is_blended_with_white_and_a_transparent_colour_becomes_white():
    image = Image.new("RGBA", (20, 20), (*RED, 0))
    image.paste((*BLUE, 128), (0, 10, 20, 20))
    pixels = read_photo(encoded(image, "PNG"), 20)
    assert close(pixels[:9], WHITE, 0) and close(pixels[11:], (127, 127, 255), 2)
    palette = halves("P")
    pixels = read_photo(encoded(palette, "PNG", transparency=palette.getpixel((0, 0))), 20)
    assert close(pixels[:8], WHITE, 0) and close(pixels[12:], BLUE, 6)


def test_16_bit_grey_is_scaled_to_8_bits():
    values = np.array([[0, 65535], [32896, 257]], np.uint16).repeat(8, axis=0).repeat(8, axis=1)
    pixels = read_photo(encoded(Image.fromarray(values), "PNG"), 14)
    assert pixels[::13, ::13, 0].tolist() == [[0, 255], [128, 1]]


def test_a_run_has_the_pixels_of_the_public_call(tmp_path):
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 256, (90, 70, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    photos = {
        "grey16.png": encoded(Image.fromarray(rng.integers(0, 65535, (90, 30), dtype=np.uint16)), "PNG"),
        "clear.png": encoded(Image.fromarray(rng.integers(0, 256, (90, 30, 4), dtype=np.uint8)), "PNG", exif=turned),
        "plain.jpg": encoded(colour, "JPEG", exif=turned),
        "progressive.jpg": encoded(colour, "JPEG", progressive=True),
        "printed.jpg": encoded(colour.convert("CMYK"), "JPEG"),
        "palette.gif": encoded(colour.convert("P"), "GIF", transparency=3),
    }
    for place in ("train/ant", "train/bee", "test/ant"):
        (tmp_path / place).mkdir(parents=True)
        for name, content in photos.items():
            (tmp_path / place / name).write_bytes(content)
    [batch] = load_photos(tmp_path, 24, 2).test()
    for name, image in zip(sorted(photos), batch.inputs.numpy(), strict=True):
        np.testing.assert_array_equal(elastic_trainer.read_photo(tmp_path / "test/ant" / name, 24), image)


def test_a_jpeg_beyond_pillows_limit_is_decoded_small_without_a_warning(monkeypatch):
    """The limit is lowered, as a photo of 200 megapixels takes long to write."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = read_photo(encoded(halves().resize((640, 480)), "JPEG", quality=95), 16, most_mb=0.5)
    assert close(pixels[:6], RED) and close(pixels[10:], BLUE) and Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("GIF", {}), ("JPEG", {"progressive": True})])
def test_an_image_that_takes_too_much_memory_is_refused_in_a_line(kind, options):
    content = encoded(halves().resize((640, 480)), kind, **options)
    with pytest.raises(ValueError, match=r"^640×480 pixels take \d MB .* the limit is 0 MB; make it smaller"):
        read_photo(content, 16, most_mb=0.5)


def test_why_a_file_cannot_be_read(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"<html>not found</html>")
    whys = {
        "loop": "Too many levels of symbolic links",
        "none": "No such file or directory",
        "empty": f"no {KINDS} image, whatever its name says",
        "text": f"no {KINDS} image, whatever its name says",
    }
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # which nobody writes to
        whys["pipe"] = "a pipe, a device or a folder, not a file"
    for name, why in whys.items():
        with pytest.raises(OSError) as caught:
            read_photo(str(tmp_path / name), 8)
        assert (caught.value.strerror or str(caught.value)) == why


@pytest.mark.parametrize("is_last", [False, True])
def test_a_png_with_a_large_compressed_text_is_read_without_it(is_last):
    content = encoded(halves(), "PNG")
    text = b"zTXtcomment\0\0" + zlib.compress(bytes(2 * PngImagePlugin.MAX_TEXT_CHUNK))
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    place = len(content) - 12 if is_last else 33  # before its end, or after its header
    np.testing.assert_array_equal(read_photo(content[:place] + chunk + content[place:], 16), read_photo(content, 16))


# --- digests: copies are one photo, whatever their format, metadata and orientation -----------------------------------


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


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [8, 16, 64])
def test_copies_with_other_metadata_have_one_digest_and_other_photos_have_others(kind, size):
    plain, copy, other = (encoded(photo(seed), kind, **more) for seed, more in ((0, {}), (0, metadata(kind)), (1, {})))
    first, second, third = (digest(read_photo(content, size)) for content in (plain, copy, other))
    assert plain != copy and first == second != third
    assert (read_photo(plain, size) != read_photo(copy, size)).any(), "one is turned"
