"""Data sets: what reaches the network, in which order, and what is refused."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import data
from elastic_trainer.datasets.sources import count_classes
from utils import UserError


def labels_of(batches):
    return np.concatenate([labels.numpy() for _, labels in batches])


def first_images(batches):
    return next(iter(batches))[0].numpy()


def test_digits_are_split_in_half_by_class_and_arrive_as_rgb():
    digits = data.load("digits", 32, 16)
    assert (digits.num_classes, digits.train_count, digits.test_count) == (10, 898, 899)
    assert digits.class_names == tuple("0123456789")
    images, labels = next(iter(digits.train(0)))
    assert images.shape == (16, 32, 32, 3) and images.dtype == tf.float32 and labels.dtype == tf.int32
    assert float(tf.reduce_min(images)) >= 0 and 200 < float(tf.reduce_max(images)) <= 255
    np.testing.assert_array_equal(images[..., 0], images[..., 1])
    tested = labels_of(digits.test())
    assert len(tested) == 899
    assert np.ptp(np.bincount(tested)) <= 5
    other_seed = data.load("digits", 32, 16, seed=5)
    np.testing.assert_array_equal(labels_of(other_seed.test()), tested)


def test_no_tuner_is_started_that_would_stall_the_end_of_an_epoch():
    digits = data.load("digits", 8, 4)
    for batches in (digits.train(0), digits.train(1, skip=3).take(2), digits.test()):
        assert batches.options().autotune.enabled is False


def test_order_depends_on_seed_and_epoch_alone():
    first, again, other = (data.load("digits", 8, 16, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(labels_of(first.train(3)), labels_of(again.train(3)))
    assert (labels_of(first.train(3)) != labels_of(first.train(4))).any()
    assert (labels_of(first.train(3)) != labels_of(other.train(3))).any()
    assert len(labels_of(first.train(0))) == first.steps_per_epoch * 16


def test_each_probe_is_a_fresh_batch():
    digits = data.load("digits", 8, 16)
    probes = [digits.probe(index)[0][0].numpy() for index in (0, 1, 0)]
    assert probes[0].shape == (16, 8, 8, 3)
    assert (probes[0] != probes[1]).any()
    np.testing.assert_array_equal(probes[0], probes[2])
    assert (probes[0] != first_images(digits.train(0))).any()


@pytest.fixture
def folder(tmp_path):
    """Images of two classes, red and blue, of different sizes and formats."""
    for split, count in (("train", 5), ("test", 2)):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            where = tmp_path / split / name
            where.mkdir(parents=True)
            for i in range(count):
                pixels = np.tile(np.array(colour, np.uint8), (20 + i, 30, 1))
                encoded = tf.io.encode_png(pixels) if i % 2 else tf.io.encode_jpeg(pixels)
                tf.io.write_file(str(where / f"{i}.{'png' if i % 2 else 'jpg'}"), encoded)
    return tmp_path


def test_image_folder(folder):
    images = data.load("image_folder", 16, 2, data_dir=folder)
    assert (images.num_classes, images.train_count, images.test_count) == (2, 10, 4)
    assert images.class_names == ("blue", "red")
    assert count_classes("image_folder", folder) == 2
    for batch, labels in images.train(0):
        assert batch.shape == (2, 16, 16, 3)
        for image, label in zip(batch.numpy(), labels.numpy(), strict=True):
            assert image[..., 2 - 2 * label].mean() > 250 and image[..., 2 * label].mean() < 5


def test_image_folder_takes_val_for_test(folder):
    (folder / "test").rename(folder / "val")
    assert data.load("image_folder", 16, 2, data_dir=folder).test_count == 4


def test_image_folder_refusals(folder, tmp_path):
    with pytest.raises(UserError, match="--data_dir: image_folder needs"):
        data.load("image_folder", 16, 2)
    with pytest.raises(UserError, match=r"/train: has neither 'test' nor 'val' .*--test_fraction 0.2"):
        data.load("image_folder", 16, 2, data_dir=tmp_path / "train")
    with pytest.raises(UserError, match=r"--data_dir .*/nowhere: there is no such folder with train/<class>/"):
        data.load("image_folder", 16, 2, data_dir=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"--data_dir .*\.jpg: is a file; it must be a folder"):
        data.load("image_folder", 16, 2, data_dir=folder / "train" / "red" / "0.jpg")
    with pytest.raises(UserError, match=r"batch_size 11.*only 10 training images"):
        data.load("image_folder", 16, 11, data_dir=folder)
    with pytest.raises(UserError, match=r"num_classes 1: .* has 2 classes"):
        data.load("image_folder", 16, 2, data_dir=folder, num_classes=1)
    with pytest.raises(UserError, match=r"--test_fraction 0.2: .* has its own 'test'; leave it out"):
        data.load("image_folder", 16, 2, data_dir=folder, test_fraction=0.2)
    (folder / "test" / "green").mkdir()
    with pytest.raises(UserError, match="class 'green' is not among"):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "test" / "amber").mkdir()
    with pytest.raises(UserError, match="classes 'amber', 'green' are not among"):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "train").rename(folder / "trian")
    with pytest.raises(UserError, match="has 'test' but no 'train' with one folder for each class"):
        data.load("image_folder", 16, 2, data_dir=folder)


@pytest.fixture
def loose(tmp_path):
    """Class folders alone: 20 blue, 10 red, 3 green, 1 white; each image of its own shade."""
    colours = {"blue": ((0, 0, 1), 20), "green": ((0, 1, 0), 3), "red": ((1, 0, 0), 10), "white": ((1, 1, 1), 1)}
    for name, (colour, count) in colours.items():
        (tmp_path / name).mkdir()
        for i in range(count):
            Image.new("RGB", (9, 9), tuple(channel * (255 - 5 * i) for channel in colour)).save(
                tmp_path / name / f"{i}.png"
            )
    return tmp_path


def shades(batches):
    """{label: {brightness}} of what comes."""
    found: dict[int, list[int]] = {}
    for batch, labels in batches:
        for image, label in zip(batch.numpy(), labels.numpy(), strict=True):
            found.setdefault(int(label), []).append(int(image.max()))
    return {label: sorted(values) for label, values in found.items()}


@pytest.mark.parametrize("inside", ["", "train"])
def test_one_folder_is_split_class_by_class_and_always_alike(loose, inside, capsys):
    if inside:
        (loose / "train").mkdir()
        for name in ("blue", "green", "red", "white"):
            (loose / name).rename(loose / "train" / name)
    assert count_classes("image_folder", loose) == 4
    whole = data.load("image_folder", 8, 1, data_dir=loose, test_fraction=0.2)
    train, test = shades(whole.train(0)), shades(whole.test())
    assert {label: len(values) for label, values in test.items()} == {0: 4, 1: 1, 2: 2}
    assert {label: len(values) for label, values in train.items()} == {0: 16, 1: 2, 2: 8, 3: 1}
    for label in test:
        both = train[label] + test[label]
        assert len(set(both)) == len(both), "no image is in both"
    assert re.search(r"has no test images of class: 'white'; accuracy", capsys.readouterr().out)
    other_seed = data.load("image_folder", 8, 1, seed=7, data_dir=loose, test_fraction=0.2)
    assert shades(other_seed.test()) == test
    assert shades(data.load("image_folder", 8, 1, data_dir=loose, test_fraction=0.5).test()) != test


def test_images_are_read_once_and_not_while_training(folder):
    images = data.load("image_folder", 16, 2, data_dir=folder)
    first = [batch.numpy() for batch, _ in images.train(0)]
    for path in folder.rglob("*.*"):
        path.unlink()
    for batch, again in zip(images.train(0), first, strict=True):
        np.testing.assert_array_equal(batch[0], again)
    assert len(labels_of(images.test())) == 4


def test_a_file_in_the_place_of_memory_gives_the_same_batches(folder, tmp_path):
    in_memory = data.load("image_folder", 16, 2, data_dir=folder)
    mapped = data.load("image_folder", 16, 2, data_dir=folder, cache_dir=tmp_path / "cache", image_memory=0)
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".json", ".npy"]
    for one, other in ((in_memory.train(1), mapped.train(1)), (in_memory.test(), mapped.test())):
        for (images, labels), (same_images, same_labels) in zip(one, other, strict=True):
            np.testing.assert_array_equal(images, same_images)
            np.testing.assert_array_equal(labels, same_labels)


def test_skipping_batches_leaves_the_rest_of_the_epoch(folder):
    images = data.load("image_folder", 16, 2, data_dir=folder)
    whole = [batch.numpy() for batch, _ in images.train(3)]
    rest = [batch.numpy() for batch, _ in images.train(3, skip=2)]
    assert len(rest) == len(whole) - 2
    np.testing.assert_array_equal(rest, whole[2:])


def test_a_class_without_training_images_is_refused_and_one_without_test_images_said(folder, capsys):
    for path in (folder / "test" / "red").iterdir():
        path.unlink()
    assert data.load("image_folder", 16, 2, data_dir=folder).test_count == 2
    assert re.search(r"warning: .* has no test images of class: 'red'; accuracy", capsys.readouterr().out)
    (folder / "train" / "red" / "more").mkdir()
    for path in (folder / "train" / "red").glob("*.*"):
        path.rename(folder / "train" / "red" / "more" / path.name)  # too deep to be found
    with pytest.raises(UserError, match=r"has no training images of class: 'red', which cannot be learned so"):
        data.load("image_folder", 16, 2, data_dir=folder)
    for path in folder.glob("train/blue/*.*"):
        path.unlink()
    with pytest.raises(UserError, match=r"holds no training images \(JPEG, "):
        data.load("image_folder", 16, 2, data_dir=folder)


def test_a_split_without_images_is_refused(folder):
    for path in folder.glob("test/*/*"):
        path.unlink()
    with pytest.raises(UserError, match=r"holds no test images \(JPEG, "):
        data.load("image_folder", 16, 2, data_dir=folder)
    for name in ("blue", "red"):
        (folder / "test" / name).rmdir()
    with pytest.raises(UserError, match=r"holds no test images \(JPEG, "):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "test").rmdir()
    with pytest.raises(UserError, match="has neither 'test' nor 'val'"):
        data.load("image_folder", 16, 2, data_dir=folder)


@pytest.mark.parametrize("ask", [count_classes, lambda name, where: data.load(name, 16, 2, data_dir=where)])
def test_one_class_or_none_is_refused(ask, folder):
    (folder / "train" / "red").rename(folder / "red")
    with pytest.raises(UserError, match=r"/train: has one class only, 'blue'; there must be two"):
        ask("image_folder", folder)
    (folder / "train" / "blue").rename(folder / "train" / ".blue")
    with pytest.raises(UserError, match=r"/train: holds no folders"):
        ask("image_folder", folder)


def test_what_is_no_image_is_passed_over_and_said(folder, capsys):
    where = folder / "train" / "red"
    for name in ("a.txt", "b.TXT", "notes", "._0.jpg", ".DS_Store"):
        (where / name).write_bytes(b"anything")
    (where / "folder.jpg").mkdir()
    assert data.load("image_folder", 16, 2, data_dir=folder).train_count == 10
    assert re.search(
        r"passed over in .*/train, being no JPEG.*: 2 \.txt, 1 without ending\n", capsys.readouterr().out
    ), "hidden files and folders are not worth a word"


def test_content_decides_what_is_an_image(folder):
    image = Image.new("RGB", (20, 30), (200, 200, 200))
    for name, kind in (("png.jpg", "PNG"), ("jpg.gif", "JPEG"), ("webp", "WEBP"), ("bmp.txt", "BMP")):
        image.save(folder / "train" / "red" / name, kind)
    images = data.load("image_folder", 16, 2, data_dir=folder)
    assert len(labels_of(images.train(0))) == images.train_count == 14


def test_names_of_any_bytes_can_be_read(folder):
    (folder / "train" / "red" / "0.jpg").rename(os.fsdecode(bytes(folder / "train" / "red") + b"/\xff\xfe.jpg"))
    assert len(labels_of(data.load("image_folder", 16, 2, data_dir=folder).train(0))) == 10


# --- broken images ----------------------------------------------------------------------------------------------------


def truncated(path):
    """A real image of `path`'s ending, the last third of its bytes missing."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    encoded = (tf.io.encode_png(pixels) if path.suffix == ".png" else tf.io.encode_jpeg(pixels)).numpy()
    path.write_bytes(encoded[: len(encoded) * 2 // 3])


BROKEN_AT_START = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "text": (lambda path: path.write_text("<html>not found</html>"), "is no JPEG, PNG, .*, whatever its name"),
    "gone": (lambda path: path.symlink_to("nowhere.jpg"), "cannot be read: No such file or directory"),
}
BROKEN_INSIDE = {
    "truncated.jpg": truncated,
    "truncated.png": truncated,
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", BROKEN_AT_START)
def test_a_file_that_cannot_be_an_image_is_named_before_training(kind, split, folder):
    make, why = BROKEN_AT_START[kind]
    make(folder / split / "red" / "broken.jpg")
    with pytest.raises(UserError, match=f"/{split}/red/broken.jpg: {why}.*; mend or remove it, or .*--skip_broken"):
        data.load("image_folder", 16, 2, data_dir=folder)
    make(folder / split / "blue" / "also.png")
    with pytest.raises(UserError, match=rf"/{split}/blue/also.png: {why}.* \(2 of 16 images are broken\); mend"):
        data.load("image_folder", 16, 2, data_dir=folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_or_folder_without_permission_is_named(folder):
    (folder / "train" / "red" / "0.jpg").chmod(0)
    with pytest.raises(UserError, match=r"/train/red/0\.jpg: cannot be read: Permission denied"):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "train" / "red").chmod(0)
    with pytest.raises(UserError, match=r"--data_dir .*/train/red: cannot be read: Permission denied"):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "train" / "red").chmod(0o700)


def test_a_folder_that_the_system_does_not_let_read_is_named(folder, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"--data_dir .*: cannot be read: Permission denied"):
        data.load("image_folder", 16, 2, data_dir=folder)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", BROKEN_INSIDE)
def test_an_image_that_cannot_be_decoded_is_named_before_training(name, split, folder):
    broken = folder / split / "red" / name
    BROKEN_INSIDE[name](broken)
    message = f"{re.escape(str(broken))}: cannot be read as an image: .+; mend or remove it, or .*--skip_broken"
    with pytest.raises(UserError, match=message) as caught:
        data.load("image_folder", 16, 2, data_dir=folder)
    assert "\n" not in str(caught.value)


def test_skip_broken_leaves_them_out_of_both_splits_and_counts_them(folder, capsys):
    whole = data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)
    assert whole.skipped_images == 0 and whole.steps_per_epoch == 5
    capsys.readouterr()
    for name, make in BROKEN_INSIDE.items():
        make(folder / "train" / "red" / name)
    for name, (make, _) in BROKEN_AT_START.items():
        make(folder / "test" / "blue" / f"{name}.jpg")
    truncated(folder / "train" / "blue" / "0.jpg")
    images = data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)
    assert (images.train_count, images.test_count, images.skipped_images) == (9, 4, 6)
    assert images.steps_per_epoch == 4
    assert len(labels_of(images.train(0))) == 8 and len(labels_of(images.test())) == 4
    said = capsys.readouterr().out
    assert re.search(r"left out as broken: 6 of 19 images; the first: .*/train/blue/0\.jpg: cannot be read as", said)
    again = data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)
    np.testing.assert_array_equal(labels_of(images.train(3)), labels_of(again.train(3)))


