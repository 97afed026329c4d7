"""The record of the images that a model was trained on, and leaving them out of the test."""

import shutil

import numpy as np
import pytest
from small_images import load_photos, write_noise

from elastic_trainer.datasets.digests import digest
from elastic_trainer.datasets.image_data import leave_out_trained, trained_images, write_trained_images
from elastic_trainer.settings import TRAINED_IMAGES
from elastic_trainer.system.errors import UserError


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


def digests_of(photos, pattern):
    return np.array([digest(path.read_bytes()) for path in sorted(photos.glob(pattern))], np.uint64)


def run_trained_on(folder, digests, weights="imagenet"):
    folder.mkdir()
    write_trained_images(folder, digests, trained_images(folder.parent / weights))
    return folder


def test_a_run_counts_the_images_of_the_run_that_it_starts_from(tmp_path):
    first = run_trained_on(tmp_path / "first", np.array([5, 3, 5], np.uint64))
    second = run_trained_on(tmp_path / "second", np.array([2**64 - 1, 3], np.uint64), "first/best.keras")
    assert trained_images(first).tolist() == [3, 5]
    assert trained_images(second / "last.keras").tolist() == [3, 5, 2**64 - 1]
    assert trained_images(tmp_path / "imagenet").size == 0
    write_trained_images(second, np.array([1], np.uint64), np.array([2], np.uint64))
    assert trained_images(second).tolist() == [3, 5, 2**64 - 1], "a run that continues keeps its record"
    assert [path.name for path in second.iterdir()] == [TRAINED_IMAGES]


def test_images_that_a_model_was_trained_on_are_counted_and_left_out(photos, tmp_path, capsys):
    run = run_trained_on(tmp_path / "run", digests_of(photos, "t*/ant/*"))
    images = load_photos(photos, 12, 4)
    leave_out_trained(images, tmp_path / "none", "--weights")
    assert images.test_count == 9 and "trained on" not in capsys.readouterr().out
    leave_out_trained(images, run, "--weights")
    assert images.test_count == 6
    assert "--weights" in (line := capsys.readouterr().out) and "trained on 3 of 9 test images" in line


def test_they_are_left_out_of_the_validation_and_of_the_test_after_training(photos, tmp_path, capsys):
    (photos / "test" / "bee").rename(tmp_path / "bee")
    shutil.copytree(photos / "test", photos / "val")
    (tmp_path / "bee").rename(photos / "test" / "bee")
    run = run_trained_on(tmp_path / "run", digests_of(photos, "test/ant/*"))
    images = load_photos(photos, 12, 4)
    leave_out_trained(images, run, "--weights")
    assert (images.test_count, images.held_out.test_count) == (3, 6)
    printed = capsys.readouterr().out
    assert "trained on 3 of 6 validation images" in printed and "trained on 3 of 9 test images" in printed


def test_a_model_that_was_trained_on_all_test_images_is_refused(photos, tmp_path):
    run = run_trained_on(tmp_path / "run", digests_of(photos, "test/*/*"))
    with pytest.raises(UserError, match=r"--evaluate .*/run: was trained on all 9 test images; give"):
        leave_out_trained(load_photos(photos, 12, 4), run, "--evaluate")


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / TRAINED_IMAGES).write_bytes(b"123456789")
    with pytest.raises(UserError, match=rf"/{TRAINED_IMAGES}: "):
        trained_images(tmp_path)
