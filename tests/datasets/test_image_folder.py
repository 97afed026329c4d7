"""Folders of the user's photos: layouts, splits, refusals, and broken images."""

import os
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT
from PIL import Image
from small_images import encoded, labels_of, load_photos, pairs, shades, write_noise, write_red_and_blue

from elastic_trainer.datasets.named import class_names, find
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError, printable

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    return write_red_and_blue(tmp_path)


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


def settings_of(folder, **more):
    return Settings(dataset_name="image_folder", data_dir=folder, **more)


def write_class(folder, count, seed=0):
    """Write `count` images of noise, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, *folder.name.encode()])
    for k in range(count):
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{seed}-{k}.png")
    return folder


def sides(folder, size=6, **more):
    """What the training and the test images of a folder look like, in their order."""
    images = load_photos(folder, size, 1, **more)
    return [
        [image.tobytes() for image in part[np.arange(len(part))]] for part in (images.train_images, images.test_images)
    ]


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_image_folder_gives_each_image_the_label_of_its_folder(folder):
    images = load_photos(folder, 16, 2)
    assert (images.num_classes, images.train_count, images.test_count) == (2, 10, 4)
    assert images.class_names == ("blue", "red")
    for batch, labels in pairs(images.train(0)):
        assert batch.shape == (2, 16, 16, 3)
        for image, label in zip(batch.numpy(), labels.numpy(), strict=True):
            assert image[..., 2 - 2 * label].mean() > 250 and image[..., 2 * label].mean() < 5


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("train", "val", "test"),
        ("Train", "Valid", "Test"),
        ("TRAINING", "VALIDATION", "TESTING"),
        ("training_set", "dev set", "test-images"),
        ("trainset", "val_data", "testset"),
    ],
)
def test_a_validation_folder_chooses_and_the_test_folder_is_kept_for_the_end(photos, train, valid, test, capsys):
    (photos / "test").rename(photos / test)
    (photos / "train").rename(photos / train)
    for name in ("ant", "bee", "cat"):
        write_class(photos / valid / name, 2)
    images = load_photos(photos, 12, 4)
    roles = f"{photos}/{train} trains, {photos}/{valid} chooses the best model, {photos}/{test} is reported once at the"
    assert roles in capsys.readouterr().out
    assert (images.train_count, images.test_count, images.tested_later) == (12, 6, 9)
    shutil.rmtree(photos / test)
    images = load_photos(photos, 12, 4)
    assert (images.train_count, images.test_count, images.tested_later) == (12, 6, 0)
    assert f"{photos}/{train} trains, {photos}/{valid} chooses the best model and tests it\n" in capsys.readouterr().out
    assert find(settings_of(photos)).training_count == 12
    with pytest.raises(UserError, match=rf"--test_fraction 0.2: .* has its own '{valid}'; leave it out"):
        find(settings_of(photos, test_fraction=0.2))


def test_wrong_layouts_and_arguments_are_refused(folder, tmp_path):
    def refused(message, place=folder, **more):
        with pytest.raises(UserError, match=message):
            load_photos(place, **{"size": 16, "batch_size": 2, **more})

    refused("--data_dir: image_folder needs", None)
    refused(r"--data_dir .*/nowhere: is no folder; give one with train/<class>/", tmp_path / "nowhere")
    refused(r"--data_dir .*\.jpg: is no folder", folder / "train" / "red" / "0.jpg")
    refused(r"batch_size 11.*only 10 training examples; choose at most that", batch_size=11)
    refused(r"--test_fraction 0.2: .* has its own 'test'; leave it out", test_fraction=0.2)
    (folder / "test" / "green").mkdir()
    refused("class 'green' is not among")
    write_class(folder / "Testing" / "red", 1)
    refused("has 'Testing', 'test', 'train'; keep one for each")
    shutil.rmtree(folder / "Testing")
    (folder / "train").rename(folder / "trian")
    refused("has 'test' but no 'train' with one folder for each class")


@pytest.mark.parametrize("read", [lambda folder: class_names(settings_of(folder)), load_photos])
def test_one_class_or_none_is_refused(read, folder):
    (folder / "train" / "red").rename(folder / "red")
    with pytest.raises(UserError, match=r"/train: needs folders of at least two classes, not of 1"):
        read(folder)
    (folder / "train" / "blue").rename(folder / "train" / ".blue")
    with pytest.raises(UserError, match=r"/train: needs folders of at least two classes, not of 0"):
        read(folder)


@pytest.mark.parametrize("names", [("bus", "train"), ("invalid", "test", "valid")])
def test_a_class_with_the_name_of_a_part_is_a_class_and_a_line_says_so(names, tmp_path, capsys):
    for name in names:
        write_class(tmp_path / name, 6)
    assert load_photos(tmp_path, 6, 2).class_names == names
    named = ", ".join(f"'{name}'" for name in names if name not in ("bus", "invalid"))
    assert "read as a class: " in (line := capsys.readouterr().out) and {*re.findall("'.*?'", line)} == {
        *named.split(", ")
    }


def test_folders_beside_train_that_are_not_read_are_named(photos, capsys):
    (photos / "extra").mkdir()
    load_photos(photos, 12, 4)
    assert f"not read in {photos}, beside 'test', 'train': extra" in capsys.readouterr().out


def test_names_that_differ_only_in_how_letters_are_composed_are_one_class(tmp_path):
    for part, counts in (("train", (4, 3)), ("test", (2, 1))):
        for name, count in zip((NFC, NFD), counts, strict=True):
            write_class(tmp_path / part / name, count)
        write_class(tmp_path / part / "zebra", 4)
    images = load_photos(tmp_path, 6, 2)
    assert images.class_names == (NFC, "zebra")
    assert np.bincount(labels_of(images.test())).tolist() == [3, 4]
    assert np.bincount(images.training_targets(np.arange(images.train_count))[0]).tolist() == [7, 4]


def test_class_names_are_one_line_of_text_whatever_bytes_folders_and_files_have(folder):
    names = (b"caf\xe9", "a\nb\u2028".encode(), "日本 café".encode())
    for split in ("train", "test"):
        for name, old in zip(names, ("blue", "red"), strict=False):
            (folder / split / old).rename(folder / split / os.fsdecode(name))
    (folder / "train" / "a\nb\u2028" / "0.jpg").rename(folder / "train" / "a\nb\u2028" / os.fsdecode(b"\xff\xfe.jpg"))
    images = load_photos(folder, 16, 2)
    assert images.class_names == ("a\\nb\\u2028", "caf\\udce9")
    assert len(labels_of(images.train(0))) == 10
    assert printable(names[2].decode()) == names[2].decode()


def test_class_names_are_utf_8_in_the_c_locale(folder):
    (folder / "train" / "red").rename(folder / "train" / NFC)
    program = "import sys; from pathlib import Path; from elastic_trainer.datasets.named import *;"
    program += "from elastic_trainer.system.files import write_text; place = Path(sys.argv[1]);"
    program += "names = class_names(Settings(dataset_name='image_folder', data_dir=place));"
    program += "write_text(place / 'labels.txt', ' '.join(names))"
    (folder / "test").rename(folder / "other")
    c_locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, folder], cwd=ROOT, env=c_locale, check=True)
    assert (folder / "labels.txt").read_bytes() == f"blue {NFC}".encode()


# --- the split --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "train"])
def test_test_fraction_splits_all_images_the_same_way_for_every_seed(tmp_path, inside, capsys):
    counts = {"blue": ((0, 0, 1), 20), "green": ((0, 1, 0), 3), "red": ((1, 0, 0), 10), "white": ((1, 1, 1), 1)}
    for name, (colour, count) in counts.items():
        (tmp_path / inside / name).mkdir(parents=True)
        for i in range(count):
            shade = tuple(channel * (255 - 5 * i) for channel in colour)
            Image.new("RGB", (9, 9), shade).save(tmp_path / inside / name / f"{i}.png")
    split = load_photos(tmp_path, 8, 1, test_fraction=0.2)
    train, test = shades(split.train(0)), shades(split.test())
    assert {*test} == {0, 1, 2} and {*train} == {0, 1, 2, 3}, "a class with several images has one in each part"
    for label, count in enumerate((20, 3, 10, 1)):
        both = train[label] + test.get(label, [])
        assert len(set(both)) == len(both) == count, "each image is in one part"
    assert 3 <= split.test_count <= 12
    assert re.search(r"has no test images of class: 'white'; the accuracy", capsys.readouterr().out)
    assert shades(load_photos(tmp_path, 8, 1, seed=7, test_fraction=0.2).test()) == test
    assert shades(load_photos(tmp_path, 8, 1, test_fraction=0.5).test()) != test


def test_an_image_stays_in_its_part_when_others_are_added_renamed_copied_moved_or_broken(tmp_path):
    photos, more = tmp_path / "photos", {"test_fraction": 0.25}
    for k in range(4):
        write_class(photos / f"class {k}", 40)
    train, test = sides(photos, **more)
    assert 0.15 < len(test) / 160 < 0.35 and not {*train} & {*test}
    assert {*test} < {*sides(photos, test_fraction=0.4)[1]}, "a larger fraction only adds test images"
    for k in range(4):
        write_class(photos / f"class {k}", 10, seed=1)
    (photos / "class 0" / "broken.jpg").write_bytes(b"")
    more_train, more_test = sides(photos, **more)
    assert {*train} < {*more_train} and {*test} < {*more_test}
    photos = photos.rename(tmp_path / "moved")
    for path in sorted(photos.glob("*/*"))[::3]:
        path.rename(path.with_name(f"renamed {path.name}"))
    for path in sorted(photos.glob("*/*.png"))[::5]:
        shutil.copy(path, photos / "class 2" / f"copy of {path.parent.name} {path.name}")
    copied_train, copied_test = sides(photos, **more)
    assert {*copied_train} == {*more_train} and {*copied_test} == {*more_test}
    assert len(copied_train) + len(copied_test) == 240 and len({*copied_train} | {*copied_test}) == 200


@pytest.mark.parametrize("fraction", [1e-9, 0.2, 0.9])
def test_a_class_of_two_images_has_one_in_each_part_and_copies_stay_together(tmp_path, fraction):
    for k in range(12):
        write_class(tmp_path / f"class {k}", 2)
    assert [len(side) for side in sides(tmp_path, test_fraction=fraction)] == [12, 12]
    for path in tmp_path.glob("class 1*/*-1.png"):  # now two copies of one image: both train
        shutil.copy(path.with_name(path.name.replace("-1.", "-0.")), path)
    train, test = sides(tmp_path, test_fraction=fraction)
    assert not {*train} & {*test} and len(test) == 9


def test_copies_of_training_images_and_photos_in_two_classes_are_named(photos, capsys):
    shutil.copy(photos / "train" / "ant" / "0.png", photos / "test" / "ant" / "copy.png")
    shutil.copy(photos / "train" / "ant" / "1.png", photos / "train" / "bee" / "same.png")
    load_photos(photos, 12, 4)
    printed = capsys.readouterr().out
    assert "warning: 1 of 10 images that choose the best model are training images too" in printed
    both = re.escape(f"{photos}/train/ant/1.png and {photos}/train/bee/same.png")
    assert re.search(f"warning: {both} are one photo in two classes; remove", printed)


# --- files ------------------------------------------------------------------------------------------------------------


def test_other_files_are_left_out_and_counted_in_a_line(folder, capsys):
    where = folder / "train" / "red"
    for name in ("a.txt", "b.TXT", "c.mp4", "._0.jpg", ".DS_Store"):
        (where / name).write_bytes(b"anything")
    (where / "folder.jpg").mkdir()
    assert load_photos(folder, 16, 2).train_count == 10
    printed = capsys.readouterr().out
    first = re.escape(str(where / "a.txt"))
    assert re.search(rf"\(unreadable\): 3 of 17 files; the first: {first}: cannot be read: no JPEG", printed), (
        "not hidden ones"
    )
    assert re.search(r"ignored: 1 folder\(s\) within those of classes, such as .*/red/folder\.jpg; move", printed)


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_that_cannot_be_read_are_left_out_and_the_first_is_named(split, folder, capsys):
    place, content = folder / split / "red", encoded(Image.fromarray(NOISE), "JPEG")
    (place / "cut.jpg").write_bytes(content[: len(content) * 2 // 3])
    (place / "gone.jpg").symlink_to("nowhere.jpg")
    (place / "text.png").write_text("<html>not found</html>")
    images = load_photos(folder, 16, 2)
    assert (images.train_count, images.test_count) == (10, 4)
    first = f"skipped (unreadable): 3 of 17 files; the first: {place}/cut.jpg: cannot be read: "
    assert first in capsys.readouterr().out


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"--data_dir .*: cannot be read: Permission denied"):
        load_photos(folder, 16, 2)


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["gone", "broken"])
def test_a_class_or_part_that_loses_all_its_images_is_refused_or_warned_about(lose, folder, capsys):
    def lose_all(pattern):
        for path in folder.glob(pattern):
            lose(path)

    lose_all("train/blue/[01].*")
    lose_all("test/red/*")
    images = load_photos(folder, 16, 2)
    assert (images.train_count, images.steps_per_epoch, images.test_count) == (8, 4, 2)
    printed = capsys.readouterr().out
    assert re.search(r"warning: .* has no test images of class: 'red'; the accuracy", printed)
    assert ("skipped (unreadable): 4 of 14 files; the first:" in printed) == (lose is not Path.unlink)
    lose_all("test/blue/*")
    with pytest.raises(UserError, match=r"has no test images \(JPEG, "):
        load_photos(folder, 16, 2)
    write_class(folder / "test" / "blue", 1)
    lose_all("train/red/*")
    with pytest.raises(UserError, match=r"has no training images of class: 'red'; add some or remove the folder"):
        load_photos(folder, 16, 2)
    lose_all("train/blue/*")
    with pytest.raises(UserError, match=r"has no training images \(JPEG, "):
        load_photos(folder, 16, 2)
