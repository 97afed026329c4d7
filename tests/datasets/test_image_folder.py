"""Folders of the user's photos: layouts, splits, refusals, and broken images."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from small_images import labels_of, load_photos, pairs, shades, write_red_and_blue

import data
from elastic_trainer.datasets.layout import folder_classes
from elastic_trainer.datasets.named import find
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError, printable


@pytest.fixture
def folder(tmp_path):
    return write_red_and_blue(tmp_path)


@pytest.fixture
def loose(tmp_path):
    """Class folders without train/ and test/: 20 blue, 10 red, 3 green, 1 white, each of another shade."""
    colours = {"blue": ((0, 0, 1), 20), "green": ((0, 1, 0), 3), "red": ((1, 0, 0), 10), "white": ((1, 1, 1), 1)}
    for name, (colour, count) in colours.items():
        (tmp_path / name).mkdir()
        for i in range(count):
            Image.new("RGB", (9, 9), tuple(channel * (255 - 5 * i) for channel in colour)).save(
                tmp_path / name / f"{i}.png"
            )
    return tmp_path


def test_image_folder_gives_each_image_the_label_of_its_folder(folder):
    images = load_photos(folder, 16, 2)
    assert (images.num_classes, images.train_count, images.test_count) == (2, 10, 4)
    assert images.class_names == ("blue", "red")
    assert len(folder_classes(folder)) == 2
    for batch, labels in pairs(images.train(0)):
        assert batch.shape == (2, 16, 16, 3)
        for image, label in zip(batch.numpy(), labels.numpy(), strict=True):
            assert image[..., 2 - 2 * label].mean() > 250 and image[..., 2 * label].mean() < 5


def test_wrong_layouts_and_arguments_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="--data_dir: image_folder needs"):
        load_photos(None)
    with pytest.raises(UserError, match=r"--data_dir .*/nowhere: there is no such folder with train/<class>/"):
        load_photos(tmp_path / "nowhere", 16, 2)
    with pytest.raises(UserError, match=r"--data_dir .*\.jpg: is a file; it must be a folder"):
        load_photos(folder / "train" / "red" / "0.jpg", 16, 2)
    with pytest.raises(UserError, match=r"batch_size 11.*only 10 training examples; choose at most that"):
        load_photos(folder, 16, 11)
    with pytest.raises(UserError, match=r"--dataset_name image_folder: has 2 classes, but the network has 1 outputs"):
        data.load(
            Settings(
                dataset_name="image_folder", data_dir=folder, input_size=16, batch_size=2, num_classes=1, augment="none"
            )
        )
    with pytest.raises(UserError, match=r"--test_fraction 0.2: .* has its own 'test'; leave it out"):
        load_photos(folder, 16, 2, test_fraction=0.2)
    (folder / "test" / "green").mkdir()
    with pytest.raises(UserError, match="class 'green' is not among"):
        load_photos(folder, 16, 2)
    (folder / "test" / "amber").mkdir()
    with pytest.raises(UserError, match="classes 'amber', 'green' are not among"):
        load_photos(folder, 16, 2)
    (folder / "train").rename(folder / "trian")
    with pytest.raises(UserError, match="has 'test' but no 'train' with one folder for each class"):
        load_photos(folder, 16, 2)


@pytest.mark.parametrize("inside", ["", "train"])
def test_test_fraction_splits_all_images_the_same_way_for_every_seed(loose, inside, capsys):
    if inside:
        (loose / "train").mkdir()
        for name in ("blue", "green", "red", "white"):
            (loose / name).rename(loose / "train" / name)
    assert len(folder_classes(loose)) == 4
    split = load_photos(loose, 8, 1, test_fraction=0.2)
    train, test = shades(split.train(0)), shades(split.test())
    assert {*test} == {0, 1, 2} and {*train} == {0, 1, 2, 3}, "a class with several images has one in each part"
    for label, count in enumerate((20, 3, 10, 1)):
        both = train[label] + test.get(label, [])
        assert len(set(both)) == len(both) == count, "each image is in one part"
    assert 3 <= split.test_count <= 12
    assert re.search(r"has no test images of class: 'white'; the accuracy", capsys.readouterr().out)
    other_seed = load_photos(loose, 8, 1, seed=7, test_fraction=0.2)
    assert shades(other_seed.test()) == test
    assert shades(load_photos(loose, 8, 1, test_fraction=0.5).test()) != test


def write_noisy_photos(folder, classes=4, count=40, seed=0):
    """Write `count` images of noise, all different, to each of `classes` class folders."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        where = folder / f"class {label}"
        where.mkdir(parents=True, exist_ok=True)
        for k in range(count):
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(where / f"{seed}-{k}.png")
    return folder


