"""data.py show: the table of classes and the contact sheets."""

import re

import numpy as np
import pytest
from command_line import run_data
from PIL import Image
from small_images import write_photos

from elastic_trainer.datasets.show import GAP, THUMBNAIL


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos")


def test_show_counts_each_class_and_draws_each_split(photos, tmp_path, capsys):
    run_data("show", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "sheet")
    printed = capsys.readouterr().out
    for row in (r"class +train +test", r"blue +4 +2", r"green +3 +1", r"red +2 +0", r"3 classes +9 +3"):
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


def test_show_draws_digits_without_a_folder(tmp_path, capsys):
    run_data("show", "--output", tmp_path / "digits")
    assert re.search(r"10 classes +898 +899", capsys.readouterr().out)
    with Image.open(tmp_path / "digits_test.png") as sheet:
        assert sheet.size[0] > 800
