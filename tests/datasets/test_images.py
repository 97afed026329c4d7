"""Reading images: what is decoded to which pixels, kept where, and what is said of broken ones."""

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from elastic_trainer.datasets import images
from elastic_trainer.datasets.images import Encoded
from elastic_trainer.runs import energy
from utils import UserError

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves(mode="RGB"):
    """Red above blue, 60 wide and 40 high."""
    image = Image.new("RGB", (60, 40), RED)
    image.paste(BLUE, (0, 20, 60, 40))
    return image.convert(mode)


def close(pixels, colour, tolerance=6):
    return np.abs(pixels.astype(int) - np.array(colour)).max() <= tolerance


@pytest.mark.parametrize("kind", images.FORMATS)
def test_each_format_is_decoded_and_stretched_to_a_square(kind, tmp_path):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    content = encoded(halves(), kind, **options)
    pixels = images.decode(content, 16)
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.uint8
    assert close(pixels[:6], RED) and close(pixels[10:], BLUE)
    path = tmp_path / "without_ending"
    path.write_bytes(content)
    assert images.wrong_start(str(path)) is None
    np.testing.assert_array_equal(images.decode(str(path), 16), pixels)


def test_orientation_in_exif_is_honoured():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to see it upright
    pixels = images.decode(encoded(halves(), "JPEG", exif=exif, quality=95), 16)
    assert close(pixels[:, 10:], RED) and close(pixels[:, :6], BLUE)


def test_a_large_jpeg_is_decoded_small_but_alike():
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((1600, 1200))
    whole = np.asarray(smooth.resize((32, 32), Image.Resampling.BILINEAR))
    pixels = images.decode(encoded(smooth, "JPEG", quality=95), 32)
    assert np.abs(pixels.astype(int) - whole).mean() < 2


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "PA"])
def test_other_colour_modes_become_rgb(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG" if mode != "PA" else None
    if kind is None:
        image = halves("P").copy()
        content = encoded(image, "GIF")
    else:
        content = encoded(halves(mode), kind)
    pixels = images.decode(content, 8)
    assert pixels.shape == (8, 8, 3)
    grey = mode in ("L", "1", "LA")
    assert (np.ptp(pixels, axis=-1).max() <= 1) == grey


def test_transparent_becomes_white_and_half_transparent_half_white():
    image = Image.new("RGBA", (20, 20), (*RED, 0))
    image.paste((*BLUE, 128), (0, 10, 20, 20))
    pixels = images.decode(encoded(image, "PNG"), 20)
    assert close(pixels[:9], WHITE, 0) and close(pixels[11:], (127, 127, 255), 2)


def test_a_transparent_colour_of_a_palette_becomes_white():
    image = halves("P")
    index = image.getpixel((0, 0))
    pixels = images.decode(encoded(image, "PNG", transparency=index), 20)
    assert close(pixels[:8], WHITE, 0) and close(pixels[12:], BLUE, 6)


def test_sixteen_bits_of_grey_are_scaled():
    values = np.array([[0, 65535], [32896, 257]], np.uint16)
    pixels = images.decode(encoded(Image.fromarray(values), "PNG"), 2)
    assert pixels[..., 0].tolist() == [[0, 255], [128, 1]]


def example_files(folder, count):
    """`count` PNGs of one colour each: (examples, colours)."""
    examples, colours = [], []
    for k in range(count):
        colour = (10 * k, 255 - 10 * k, k)
        path = folder / f"{k}.png"
        Image.new("RGB", (9, 7), colour).save(path)
        examples.append((str(path), k % 3))
        colours.append(colour)
    return examples, colours


def listed(examples):
    return Encoded(len(examples), partial(iter, examples), [path for path, _ in examples])


@pytest.fixture
def split(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    examples, colours = example_files(folder, 15)
    return [listed(examples[:10]), listed(examples[10:])], colours


@pytest.mark.parametrize("in_memory", [True, False])
def test_all_are_read_in_order_with_their_labels(split, tmp_path, in_memory):
    parts, colours = split
    train, test = images.read(parts, 6, "photos", tmp_path / "cache", 1e3 if in_memory else 0)
    assert isinstance(train.images, np.memmap) != in_memory
    assert train.images.shape == (10, 6, 6, 3) and test.images.shape == (5, 6, 6, 3)
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], colours)
    assert [*train.labels, *test.labels] == [k % 3 for k in range(15)] and train.labels.dtype == np.int32
    assert not train.broken and not test.broken
    assert (tmp_path / "cache").exists() != in_memory


