"""Which photos test a model that is there: all that it was not trained on, whatever the layout."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from small_images import digests_of, load_photos, write_noise

from elastic_trainer.datasets.image_data import leave_out_trained, trained_images, write_trained_images
from elastic_trainer.datasets.named import find_to_test
from elastic_trainer.settings import TRAINED_IMAGES, Settings
from elastic_trainer.system.errors import UserError

NAMES = ["ant", "bee", "cat"]


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


def found(folder, names=NAMES, has_record=True, **settings):
    """The names of the files that test, and the labels."""
    about = Settings(dataset_name="image_folder", data_dir=folder, **settings)
    source = find_to_test(about, names, has_record)
    images = load_photos(folder, 12, 4, source=source)
    assert (not images.train_count or not has_record) and [*images.class_names] == (names or [*images.class_names])
    return [
        str(Path(path).relative_to(folder)) for path in images.test_images.names
    ], images.test_images.labels.tolist()


@pytest.mark.parametrize("place", [".", "train", "test", "Valid"])
def test_all_photos_in_class_folders_are_tested_also_without_one_of_a_class(photos, place, tmp_path, capsys):
    new = tmp_path / "new"
    shutil.copytree(photos / "train", new / place)
    shutil.rmtree(new / place / "bee")
    paths, labels = found(new)
    assert len(paths) == 8 and labels == [0] * 4 + [2] * 4
    printed = capsys.readouterr().out
    assert (
        printed.startswith(f"tested in {new / place}: 8 images\n") and "has no test images of class: 'bee'" in printed
    )


def test_a_test_folder_is_tested_alone_else_a_validation_folder(photos):
    shutil.copytree(photos / "train", photos / "valid")
    assert {path.partition("/")[0] for path in found(photos)[0]} == {"test"}
    shutil.rmtree(photos / "test")
    assert {path.partition("/")[0] for path in found(photos, test_fraction=0.3)[0]} == {"valid"}


def test_a_folder_that_is_no_class_of_the_model_is_named(photos):
    (photos / "train" / "bee").rename(photos / "train" / "wasp")
    with pytest.raises(UserError, match=r"/train: class 'wasp' is not among ant, bee, cat; rename"):
        found(photos / "train")


def test_without_a_record_of_the_training_images_a_run_s_test_images_are_tested(photos, capsys):
    paths, _ = found(photos / "train", None, has_record=False, test_fraction=0.5)
    assert 3 <= len(paths) < 12
    assert "no record of what the model was trained on: those images are tested that a run" in capsys.readouterr().out
    assert len(found(photos, None, has_record=False)[0]) == 9, "a folder for testing needs no record"


# --- the images that a model was trained on ---------------------------------------------------------------------------


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
    images = load_photos(photos, 12, 4)
    leave_out_trained(images, tmp_path / "none", "--weights")
    assert images.test_count == 9 and "trained on" not in capsys.readouterr().out
    leave_out_trained(images, run_trained_on(tmp_path / "run", digests_of(photos, "t*/ant/*")), "--weights")
    assert images.test_count == 6
    assert "--weights" in (line := capsys.readouterr().out) and "trained on 3 of 9 test images" in line
    run = run_trained_on(tmp_path / "all", digests_of(photos, "test/*/*"))
    with pytest.raises(UserError, match=r"--evaluate .*/all: was trained on all 9 test images; give"):
        leave_out_trained(load_photos(photos, 12, 4), run, "--evaluate")


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / TRAINED_IMAGES).write_bytes(b"123456789")
    with pytest.raises(UserError, match=rf"/{TRAINED_IMAGES}: "):
        trained_images(tmp_path)
