"""Reading all images of a data set: order, labels, the file in place of memory, broken images."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT
from PIL import Image
from small_images import encoded

from elastic_trainer.datasets import decoding, images
from elastic_trainer.datasets.digests import digest
from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory import resident_memory_mb


def example_files(folder, count):
    """Write `count` PNGs of one colour each. Returns pairs of path and label, and the colours."""
    examples, colours = [], []
    for k in range(count):
        colour = (10 * k, 255 - 10 * k, k)
        path = folder / f"{k}.png"
        Image.new("RGB", (9, 7), colour).save(path)
        examples.append((str(path), k % 3))
        colours.append(colour)
    return examples, colours


def listed(examples):
    return ImageFiles(len(examples), partial(iter, examples), [path for path, _ in examples])


@pytest.fixture
def split(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    examples, colours = example_files(folder, 15)
    return [listed(examples[:10]), listed(examples[10:])], colours


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_are_read_in_order_with_their_labels(split, tmp_path, in_memory):
    parts, colours = split
    train, test = images.read(parts, 6, "photos", tmp_path / "cache", 1e3 if in_memory else 0)
    assert isinstance(train.images, np.memmap) != in_memory
    assert train.images.shape == (10, 6, 6, 3) and test.images.shape == (5, 6, 6, 3)
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], colours)
    assert [*train.labels, *test.labels] == [k % 3 for k in range(15)] and train.labels.dtype == np.int32
    assert not train.broken and not test.broken
    assert (tmp_path / "cache").exists() != in_memory


def test_images_from_a_file_take_no_memory_of_the_process(tmp_path):
    path, shape = tmp_path / "x.pixels", (400, 256, 256, 3)  # 79 MB
    pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    path.write_bytes(pixels.tobytes())
    in_file = np.memmap(path, np.uint8, "r", shape=shape)[50:]
    before_mb = resident_memory_mb() or 0.0
    for start in range(0, 350, 10):
        rows = np.arange(start, start + 10)
        np.testing.assert_array_equal(images.taken(in_file, rows), pixels[50:][rows])
    assert (resident_memory_mb() or 0.0) - before_mb < 30


def test_the_memory_limit_is_a_quarter_of_the_available_memory(split, tmp_path, monkeypatch):
    needed_mb = 15 * 6 * 6 * 3 / 1e6
    for available_mb, in_memory in ((4.1 * needed_mb, True), (3.9 * needed_mb, False)):
        monkeypatch.setattr(images, "available_memory_mb", lambda value=available_mb: value)
        [train, _] = images.read(split[0], 6, "photos", tmp_path / "cache")
        assert isinstance(train.images, np.memmap) != in_memory
    monkeypatch.setattr(images, "available_memory_mb", lambda: None)
    [train, _] = images.read(split[0], 6, "photos", tmp_path / "cache")
    assert not isinstance(train.images, np.memmap)


def test_the_file_is_used_again_until_an_image_changes(split, tmp_path, monkeypatch, capsys):
    parts, colours = split
    cache = tmp_path / "cache"
    images.read(parts, 6, "photos", cache, 0)
    assert "writing them to" in capsys.readouterr().out
    decoded = []
    original = decoding.decode

    def counted(*args):
        decoded.append(args)
        return original(*args)

    monkeypatch.setattr(decoding, "decode", counted)
    train, test = images.read(parts, 6, "photos", cache, 0)
    assert not decoded and "images at 6×6 from" in capsys.readouterr().out
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], colours)
    images.read(parts, 5, "photos", cache, 0)
    assert len(decoded) == 15, "images of another size are decoded again"
    Image.new("RGB", (30, 30), (1, 2, 3)).save(parts[0].files[4])
    train, _ = images.read(parts, 6, "photos", cache, 0)
    assert len(decoded) == 30 and train.images[4, 0, 0].tolist() == [1, 2, 3]
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("memory_mb", [1e3, 0])
def test_broken_images_are_left_out_and_named(split, tmp_path, memory_mb):
    parts, colours = split
    noise = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    Path(parts[0].files[3]).write_bytes(encoded(Image.fromarray(noise), "PNG")[:2000])
    Path(parts[1].files[0]).write_bytes(b"")
    for _ in range(2):  # the second time from the file, if the images do not fit in memory
        train, test = images.read(parts, 6, "photos", tmp_path / "cache", memory_mb)
        [in_train], [in_test] = train.broken, test.broken
        assert in_train.startswith(f"{parts[0].files[3]}: cannot be read as an image: ")
        assert in_test == f"{parts[1].files[0]}: is empty"
        left = [colour for k, colour in enumerate(colours) if k not in (3, 10)]
        np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], left)
        assert [*train.labels, *test.labels] == [k % 3 for k in range(15) if k not in (3, 10)]


def test_a_full_disk_leaves_no_files(split, tmp_path, monkeypatch):
    def full(*_):
        yield np.zeros((6, 6, 3), np.uint8), images.Example(0)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images, "decoded", full)
    with pytest.raises(UserError, match=r"cache/photos_6_.*\.pixels: cannot be written: No space left on device"):
        images.read(split[0], 6, "photos", tmp_path / "cache", 0)
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_file_without_its_record_is_written_again(split, tmp_path):
    images.read(split[0], 6, "photos", tmp_path / "cache", 0)
    [record] = (tmp_path / "cache").glob("*.json")
    assert json.loads(record.read_text())["examples"][0][:2] == [0, None]
    record.unlink()  # it is written last
    train, _ = images.read(split[0], 6, "photos", tmp_path / "cache", 0)
    assert len(train.labels) == 10 and record.is_file()


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        (".json", lambda content: content[:70]),
        (".json", lambda content: b""),
        (".json", lambda content: b"5"),
        (".json", lambda content: content.replace(b'"version": 2', b'"version": 0')),
        (".json", lambda content: content.replace(b"null", b'"is empty"', 1)),
        (".pixels", lambda content: content[:70]),
        (".pixels", lambda content: b""),
        (".pixels", lambda content: content[:-1]),
        (".pixels", lambda content: content + b"0"),
    ],
)
def test_a_damaged_file_is_refused_in_a_line_and_written_again_once_it_is_deleted(split, tmp_path, ending, damage):
    parts, colours = split
    images.read(parts, 6, "photos", tmp_path / "cache", 0)
    [path] = (tmp_path / "cache").glob(f"*{ending}")
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert path.read_bytes() != intact
    with pytest.raises(UserError, match=r"(json|pixels): is damaged or of another version; delete it") as caught:
        images.read(parts, 6, "photos", tmp_path / "cache", 0)
    Path(str(caught.value).partition(":")[0]).unlink()
    train, test = images.read(parts, 6, "photos", tmp_path / "cache", 0)
    np.testing.assert_array_equal(np.concatenate([train.images, test.images])[:, 0, 0], colours)
    assert path.read_bytes() == intact


@pytest.mark.parametrize("memory_mb", [1e3, 0])
def test_only_the_file_of_a_killed_process_is_removed_by_a_later_run(split, tmp_path, memory_mb):
    program = """
