"""Decoding one image: formats, colour modes, orientation, and files that are not images."""

import os
import warnings

import numpy as np
import pytest
from PIL import Image
from small_images import encoded

from elastic_trainer.datasets import decoding

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def halves(mode="RGB"):
    """An image 60 wide and 40 high: red above blue."""
    image = Image.new("RGB", (60, 40), RED)
    image.paste(BLUE, (0, 20, 60, 40))
    return image.convert(mode)


def close(pixels, colour, tolerance=6):
    """Whether all pixels have nearly this colour."""
    return np.abs(pixels.astype(int) - np.array(colour)).max() <= tolerance


@pytest.mark.parametrize("kind", decoding.FORMATS)
def test_each_format_is_decoded_and_stretched_to_a_square(kind, tmp_path):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    content = encoded(halves(), kind, **options)
    pixels = decoding.decode(content, 16)
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.uint8
    assert close(pixels[:6], RED) and close(pixels[10:], BLUE)
    path = tmp_path / "without_ending"
    path.write_bytes(content)
    assert decoding.header_error(str(path)) is None
    np.testing.assert_array_equal(decoding.decode(str(path), 16), pixels)


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to see it upright
    pixels = decoding.decode(encoded(halves(), "JPEG", exif=exif, quality=95), 16)
    assert close(pixels[:, 10:], RED) and close(pixels[:, :6], BLUE)


def test_a_large_jpeg_decodes_to_nearly_the_same_pixels():
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((1600, 1200))
    expected = np.asarray(smooth.resize((32, 32), Image.Resampling.BILINEAR))
    pixels = decoding.decode(encoded(smooth, "JPEG", quality=95), 32)
    assert np.abs(pixels.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "PA"])
def test_other_colour_modes_become_rgb(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG" if mode != "PA" else None
    if kind is None:
        image = halves("P").copy()
        content = encoded(image, "GIF")
    else:
        content = encoded(halves(mode), kind)
    pixels = decoding.decode(content, 8)
    assert pixels.shape == (8, 8, 3)
    grey = mode in ("L", "1", "LA")
    assert (np.ptp(pixels, axis=-1).max() <= 1) == grey


def test_alpha_is_blended_with_white():
    image = Image.new("RGBA", (20, 20), (*RED, 0))
    image.paste((*BLUE, 128), (0, 10, 20, 20))
    pixels = decoding.decode(encoded(image, "PNG"), 20)
    assert close(pixels[:9], WHITE, 0) and close(pixels[11:], (127, 127, 255), 2)


def test_a_transparent_colour_of_a_palette_becomes_white():
    image = halves("P")
    index = image.getpixel((0, 0))
    pixels = decoding.decode(encoded(image, "PNG", transparency=index), 20)
    assert close(pixels[:8], WHITE, 0) and close(pixels[12:], BLUE, 6)


def test_16_bit_grey_is_scaled_to_8_bits():
    values = np.array([[0, 65535], [32896, 257]], np.uint16)
    pixels = decoding.decode(encoded(Image.fromarray(values), "PNG"), 2)
    assert pixels[..., 0].tolist() == [[0, 255], [128, 1]]


def test_a_jpeg_beyond_pillows_limit_is_decoded_small_without_a_warning(tmp_path, monkeypatch):
    """The limit is lowered, as a photo of 200 megapixels takes long to write."""
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(halves().resize((640, 480)), "JPEG", quality=95))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    monkeypatch.setattr(decoding, "MAX_MB", 0.5)  # at full size it would take 1.2 MB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decoding.decode(str(path), 16)
        assert decoding.header_error(str(path)) is None
    assert close(pixels[:6], RED) and close(pixels[10:], BLUE) and Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("GIF", {}), ("JPEG", {"progressive": True})])
def test_an_image_that_takes_too_much_memory_is_refused_in_a_line(kind, options, monkeypatch):
    content = encoded(halves().resize((640, 480)), kind, **options)
    monkeypatch.setattr(decoding, "MAX_MB", 0.5)
    with pytest.raises(ValueError, match=r"^640×480 pixels take 1 MB .* the limit is 0\.5 MB; make it smaller"):
        decoding.decode(content, 16)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_no_image_and_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    assert decoding.header_error(str(pipe)) == "cannot be read: it is a pipe or a device, not a file"
    with pytest.raises(OSError, match="not a file"):
        decoding.decode(str(pipe), 4)


def test_header_error_describes_empty_foreign_and_missing_files(tmp_path):
    for content, why in (
        (b"", "is empty"),
        (b"<html>not found</html>", f"is not a {decoding.KINDS} image, whatever its name says"),
        (encoded(halves(), "GIF"), None),
    ):
        (tmp_path / "photo.jpg").write_bytes(content)
        assert decoding.header_error(str(tmp_path / "photo.jpg")) == why
    assert decoding.header_error(str(tmp_path / "none.jpg")) == "cannot be read: No such file or directory"
