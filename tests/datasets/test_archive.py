"""data.py prepare, pack and unpack: a data set arrives on another machine unchanged, or not at all."""

import re
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from command_line import ROOT, run_data
from small_images import write_photos
from small_tfds import TFDS_CLASSES, prepare_small

import data
from utils import UserError


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos")


@pytest.mark.parametrize("name", ["caltech_birds2011", "stanford_dogs"])
def test_prepare_pack_unpack_gives_the_same_batches_elsewhere(name, tmp_path, monkeypatch, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    prepare_small(name, here, monkeypatch)
    run_data("prepare", "--dataset_name", name, "--data_dir", here)
    assert re.search(rf"{name} is ready in .*: 8 train, 5 test", capsys.readouterr().out)
    run_data("pack", "--dataset_name", name, "--data_dir", here, "--output", tmp_path / "it.tar")
    run_data("unpack", tmp_path / "it.tar", "--data_dir", there)
    assert f"--dataset_name {name} --data_dir {there}" in capsys.readouterr().out
    first, second = (data.load(name, 16, 4, data_dir=place) for place in (here, there))
    assert second.class_names == first.class_names and len(first.class_names) == TFDS_CLASSES[name]
    for (one, labels), (other, same) in zip(first.train(0), second.train(0), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(labels, same)
    with pytest.raises(UserError, match=rf"--data_dir .*there: .*/{name} exists already"):
        run_data("unpack", tmp_path / "it.tar", "--data_dir", there)


def test_pack_unpack_copies_photos_byte_for_byte(photos, tmp_path, capsys):
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    assert "unpack p.tar --data_dir DIR" in capsys.readouterr().out
    run_data("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert f"--dataset_name image_folder --data_dir {tmp_path}/there/photos" in capsys.readouterr().out
    files = {path.relative_to(photos): path.read_bytes() for path in photos.rglob("*") if path.is_file()}
    copied = tmp_path / "there" / "photos"
    assert files == {path.relative_to(copied): path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def damage(path, how):
    """Damage the archive `path` in place."""
    content = path.read_bytes()
    if how == "incomplete":
        path.write_bytes(content[: len(content) // 2])
    elif how == "changed":
        at = content.index(b"IDAT") + 8
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif how == "no archive":
        path.write_bytes(b"anything")
    elif how == "foreign":
        with tarfile.open(path, "w") as archive:
            archive.add(ROOT / "README.md", "../README.md")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("incomplete", r"is not a tar archive, or damaged or incomplete \(.+\); copy it again"),
        ("changed", r"/0\.png in it does not match its checksum; copy it again"),
        ("no archive", r"is not a tar archive, or damaged or incomplete \(.+\); copy it again"),
        ("foreign", "contains '../README.md', which no data set has"),
    ],
)
def test_unpacking_a_damaged_archive_leaves_no_files(how, message, photos, tmp_path):
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    damage(tmp_path / "p.tar", how)
    with pytest.raises(UserError, match=message):
        run_data("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert not [*(tmp_path / "there").iterdir()]


def test_missing_data_and_wrong_arguments_are_refused(photos, tmp_path):
    with pytest.raises(
        UserError, match=r"not prepared in .*; first run python data.py prepare --dataset_name stanford_dogs"
    ):
        run_data("pack", "--dataset_name", "stanford_dogs", "--data_dir", tmp_path)
    with pytest.raises(UserError, match=r"--output .*/p.tar: lies inside .*, the folder to pack"):
        run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", photos / "p.tar")
    with pytest.raises(UserError, match="'digits' is not one of"):
        run_data("pack", "--dataset_name", "digits")
    with pytest.raises(UserError, match=r"there is no file '.*none.tar'"):
        run_data("unpack", tmp_path / "none.tar", "--data_dir", tmp_path)
    with pytest.raises(UserError, match=r"--test_fraction: goes with --dataset_name image_folder only"):
        run_data("show", "--test_fraction", "0.2")


def test_data_py_runs_show_and_refuses_a_mistyped_command_in_one_line(tmp_path):
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
