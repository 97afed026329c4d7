"""Which photos test a model that is there: all that it was not trained on, whatever the layout."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from small_images import write_noise

from elastic_trainer.datasets.digests import digest
from elastic_trainer.datasets.named import find_to_test
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError

NAMES = ["ant", "bee", "cat"]
ELSEWHERE = np.array([7], np.uint64)  # of images that are not here


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


def found(folder, trained=ELSEWHERE, names=NAMES, **settings):
    """The names of the files that test, and the labels."""
    source = find_to_test(Settings(dataset_name="image_folder", data_dir=folder, **settings), names, trained)
    assert source.train.count == 0 and [*source.class_names] == (names or source.class_names)
    labels = [label for _, label in source.test.examples()]
    return [str(Path(path).relative_to(folder)) for path in source.test.files], labels


@pytest.mark.parametrize("place", [".", "train", "test", "val", "valid", "validation"])
def test_all_photos_in_class_folders_are_tested_also_without_one_of_a_class(photos, place, tmp_path, capsys):
    new = tmp_path / "new"
    shutil.copytree(photos / "train", new / place)
    shutil.rmtree(new / place / "bee")
    paths, labels = found(new)
    assert len(paths) == 8 and labels == [0] * 4 + [2] * 4
    printed = capsys.readouterr().out
    assert printed.startswith(f"tested in {new / place}: 8 ") and "has no test images of class: 'bee'" in printed


def test_a_test_folder_is_tested_alone_else_a_validation_folder(photos, capsys):
    shutil.copytree(photos / "train", photos / "valid")
    assert {path.partition("/")[0] for path in found(photos)[0]} == {"test"}
    assert f"tested in {photos}/test: 9 images\n" in capsys.readouterr().out
    shutil.rmtree(photos / "test")
    assert {path.partition("/")[0] for path in found(photos, test_fraction=0.3)[0]} == {"valid"}


def test_photos_that_the_model_was_trained_on_are_left_out(photos, capsys):
    new = photos / "train"
    trained = np.array([digest(path.read_bytes()) for path in new.glob("bee/[01].png")], np.uint64)
    paths, _ = found(new, trained)
    assert len(paths) == 10 and not {"bee/0.png", "bee/1.png"} & {*paths}
    assert f"tested in {new}: 10 of 12 images, those that the model was not trained on" in capsys.readouterr().out
    with pytest.raises(UserError, match=rf"--data_dir {new}: the model was trained on all 12 images; give images that"):
        found(new, np.array([digest(path.read_bytes()) for path in new.glob("*/*")], np.uint64))


def test_a_folder_that_is_no_class_of_the_model_is_named(photos):
    (photos / "train" / "bee").rename(photos / "train" / "wasp")
    with pytest.raises(
        UserError, match=r"/train: class 'wasp' is not among those of the model \(ant, bee, cat\); rename"
    ):
        found(photos / "train")


def test_without_a_record_of_the_training_images_a_run_s_test_images_are_tested(photos, capsys):
    nothing = np.zeros(0, np.uint64)
    paths, _ = found(photos / "train", nothing, None, test_fraction=0.5)
    assert 3 <= len(paths) < 12
    assert f"no record of what the model was trained on: {len(paths)} images are tested" in capsys.readouterr().out
    assert len(found(photos, nothing, None)[0]) == 9, "a folder for testing needs no record"


def test_a_broken_image_is_left_to_be_left_out(photos):
    (photos / "train" / "ant" / "0.png").write_bytes(b"")
    assert len(found(photos / "train")[0]) == 12  # `images.read` leaves it out