def test_with_skip_broken_the_order_is_that_of_the_images_left(folder):
    """What is broken leaves no mark: the same epoch as if the files had never been there."""
    for i, path in enumerate(sorted(folder.glob("train/*/*"))):
        tf.io.write_file(str(path), tf.io.encode_png(np.full((16, 16, 3), 20 * i, np.uint8)))
    removed = folder / "train" / "blue" / "2.jpg"
    removed.write_bytes(b"")
    skipped = data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)
    removed.unlink()
    never = data.load("image_folder", 16, 2, data_dir=folder)
    for one, other in zip(skipped.train(2), never.train(2), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_skip_broken_does_not_leave_a_class_or_a_batch_empty(folder):
    for path in folder.glob("train/red/*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no training images of class: 'red'"):
        data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)
    for path in folder.glob("test/*/*"):
        path.write_bytes(b"")
    for path in folder.glob("train/red/*"):
        tf.io.write_file(str(path), tf.io.encode_png(np.zeros((9, 9, 3), np.uint8)))
    with pytest.raises(UserError, match=r"holds no test images"):
        data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)


def test_a_broken_image_ends_main_in_one_line_that_names_it(folder):
    """The whole way: also the last line of what C libraries and progress bars write to stderr is ours."""
    truncated(folder / "train" / "red" / "1.png")
    root = Path(__file__).resolve().parents[2]
    flags = ["--train_type", "traditional_tl_training", "--model_name", f"{root}/tests/zoo.py:branches"]
    flags += ["--input_size", "16", "--batch_size", "2", "--max_steps", "5", "--logdir", str(folder / "logs")]
    flags += ["--dataset_name", "image_folder", "--data_dir", str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}

    def run(*more):
        words = [sys.executable, str(root / "main.py"), *flags, *more]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)

    done = run()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.match(r"main\.py: error: .*/train/red/1\.png: cannot be read as an", done.stderr.splitlines()[-1])
    done = run("--skip_broken")
    assert done.returncode == 0, done.stderr
    assert "left out as broken: 1 of 14 images" in done.stdout and ": 9 training and 4 test images" in done.stdout


