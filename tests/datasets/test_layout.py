"""Which folders of photos train, choose the best model and test; and which are classes."""

import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_images import labels_of, load_photos, shades, write_noise

from elastic_trainer.datasets.image_folder import count_training_images
from elastic_trainer.datasets.layout import folder_classes
from elastic_trainer.datasets.named import find
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


def write_class(folder, count, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, count])
    for k in range(count):
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{seed}-{k}.png")
    return folder


def with_validation(photos, name):
    """Two more photos of each class, in a folder of this name."""
    for k, label in enumerate(("ant", "bee", "cat")):
        write_class(photos / name / label, 2, seed=k + 1)
    return photos


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_folder_chooses_and_the_test_folder_is_kept_for_the_end(photos, name, capsys):
    tested = shades(load_photos(photos, 12, 4).test())
    capsys.readouterr()
    images = load_photos(with_validation(photos, name), 12, 4)
    roles = f"{photos}/train trains, {photos}/{name} chooses the best model, {photos}/test is reported once at the end"
    assert capsys.readouterr().out.splitlines() == [roles]
    assert (images.train_count, images.test_count, images.held_out.test_count) == (12, 6, 9)
    assert shades(images.held_out.test()) == tested != shades(images.test())
    assert set(images.record()) > {"held_out_images"}


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_folder_alone_tests(photos, name, capsys):
    shutil.rmtree(photos / "test")
    images = load_photos(with_validation(photos, name), 12, 4)
    assert (images.train_count, images.test_count, images.held_out) == (12, 6, None)
    assert capsys.readouterr().out == f"{photos}/train trains, {photos}/{name} chooses the best model and tests it\n"
    assert count_training_images(photos) == 12
    with pytest.raises(UserError, match=rf"--test_fraction 0.2: .* has its own '{name}'; leave it out"):
        find(Settings(dataset_name="image_folder", data_dir=photos, test_fraction=0.2, augment="none"))


def test_two_validation_folders_are_refused(photos):
    with_validation(with_validation(photos, "val"), "valid")
    with pytest.raises(UserError, match=rf"--data_dir {photos}: has 'val' and 'valid'; keep one of them"):
        len(folder_classes(photos))


def test_copies_of_training_images_are_warned_about_in_both_folders(photos, capsys):
    with_validation(photos, "valid")
    with Image.open(photos / "train" / "ant" / "0.png") as image:
        image.save(photos / "valid" / "ant" / "copy.png", dpi=(300, 300))
        image.save(photos / "train" / "ant" / "0.png")  # the same pixels, as this program codes them
        image.save(photos / "test" / "ant" / "copy.png", dpi=(72, 72))
    load_photos(photos, 12, 4)
    printed = capsys.readouterr().out
    assert "1 of 7 validation images are training images too" in printed
    assert "1 of 10 test images are training images too" in printed


def test_a_photo_in_two_classes_is_named_with_both_files(tmp_path, capsys):
    for name in ("ant", "bee"):
        write_class(tmp_path / name, 5, seed=ord(name[0]))
    shutil.copy(tmp_path / "ant" / "97-2.png", tmp_path / "bee" / "same.png")
    load_photos(tmp_path, 6, 2)
    both = re.escape(f"{tmp_path}/ant/97-2.png and {tmp_path}/bee/same.png")
    assert re.search(f"warning: {both} are one photo in two classes; remove", capsys.readouterr().out)


def test_a_copy_with_other_metadata_is_on_the_same_side(tmp_path):
    for name in ("ant", "bee"):
        write_class(tmp_path / name, 20, seed=ord(name[0]))
    for path in [*tmp_path.glob("*/*.png")]:
        with Image.open(path) as image:
            image.save(path.with_name(f"copy of {path.name}"), dpi=(300, 300))
    source = find(Settings(dataset_name="image_folder", data_dir=tmp_path, augment="none"))
    train, test = ({path.replace("copy of ", "") for path in part.files} for part in (source.train, source.test))
    assert not train & test and len(train) + len(test) == 40 and source.train.count == 2 * len(train)


def test_a_class_called_train_is_a_class_and_a_line_says_so(tmp_path, capsys):
    for name in ("bus", "train", "valid"):
        write_class(tmp_path / name, 6, seed=ord(name[0]))
    shutil.rmtree(tmp_path / "valid")
    images = load_photos(tmp_path, 6, 2)
    assert images.class_names == ("bus", "train")
    assert f"{tmp_path}/train: has no folders in it, so it is read as a class\n" in capsys.readouterr().out


def test_classes_called_valid_and_test_are_classes_without_a_train(tmp_path, capsys):
    for name in ("invalid", "test", "valid"):
        write_class(tmp_path / name, 6, seed=ord(name[0]))
    assert load_photos(tmp_path, 6, 2).class_names == ("invalid", "test", "valid")
    assert capsys.readouterr().out.count("is read as a class") == 2


def test_folders_beside_train_that_are_not_read_are_named(photos, capsys):
    (photos / "extra").mkdir()
    load_photos(photos, 12, 4)
    assert f"not read, since 'train' in {photos} is no class: extra beside it" in capsys.readouterr().out


def test_names_that_differ_only_in_how_letters_are_composed_are_one_class(tmp_path, capsys):
    for part, counts in (("train", (4, 3)), ("test", (2, 1))):
        for name, count in zip((NFC, NFD), counts, strict=True):
            write_class(tmp_path / part / name, count, seed=len(name))
        write_class(tmp_path / part / "zebra", 4, seed=9)
    assert len(folder_classes(tmp_path)) == 2 and count_training_images(tmp_path) == 11
    images = load_photos(tmp_path, 6, 2)
    assert images.class_names == (NFC, "zebra")[:: -1 if NFC > "zebra" else 1]
    label = images.class_names.index(NFC)
    assert np.bincount(labels_of(images.test()))[label] == 3
    assert np.bincount(images.training_targets(np.arange(images.train_count))[0])[label] == 7


def test_classes_with_less_than_half_of_their_test_images_are_named_in_one_line(tmp_path, capsys):
    for k in range(6):
        write_class(tmp_path / f"class {k}", 40, seed=k)
    tested = sorted(find(Settings(dataset_name="image_folder", data_dir=tmp_path, augment="none")).test.files)
    assert not capsys.readouterr().out
    for k in range(4):  # they keep one of them each
        for path in [path for path in tested if f"/class {k}/" in path][1:]:
            Path(path).unlink()
    find(Settings(dataset_name="image_folder", data_dir=tmp_path, augment="none"))
    [line] = capsys.readouterr().out.splitlines()
    assert re.match(
        r"few test images of 'class 0' \(1 of \d+\), 'class 1' .*, 'class 2' .* and 1 more class, since", line
    )
    assert "a larger --test_fraction gives more, or a folder test/" in line
    find(Settings(dataset_name="image_folder", data_dir=tmp_path, test_fraction=0.6, augment="none"))
    assert not capsys.readouterr().out, "all have more than half of that"
