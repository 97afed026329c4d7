"""The commands of data.py: show, prepare, pack, unpack."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_data import CLASSES, prepare_small

import data
from elastic_trainer.cli.commands import parse_data
from elastic_trainer.datasets import commands
from elastic_trainer.datasets.show import GAP, THUMBNAIL
from utils import UserError

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    dataset_tools_arguments = parse_data([*map(str, arguments)])
    getattr(commands, dataset_tools_arguments.command)(dataset_tools_arguments)


@pytest.fixture
def photos(tmp_path):
    """Three classes, train 4, 3, 2 and test 2, 1, 0; one photo is broken."""
    folder = tmp_path / "photos"
    for split, counts in (("train", (4, 3, 2)), ("test", (2, 1, 0))):
        for k, (name, count) in enumerate(zip(("blue", "green", "red"), counts, strict=True)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                colour = [0, 0, 0]
                colour[2 - k] = 255 - i
                Image.new("RGB", (20, 10), tuple(colour)).save(folder / split / name / f"{i}.png")
    broken = folder / "train" / "red" / "1.png"
    noise = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(broken)
    broken.write_bytes(broken.read_bytes()[:2000])
    return folder


def test_show_counts_each_class_and_draws_each_split(photos, tmp_path, capsys):
    run("show", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "sheet")
    said = capsys.readouterr().out
    for row in (r"class +train +test", r"blue +4 +2", r"green +3 +1", r"red +2 +0", r"3 classes +9 +3"):
        assert re.search(rf"^{row}$", said, re.MULTILINE), row
    assert re.search(r"/train/red/1\.png: cannot be read as an image: ", said)
    train, test = (np.asarray(Image.open(tmp_path / f"sheet_{split}.png")) for split in ("train", "test"))
    cell = THUMBNAIL + GAP
    middles = [train[60, GAP + k * cell + 50].tolist() for k in range(9)]
    assert middles == [
        *([0, 0, 255 - i] for i in range(4)),
        *([0, 255 - i, 0] for i in range(3)),
        [255, 0, 0],
        [255, 255, 255],  # the broken one: a frame with a word
    ]
    assert test.shape[1] < train.shape[1]


def test_show_takes_what_needs_no_folder(tmp_path, capsys):
    run("show", "--output", tmp_path / "digits")
    assert re.search(r"10 classes +898 +899", capsys.readouterr().out)
    with Image.open(tmp_path / "digits_test.png") as sheet:
        assert sheet.size[0] > 800


@pytest.mark.parametrize("name", ["caltech_birds2011", "stanford_dogs"])
def test_prepared_data_is_carried_to_another_machine(name, tmp_path, monkeypatch, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    prepare_small(name, here, monkeypatch)
    run("prepare", "--dataset_name", name, "--data_dir", here)
    assert re.search(rf"{name} is ready in .*: 8 train, 5 test", capsys.readouterr().out)
    run("pack", "--dataset_name", name, "--data_dir", here, "--output", tmp_path / "it.tar")
    run("unpack", tmp_path / "it.tar", "--data_dir", there)
    assert f"--dataset_name {name} --data_dir {there}" in capsys.readouterr().out
    first, second = (data.load(name, 16, 4, data_dir=place) for place in (here, there))
    assert second.class_names == first.class_names and len(first.class_names) == CLASSES[name]
    for (one, labels), (other, same) in zip(first.train(0), second.train(0), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(labels, same)
    with pytest.raises(UserError, match=rf"--data_dir .*there: .*/{name} is there already"):
        run("unpack", tmp_path / "it.tar", "--data_dir", there)


def test_own_photos_are_carried_too(photos, tmp_path, capsys):
    run("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    assert "unpack p.tar --data_dir DIR" in capsys.readouterr().out
    run("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert f"--dataset_name image_folder --data_dir {tmp_path}/there/photos" in capsys.readouterr().out
    files = {path.relative_to(photos): path.read_bytes() for path in photos.rglob("*") if path.is_file()}
    copied = tmp_path / "there" / "photos"
    assert files == {path.relative_to(copied): path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def damaged(path, how):
    whole = path.read_bytes()
    if how == "cut off":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "changed":
        at = whole.index(b"IDAT") + 8
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif how == "no archive":
        path.write_bytes(b"anything")
    elif how == "foreign":
        with tarfile.open(path, "w") as archive:
            archive.add(ROOT / "README.md", "../README.md")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut off", r"is no tar archive, or damaged, or cut off \(.+\); copy it anew"),
        ("changed", r"/0\.png in it is not what was packed; copy it anew"),
        ("no archive", r"is no tar archive, or damaged, or cut off \(.+\); copy it anew"),
        ("foreign", "holds '../README.md', which no data set has"),
    ],
)
def test_a_damaged_archive_leaves_nothing(how, message, photos, tmp_path):
    run("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    damaged(tmp_path / "p.tar", how)
    with pytest.raises(UserError, match=message):
        run("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert not [*(tmp_path / "there").iterdir()]


def test_what_cannot_be_packed_or_asked_for_is_refused(photos, tmp_path):
    with pytest.raises(
        UserError, match=r"not prepared in .*; first python data.py prepare --dataset_name stanford_dogs"
    ):
        run("pack", "--dataset_name", "stanford_dogs", "--data_dir", tmp_path)
    with pytest.raises(UserError, match=r"--output .*/p.tar: lies in .*, which is to be packed"):
        run("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", photos / "p.tar")
    with pytest.raises(UserError, match="'digits' is not one of"):
        run("pack", "--dataset_name", "digits")
    with pytest.raises(UserError, match=r"there is no file '.*none.tar'"):
        run("unpack", tmp_path / "none.tar", "--data_dir", tmp_path)
    with pytest.raises(UserError, match=r"--test_fraction: goes with --dataset_name image_folder only"):
        run("show", "--test_fraction", "0.2")


def test_the_command_line_ends_in_one_line(tmp_path):
    def command(*words):
        return subprocess.run(
            [sys.executable, str(ROOT / "data.py"), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=tmp_path,
        )

    done = command("show")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures" / "digits_train.png").is_file()
    done = command("shwo")
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