# --- tensorflow-datasets ----------------------------------------------------------------------------------------------


def annotations(k):
    """What these data sets tell of image `k` beside its label: it must not be in training's way."""
    import tensorflow_datasets as tfds

    box = tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
    return {
        "caltech_birds2011": {
            "image/filename": f"{k}.jpg",
            "label_name": f"bird {k}",
            "bbox": box,
            "segmentation_mask": np.zeros((5, 5, 1), np.uint8),
        },
        "oxford_iiit_pet": {
            "species": k % 2,
            "file_name": f"{k}.jpg",
            "segmentation_mask": np.zeros((5, 5, 1), np.uint8),
            "head_bbox": box,
        },
        "stanford_dogs": {"image/filename": f"{k}.jpg", "objects": [{"bbox": box}]},
    }


def prepare_small(name, folder, monkeypatch, train=8, test=5):
    """Have TFDS' own builder write a few images of one shade each, in the true features, where it would write all."""
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=folder)

    def examples(count):
        for i in range(count):
            image = Image.new("RGB", (10, 20 + i), (30 * i, 30 * i, 30 * i))
            file = io.BytesIO()
            image.save(file, "JPEG")
            file.seek(0)
            yield f"{i}.jpg", {"image": file, "label": i, **annotations(i)[name]}

    with monkeypatch.context() as patch:
        patch.setattr(
            type(builder), "_split_generators", lambda self, _: {"train": examples(train), "test": examples(test)}
        )
        if name == "stanford_dogs":  # whose own generator learns the names from what it downloads
            builder.info.features["label"].names = [f"dog {k}" for k in range(120)]
        builder.download_and_prepare()
    return builder


