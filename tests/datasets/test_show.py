"""data.py show: the table of classes and the contact sheets."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from command_line import ROOT, run_data
from elastic_trainer.datasets.show import GAP, MAX_REASONS, THUMBNAIL
from PIL import Image
from small_images import write_photos

from elastic_trainer.system.errors import UserError


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos")


def test_show_counts_each_class_and_draws_each_split(photos, tmp_path, capsys):
    run_data("show", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "sheet")
    printed = capsys.readouterr().out
    rows = (r"class +train +test +broken", r"blue +4 +2 +0", r"green +3 +1 +0", r"red +1 +0 +1", r"3 classes +8 +3 +1")
    for row in rows:
        assert re.search(rf"^{row}$", printed, re.MULTILINE), row
    assert re.search(r"/train/red/1\.png: cannot be read as an image: ", printed)
    train, test = (np.asarray(Image.open(tmp_path / f"sheet_{split}.png")) for split in ("train", "test"))
    cell = THUMBNAIL + GAP
    middles = [train[60, GAP + k * cell + 50].tolist() for k in range(9)]
    assert middles == [
        *([0, 0, 255 - i] for i in range(4)),
        *([0, 255 - i, 0] for i in range(3)),
        [255, 0, 0],
        [255, 255, 255],  # broken: a red frame around the word "broken"
    ]
    assert test.shape[1] < train.shape[1]


def test_show_counts_and_names_broken_images_beyond_those_it_draws(photos, tmp_path, capsys):
    for k in range(12):
        shutil.copy(photos / "train" / "red" / "1.png", photos / "train" / "blue" / f"z{k}.png")
    run_data("show", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "sheet")
    printed = capsys.readouterr().out
    assert re.search(r"^blue +4 +2 +12$", printed, re.MULTILINE)
    assert printed.count("cannot be read as an image") == MAX_REASONS and "… and 3 more broken images" in printed
    assert "a run leaves them out" in printed


def test_show_takes_class_names_of_any_bytes(photos, tmp_path, capsys):
    for split in ("train", "test"):
        (photos / split / "blue").rename(photos / split / "$\n\\frac{$")
        (photos / split / "red").rename(photos / split / os.fsdecode(b"caf\xe9"))
    (photos / "train" / "green" / os.fsdecode(b"\xe9\n.jpg")).write_text("not an image")
    run_data("show", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "sheet")
    printed = capsys.readouterr().out
    assert re.search(r"^\$\\n\\frac\{\$ +4 +2 +0$", printed, re.MULTILINE)
    assert r"/train/green/\udce9\n.jpg: is not a JPEG" in printed


@pytest.mark.parametrize("output", [".", "/", "..", "a/.."])
def test_a_folder_as_output_is_refused(output, photos):
    with pytest.raises(UserError, match=rf"^--output: '{output}' is a folder; add a name, such as "):
        run_data("show", "--dataset_name", "image_folder", "--data_dir", photos, "--output", output)


def test_show_draws_digits_without_a_folder(tmp_path, capsys):
    run_data("show", "--dataset_name", "digits", "--output", tmp_path / "digits")
    assert re.search(r"10 classes +898 +899", capsys.readouterr().out)
    with Image.open(tmp_path / "digits_test.png") as sheet:
        assert sheet.size[0] > 800


def test_data_py_runs_show_and_refuses_a_mistyped_command_in_one_line(tmp_path):
    def command(*words):
        script = [sys.executable, str(ROOT / "data.py")]
        return subprocess.run([*script, *words], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)

    done = command("show", "--dataset_name", "digits")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures" / "digits_train.png").is_file()
    done = command("shwo")
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_flags_that_the_data_set_does_not_use_are_refused():
    with pytest.raises(UserError, match=r"--test_fraction: .*--dataset_name image_folder"):
        run_data("show", "--test_fraction", "0.2")
    with pytest.raises(UserError, match="'digits' is not one of"):
        run_data("prepare", "--dataset_name", "digits")
