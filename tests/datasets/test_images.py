"""Reading all images of a data set: order, labels, the file in place of memory, broken images."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_images import encoded

from elastic_trainer.datasets import images
from elastic_trainer.datasets.decoding import digest
from elastic_trainer.datasets.images import ImageFiles, Images
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory import resident_memory_mb

COLOURS = [(10 * k, 255 - 10 * k, k) for k in range(15)]


@pytest.fixture
def split(tmp_path):
    """PNGs of one colour each, in two parts."""
    examples = []
    for k, colour in enumerate(COLOURS):
        Image.new("RGB", (9, 7), colour).save(tmp_path / f"{k}.png")
        examples.append((str(tmp_path / f"{k}.png"), k % 3))
    return [ImageFiles(10, partial(iter, examples[:10])), ImageFiles(5, partial(iter, examples[10:]))]


def pixels_of(part):
    return part[np.arange(len(part))]


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_are_read_in_order_with_their_labels_and_broken_ones_are_left_out(split, tmp_path, in_memory, capsys):
    noise = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    (tmp_path / "3.png").write_bytes(encoded(Image.fromarray(noise), "PNG")[:2000])
    (tmp_path / "10.png").write_bytes(b"")
    parts, broken = images.read(split, 6, tmp_path / "cache", 1e3 if in_memory else 0)
    left = [k for k in range(15) if k not in (3, 10)]
    assert [len(part.labels) for part in parts] == [9, 4]
    np.testing.assert_array_equal(np.concatenate([pixels_of(part) for part in parts])[:, 0, 0], np.array(COLOURS)[left])
    assert [label for part in parts for label in part.labels] == [k % 3 for k in left]
    assert [Path(name).stem for part in parts for name in part.names] == [str(k) for k in left]
    for part in parts:
        assert [*part.digests] == [digest(image) for image in pixels_of(part)]
        assert isinstance(part.pixels, np.memmap) != in_memory
    assert [one.partition(": ")[0] for one in broken] == [str(tmp_path / "3.png"), str(tmp_path / "10.png")]
    assert broken[0].startswith(f"{tmp_path}/3.png: cannot be read: ")
    if in_memory:
        assert not (tmp_path / "cache").exists()
    else:
        assert not [*(tmp_path / "cache").iterdir()], "a killed run leaves no file"
        assert f"they are in a temporary file in {tmp_path}/cache" in capsys.readouterr().out


def test_images_from_a_file_take_no_memory_of_the_process(tmp_path):
    path, shape = tmp_path / "x.pixels", (400, 256, 256, 3)  # 79 MB
    pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    path.write_bytes(pixels.tobytes())
    in_file = Images(np.memmap(path, np.uint8, "r", shape=shape), np.zeros(400)).part(np.arange(50, 400))
    before_mb = resident_memory_mb() or 0.0
    for start in range(0, 350, 10):
        rows = np.arange(start, start + 10)
        np.testing.assert_array_equal(in_file[rows], pixels[50:][rows])
    assert (resident_memory_mb() or 0.0) - before_mb < 30


def test_the_memory_limit_is_a_quarter_of_the_available_memory(split, tmp_path, monkeypatch):
    needed_mb = 15 * 6 * 6 * 3 / 1e6
    for available_mb, in_memory in ((4.1 * needed_mb, True), (3.9 * needed_mb, False), (None, True)):
        monkeypatch.setattr(images, "free_memory_mb", lambda value=available_mb: value)
        [train, _], _ = images.read(split, 6, tmp_path / "cache")
        assert isinstance(train.pixels, np.memmap) != in_memory


def test_a_folder_that_cannot_be_written_is_named(split, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"cache: cannot be written: "):
        images.read(split, 6, tmp_path / "cache", 0)