CLASSES = {"caltech_birds2011": 200, "oxford_iiit_pet": 37, "stanford_dogs": 120}


@pytest.mark.parametrize("name", data.TFDS_NAMES)
def test_tfds_names_are_read_as_tfds_prepared_them(name, tmp_path, monkeypatch):
    assert count_classes(name, tmp_path) == CLASSES[name]
    prepare_small(name, tmp_path, monkeypatch)
    dataset = data.load(name, 16, 4, data_dir=tmp_path)
    assert (dataset.num_classes, dataset.train_count, dataset.test_count) == (CLASSES[name], 8, 5)
    seen = shades(dataset.train(0))
    assert sorted(seen) == list(range(8))
    assert all(abs(shade - 30 * label) < 3 for label, [shade] in seen.items())
    assert shades(dataset.test()) == {label: [30 * label] for label in range(5)}
    assert len(set(dataset.class_names)) == CLASSES[name] and all(isinstance(one, str) for one in dataset.class_names)


def test_tfds_images_in_a_file_are_found_again(tmp_path, monkeypatch):
    prepare_small("oxford_iiit_pet", tmp_path, monkeypatch)
    first, again = (
        data.load("oxford_iiit_pet", 16, 4, data_dir=tmp_path, cache_dir=tmp_path / "cache", image_memory=0)
        for _ in range(2)
    )
    assert len([*(tmp_path / "cache").glob("*.npy")]) == 1
    assert shades(first.train(0)) == shades(again.train(0))