def test_the_memory_limit_is_a_quarter_of_what_is_available(split, tmp_path, monkeypatch):
    needed_mb = 15 * 6 * 6 * 3 / 1e6
    for available_mb, in_memory in ((4.1 * needed_mb, True), (3.9 * needed_mb, False)):
        monkeypatch.setattr(energy, "available_memory_mb", lambda value=available_mb: value)
        [train, _] = images.read(split[0], 6, "photos", tmp_path / "cache")
        assert isinstance(train.images, np.memmap) != in_memory
    monkeypatch.setattr(energy, "available_memory_mb", lambda: None)
    [train, _] = images.read(split[0], 6, "photos", tmp_path / "cache")
    assert not isinstance(train.images, np.memmap)


def test_a_file_is_found_again_until_an_image_changes(split, tmp_path, monkeypatch, capsys):
    parts, colours = split
    cache = tmp_path / "cache"
    images.read(parts, 6, "photos", cache, 0)
    assert "they go into" in capsys.readouterr().out
    decoded = []
    original = images.decode

    def counted(*args):
        decoded.append(args)
        return original(*args)

    monkeypatch.setattr(images, "decode", counted)
    train, test = images.read(parts, 6, "photos", cache, 0)
    assert not decoded and "images at 6×6 from" in capsys.readouterr().out
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], colours)
    images.read(parts, 5, "photos", cache, 0)
    assert len(decoded) == 15, "another size"
    Image.new("RGB", (30, 30), (1, 2, 3)).save(parts[0].files[4])
    train, _ = images.read(parts, 6, "photos", cache, 0)
    assert len(decoded) == 30 and train.images[4, 0, 0].tolist() == [1, 2, 3]
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("memory_mb", [1e3, 0])
def test_broken_ones_are_left_out_and_named(split, tmp_path, memory_mb):
    parts, colours = split
    noise = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    Path(parts[0].files[3]).write_bytes(encoded(Image.fromarray(noise), "PNG")[:2000])
    Path(parts[1].files[0]).write_bytes(b"")
    for _ in range(2):  # the second time from the file, where there is one
        train, test = images.read(parts, 6, "photos", tmp_path / "cache", memory_mb)
        assert list(train.broken) == [3] and list(test.broken) == [0]
        assert train.broken[3].startswith(f"{parts[0].files[3]}: cannot be read as an image: ")
        assert test.broken[0] == f"{parts[1].files[0]}: is empty"
        left = [colour for k, colour in enumerate(colours) if k not in (3, 10)]
        np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], left)
        assert [*train.labels, *test.labels] == [k % 3 for k in range(15) if k not in (3, 10)]


def test_a_full_disk_leaves_nothing_behind(split, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images, "_header", full)
    with pytest.raises(UserError, match=r"cache/photos_6_.*\.npy: cannot be written: No space left on device"):
        images.read(split[0], 6, "photos", tmp_path / "cache", 0)
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_read_that_was_cut_off_is_done_again(split, tmp_path):
    images.read(split[0], 6, "photos", tmp_path / "cache", 0)
    [record] = (tmp_path / "cache").glob("*.json")
    assert json.loads(record.read_text())[0] == [0, None]
    record.unlink()  # it is written last
    train, _ = images.read(split[0], 6, "photos", tmp_path / "cache", 0)
    assert len(train.labels) == 10 and record.is_file()


@pytest.mark.parametrize("ending", [".json", ".npy"])
def test_a_damaged_file_is_written_again(split, tmp_path, ending):
    parts, colours = split
    images.read(parts, 6, "photos", tmp_path / "cache", 0)
    [path] = (tmp_path / "cache").glob(f"*{ending}")
    path.write_bytes(path.read_bytes()[:70])
    train, test = images.read(parts, 6, "photos", tmp_path / "cache", 0)
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], colours)


def test_what_is_no_image_is_told_by_its_content(tmp_path):
    for content, why in (
        (b"", "is empty"),
        (b"<html>not found</html>", f"is no {images.KINDS}, whatever its name says"),
        (encoded(halves(), "GIF"), None),
    ):
        (tmp_path / "photo.jpg").write_bytes(content)
        assert images.wrong_start(str(tmp_path / "photo.jpg")) == why
    assert images.wrong_start(str(tmp_path / "none.jpg")) == "cannot be read: No such file or directory"