def split_of(folder, fraction=0.25):
    """The content of the training and of the test images of a folder, in their order."""
    source = find(Settings(dataset_name="image_folder", data_dir=folder, test_fraction=fraction, augment="none"))
    return [[Path(path).read_bytes() for path in part.files] for part in (source.train, source.test)]


def test_an_image_stays_in_its_part_when_others_are_added_renamed_or_copied(tmp_path):
    photos = write_noisy_photos(tmp_path / "photos")
    train, test = split_of(photos)
    assert 0.15 < len(test) / 160 < 0.35 and not {*train} & {*test}
    assert {*test} < {*split_of(photos, 0.4)[1]}, "a larger fraction only adds test images"
    write_noisy_photos(photos, count=10, seed=1)
    more_train, more_test = split_of(photos)
    assert {*train} < {*more_train} and {*test} < {*more_test}
    for path in sorted(photos.glob("*/*"))[::3]:
        path.rename(path.with_name(f"renamed {path.name}"))
    for path in sorted(photos.glob("*/*"))[::5]:
        shutil.copy(path, photos / "class 2" / f"copy of {path.parent.name} {path.name}")
    copied_train, copied_test = split_of(photos)
    assert {*copied_train} == {*more_train} and {*copied_test} == {*more_test}
    assert len(copied_train) + len(copied_test) == 240 and len({*copied_train} | {*copied_test}) == 200


@pytest.mark.parametrize("fraction", [1e-9, 0.2, 0.9])
def test_a_class_of_two_images_has_one_in_each_part_and_copies_stay_together(tmp_path, fraction):
    photos = write_noisy_photos(tmp_path / "photos", classes=12, count=2)
    train, test = split_of(photos, fraction)
    assert len(train) == len(test) == 12
    for path in photos.glob("class 1*/*-1.png"):  # now two copies of one image: both train
        shutil.copy(path.with_name(path.name.replace("-1.", "-0.")), path)
    train, test = split_of(photos, fraction)
    assert not {*train} & {*test} and len(test) == 9


def test_an_image_that_cannot_be_read_does_not_change_the_split(tmp_path):
    photos = write_noisy_photos(tmp_path / "photos", classes=2, count=9)
    train, test = split_of(photos)
    (photos / "class 0" / "broken.jpg").write_bytes(b"")
    source = find(Settings(dataset_name="image_folder", data_dir=photos, test_fraction=0.25, augment="none"))
    assert [Path(path).read_bytes() for path in source.test.files] == test
    assert len(source.train.files) == len(train) + 1


def test_a_class_without_training_images_is_refused_and_one_without_test_images_warned_about(folder, capsys):
    for path in (folder / "test" / "red").iterdir():
        path.unlink()
    assert load_photos(folder, 16, 2).test_count == 2
    assert re.search(r"warning: .* has no test images of class: 'red'; the accuracy", capsys.readouterr().out)
    (folder / "train" / "red" / "more").mkdir()
    for path in (folder / "train" / "red").glob("*.*"):
        path.rename(folder / "train" / "red" / "more" / path.name)  # subfolders of a class are ignored
    with pytest.raises(UserError, match=r"has no training images of class: 'red'; add some or remove the folder"):
        load_photos(folder, 16, 2)
    for path in folder.glob("train/blue/*.*"):
        path.unlink()
    with pytest.raises(UserError, match=r"has no training images \(JPEG, "):
        load_photos(folder, 16, 2)


def test_a_split_without_images_is_refused(folder):
    for path in folder.glob("test/*/*"):
        path.unlink()
    with pytest.raises(UserError, match=r"has no test images \(JPEG, "):
        load_photos(folder, 16, 2)
    for name in ("blue", "red"):
        (folder / "test" / name).rmdir()
    with pytest.raises(UserError, match=r"has no test images \(JPEG, "):
        load_photos(folder, 16, 2)
    (folder / "test").rmdir()
    assert load_photos(folder, 16, 2).test_count > 0, "a fifth of the training images"


@pytest.mark.parametrize("read", [folder_classes, load_photos])
def test_one_class_or_none_is_refused(read, folder):
    (folder / "train" / "red").rename(folder / "red")
    with pytest.raises(UserError, match=r"/train: has only one class, 'blue'; at least two"):
        read(folder)
    (folder / "train" / "blue").rename(folder / "train" / ".blue")
    with pytest.raises(UserError, match=r"/train: contains no folders"):
        read(folder)