@pytest.fixture
def no_network(monkeypatch):
    from tensorflow_datasets.core.download import downloader

    def refuse(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(downloader._Downloader, "download", refuse)


FILES = {
    "caltech_birds2011": ["CUB_200_2011.tgz", "segmentations.tgz"],
    "oxford_iiit_pet": ["images.tar.gz", "annotations.tar.gz"],
    "stanford_dogs": ["images.tar", "lists.tar", "annotation.tar"],
}


@pytest.mark.parametrize("name", data.TFDS_NAMES)
def test_without_network_it_is_said_which_file_goes_where(name, tmp_path, no_network):
    with pytest.raises(UserError) as caught:
        data.load(name, 32, 4, data_dir=tmp_path)
    message = str(caught.value)
    assert message.startswith(f"--dataset_name {name}: not prepared in {tmp_path}") and "\n" not in message
    assert "no route to host" in message and f"into {tmp_path}/downloads/manual: " in message
    for file in FILES[name]:
        assert re.search(rf"\b{re.escape(file)} from https?://", message), file


def test_a_file_put_there_by_hand_is_taken_and_a_wrong_one_refused(tmp_path, no_network):
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    for file in FILES["oxford_iiit_pet"]:
        (manual / file).write_bytes(b"not what was published")
    with pytest.raises(UserError, match=r"--dataset_name oxford_iiit_pet: .*(checksum|Checksum|wrong).*images.tar.gz"):
        data.load("oxford_iiit_pet", 32, 4, data_dir=tmp_path)