import sys, time
from pathlib import Path
import numpy as np
from elastic_trainer.datasets import decoding, images

def decode_slowly(parts, size):
    yield np.zeros((size, size, 3), np.uint8), images.Example(0)
    print("writing", flush=True)
    time.sleep(60)

images.decoded = decode_slowly
path = sys.argv[1]
images.read([images.ImageFiles(1, lambda: iter([(path, 0)]), [path])], 64, "other", Path(sys.argv[2]), 0)
"""
    cache, words = tmp_path / "cache", [split[0][0].files[0], tmp_path / "cache"]
    killed, alive = (
        subprocess.Popen([sys.executable, "-c", program, *words], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)
    )
    try:
        for process in (killed, alive):
            assert process.stdout is not None and b"writing\n" in process.stdout
        killed.kill()
        killed.wait()
        assert len([*cache.glob(".*")]) == 2
        images.read(split[0], 6, "photos", cache, memory_mb)
        [left] = cache.glob(".*")
        assert left.name.startswith(f".{alive.pid}.")
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait()
    images.read(split[0], 6, "photos", cache, memory_mb)
    assert not [*cache.glob(".*")]


def test_digests_are_those_of_the_content_in_memory_and_from_the_file(split, tmp_path):
    parts, _ = split
    shutil.copy(parts[0].files[2], parts[1].files[1])
    expected = [digest(Path(path).read_bytes()) for part in parts for path in part.files]
    for memory_mb in (1e3, 0, 0):  # the last time from the file
        train, test = images.read(parts, 6, "photos", tmp_path / "cache", memory_mb)
        assert [*train.digests, *test.digests] == expected and train.digests.dtype == np.uint64
        assert test.digests[1] == train.digests[2] and len(np.unique(train.digests)) == 10