def test_other_files_are_ignored_and_counted_in_a_message(folder, capsys):
    where = folder / "train" / "red"
    for name in ("a.txt", "b.TXT", "notes", "._0.jpg", ".DS_Store"):
        (where / name).write_bytes(b"anything")
    (where / "folder.jpg").mkdir()
    assert load_photos(folder, 16, 2).train_count == 10
    printed = capsys.readouterr().out
    assert re.search(r"ignored in .*/train, not JPEG.*: 2 \.txt, 1 without extension\n", printed), (
        "hidden files are not reported"
    )
    assert re.search(r"ignored: 1 folder within those of classes, such as .*/red/folder\.jpg; move", printed)
    for place in ("train/blue/more", "test/red/more", "train/.hidden", "train/blue/.hidden"):
        (folder / place).mkdir()
    load_photos(folder, 16, 2)
    printed = capsys.readouterr().out
    for count in (r"2 folders within those of classes, such as .*/train/blue/more", "1 folder .*/test/red/more"):
        assert re.search(f"ignored: {count}; move the images up", printed)


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


def test_images_are_recognised_by_content_not_extension(folder):
    image = Image.new("RGB", (20, 30), (200, 200, 200))
    for name, kind in (("png.jpg", "PNG"), ("jpg.gif", "JPEG"), ("webp", "WEBP"), ("bmp.txt", "BMP")):
        image.save(folder / "train" / "red" / name, kind)
    images = load_photos(folder, 16, 2)
    assert len(labels_of(images.train(0))) == images.train_count == 14


def truncated(path):
    """Write an image in the format of `path`'s extension without the last third of its bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    encoded = (tf.io.encode_png(pixels) if path.suffix == ".png" else tf.io.encode_jpeg(pixels)).numpy()
    path.write_bytes(encoded[: len(encoded) * 2 // 3])


BROKEN_AT_START = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "text": (lambda path: path.write_text("<html>not found</html>"), "is not a JPEG, PNG, .*, whatever its name"),
    "gone": (lambda path: path.symlink_to("nowhere.jpg"), "cannot be read: No such file or directory"),
}


BROKEN_INSIDE = {
    "truncated.jpg": truncated,
    "truncated.png": truncated,
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", [*BROKEN_AT_START, *BROKEN_INSIDE])
def test_an_image_that_cannot_be_read_is_left_out_and_named_in_one_line(kind, split, folder, capsys):
    make, why = BROKEN_AT_START.get(kind) or (BROKEN_INSIDE[kind], "cannot be read as an image: .+")
    broken = folder / split / "red" / (kind if kind in BROKEN_INSIDE else "broken.jpg")
    make(broken)
    assert load_photos(folder, 16, 2).skipped_images == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if str(broken) in line]
    assert re.match(rf"skipped \(unreadable\): 1 of \d+ images; the first: {re.escape(str(broken))}: {why}", line)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_or_folder_without_permission_is_named(folder):
    (folder / "train" / "red" / "0.jpg").chmod(0)
    with pytest.raises(UserError, match=r"/train/red/0\.jpg: cannot be read: Permission denied"):
        load_photos(folder, 16, 2)
    (folder / "train" / "red").chmod(0)
    with pytest.raises(UserError, match=r"--data_dir .*/train/red: cannot be read: Permission denied"):
        load_photos(folder, 16, 2)
    (folder / "train" / "red").chmod(0o700)


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"--data_dir .*: cannot be read: Permission denied"):
        load_photos(folder, 16, 2)


def test_broken_images_of_both_splits_are_left_out_and_counted(folder, capsys):
    intact = load_photos(folder, 16, 2)
    assert intact.skipped_images == 0 and intact.steps_per_epoch == 5
    capsys.readouterr()
    for name, make in BROKEN_INSIDE.items():
        make(folder / "train" / "red" / name)
    for name, (make, _) in BROKEN_AT_START.items():
        make(folder / "test" / "blue" / f"{name}.jpg")
    truncated(folder / "train" / "blue" / "0.jpg")
    images = load_photos(folder, 16, 2)
    assert (images.train_count, images.test_count, images.skipped_images) == (9, 4, 6)
    assert images.steps_per_epoch == 4
    assert len(labels_of(images.train(0))) == 8 and len(labels_of(images.test())) == 4
    printed = capsys.readouterr().out
    assert re.search(
        r"skipped \(unreadable\): 6 of 19 images; the first: .*/train/blue/0\.jpg: cannot be read as", printed
    )
    again = load_photos(folder, 16, 2)
    np.testing.assert_array_equal(labels_of(images.train(3)), labels_of(again.train(3)))


def test_leaving_out_broken_images_does_not_leave_a_class_or_a_batch_empty(folder):
    for path in folder.glob("train/red/*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no training images of class: 'red'"):
        load_photos(folder, 16, 2)
    for path in folder.glob("test/*/*"):
        path.write_bytes(b"")
    for path in folder.glob("train/red/*"):
        tf.io.write_file(str(path), tf.io.encode_png(np.zeros((9, 9, 3), np.uint8)))
    with pytest.raises(UserError, match=r"has no test images"):
        load_photos(folder, 16, 2)
