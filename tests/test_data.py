"""Data sets: what reaches the network, in which order, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import data
from utils import UserError

WEBP = b"RIFF\x24\x00\x00\x00WEBPVP8 " + bytes(24)


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
    assert data.count_classes("image_folder", folder) == 2
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
    with pytest.raises(UserError, match="no folder 'train'"):
        data.load("image_folder", 16, 2, data_dir=tmp_path / "train")
    with pytest.raises(UserError, match=r"--data_dir .*/nowhere: there is no such folder with train/<class>/"):
        data.load("image_folder", 16, 2, data_dir=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"--data_dir .*\.jpg: is a file; it must be a folder"):
        data.load("image_folder", 16, 2, data_dir=folder / "train" / "red" / "0.jpg")
    with pytest.raises(UserError, match=r"batch_size 11.*only 10 training images"):
        data.load("image_folder", 16, 11, data_dir=folder)
    with pytest.raises(UserError, match=r"num_classes 1: .* has 2 classes"):
        data.load("image_folder", 16, 2, data_dir=folder, num_classes=1)
    (folder / "test" / "green").mkdir()
    with pytest.raises(UserError, match="class 'green' is not among"):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "test" / "amber").mkdir()
    with pytest.raises(UserError, match="classes 'amber', 'green' are not among"):
        data.load("image_folder", 16, 2, data_dir=folder)


def test_a_class_without_training_images_is_refused_and_one_without_test_images_said(folder, capsys):
    for path in (folder / "test" / "red").iterdir():
        path.unlink()
    assert data.load("image_folder", 16, 2, data_dir=folder).test_count == 2
    assert re.search(r"warning: .*/test has no images of class 'red': accuracy", capsys.readouterr().out)
    (folder / "train" / "red" / "more").mkdir()
    for path in (folder / "train" / "red").glob("*.*"):
        path.rename(folder / "train" / "red" / "more" / path.name)  # too deep to be found
    with pytest.raises(UserError, match=r"/train: has no images of class 'red', which cannot be learned so"):
        data.load("image_folder", 16, 2, data_dir=folder)
    for path in folder.glob("train/blue/*.*"):
        path.unlink()
    with pytest.raises(UserError, match=r"/train: holds no images \(\.jpg, "):
        data.load("image_folder", 16, 2, data_dir=folder)


def test_a_split_without_images_is_refused(folder):
    for path in folder.glob("test/*/*"):
        path.unlink()
    with pytest.raises(UserError, match=r"/test: holds no images \(\.jpg, "):
        data.load("image_folder", 16, 2, data_dir=folder)
    for name in ("blue", "red"):
        (folder / "test" / name).rmdir()
    with pytest.raises(UserError, match=r"/test: holds no images \(\.jpg, "):
        data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "test").rmdir()
    with pytest.raises(UserError, match="has neither 'test' nor 'val'"):
        data.load("image_folder", 16, 2, data_dir=folder)


@pytest.mark.parametrize("ask", [data.count_classes, lambda name, where: data.load(name, 16, 2, data_dir=where)])
def test_one_class_or_none_is_refused(ask, folder):
    (folder / "train" / "red").rename(folder / "red")
    with pytest.raises(UserError, match=r"/train: has one class only, 'blue'; there must be two"):
        ask("image_folder", folder)
    (folder / "train" / "blue").rename(folder / "train" / ".blue")
    with pytest.raises(UserError, match=r"/train: holds no folders"):
        ask("image_folder", folder)


def test_what_is_no_image_by_its_name_is_passed_over_and_said(folder, capsys):
    where = folder / "train" / "red"
    for name in ("a.webp", "b.WEBP", "notes", "._0.jpg", ".DS_Store"):
        (where / name).write_bytes(b"anything")
    (where / "folder.jpg").mkdir()
    assert data.load("image_folder", 16, 2, data_dir=folder).train_count == 10
    assert re.search(r"passed over in .*/train, not being .*: 2 \.webp, 1 without ending\n", capsys.readouterr().out), (
        "hidden files and folders are not worth a word"
    )


def test_the_ending_need_not_be_that_of_the_kind_of_image(folder):
    pixels = np.full((20, 30, 3), 200, np.uint8)
    for name, encoded in (("png.jpg", tf.io.encode_png(pixels)), ("jpg.gif", tf.io.encode_jpeg(pixels))):
        tf.io.write_file(str(folder / "train" / "red" / name), encoded)
    images = data.load("image_folder", 16, 2, data_dir=folder)
    assert len(labels_of(images.train(0))) == images.train_count == 12


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
    "text": (lambda path: path.write_text("<html>not found</html>"), "is no JPEG, PNG, GIF or BMP, whatever its name"),
    "gone": (lambda path: path.symlink_to("nowhere.jpg"), "cannot be read: No such file or directory"),
}
BROKEN_INSIDE = {
    "truncated.jpg": truncated,
    "truncated.png": truncated,
    "cut.jpg": lambda path: path.write_bytes(b"\xff\xd8\xff\xe0"),
    "cut.bmp": lambda path: path.write_bytes(b"BM" + bytes(10)),
    "no.gif": lambda path: path.write_bytes(b"GIF89a" + bytes(20)),
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
def test_an_image_that_cannot_be_decoded_is_named_where_it_is_met(name, split, folder):
    broken = folder / split / "red" / name
    BROKEN_INSIDE[name](broken)
    images = data.load("image_folder", 16, 2, data_dir=folder)
    batches = images.train(1) if split == "train" else images.test()
    message = f"{re.escape(str(broken))}: cannot be read as an image: [^{{\\[]+; mend or remove it, or .*--skip_broken"
    with pytest.raises(UserError, match=message):
        list(batches)
    if split == "train":
        with pytest.raises(UserError, match=message):
            for index in range(100):
                images.probe(index)
        with pytest.raises(UserError, match=message):
            list(batches.take(images.steps_per_epoch))


def test_the_batch_before_a_broken_image_is_still_given(folder):
    truncated(folder / "test" / "red" / "0.jpg")  # the third of the test images
    batches = iter(data.load("image_folder", 16, 2, data_dir=folder).test())
    assert next(batches)[1].numpy().tolist() == [0, 0]
    with pytest.raises(UserError, match=r"test/red/0\.jpg: "):
        next(batches)


def test_an_image_that_vanishes_while_training_is_named(folder):
    images = data.load("image_folder", 16, 2, data_dir=folder)
    (folder / "train" / "red" / "3.png").unlink()
    with pytest.raises(UserError, match=r"/train/red/3\.png: cannot be read as an image: No such file"):
        list(images.train(0))


def test_other_errors_of_the_pipeline_are_not_called_broken_images(folder, monkeypatch):
    resize = tf.image.resize
    monkeypatch.setattr(
        tf.image,
        "resize",
        lambda images, size: tf.debugging.check_numerics(resize(images, size) * np.nan, "our mistake"),
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="our mistake"):
        list(data.load("image_folder", 16, 2, data_dir=folder).train(0))


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
    assert (images.train_count, images.test_count, images.skipped_images) == (9, 4, 9)
    assert images.steps_per_epoch == 4
    assert len(labels_of(images.train(0))) == 8 and len(labels_of(images.test())) == 4
    said = capsys.readouterr().out
    assert re.search(r"left out as broken: 9 of 22 images; the first: .*/train/blue/0\.jpg: cannot be read as", said)
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
    with pytest.raises(UserError, match="no images of class 'red'"):
        data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)
    for path in folder.glob("test/*/*"):
        path.write_bytes(b"")
    for path in folder.glob("train/red/*"):
        tf.io.write_file(str(path), tf.io.encode_png(np.zeros((9, 9, 3), np.uint8)))
    with pytest.raises(UserError, match=r"/test: holds no images"):
        data.load("image_folder", 16, 2, data_dir=folder, skip_broken=True)


def test_webp_is_refused_where_tensorflow_cannot_read_it(folder, monkeypatch):
    (folder / "train" / "red" / "9.jpg").write_bytes(WEBP)
    monkeypatch.delattr(tf.io, "decode_webp", raising=False)
    with pytest.raises(UserError, match=r"/train/red/9\.jpg: is WebP or JPEG XL, which this TensorFlow does not read"):
        data.load("image_folder", 16, 2, data_dir=folder)


def test_a_broken_image_ends_main_in_one_line_that_names_it(folder):
    """The whole way: also the last line of what C libraries and progress bars write to stderr is ours."""
    truncated(folder / "train" / "red" / "1.png")
    root = Path(__file__).resolve().parent.parent
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


@pytest.mark.parametrize("name", data.TFDS_CLASSES)
def test_tfds_names_without_network_say_what_to_do(name, tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    def no_network(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_network)
    with pytest.raises(UserError, match=f"--dataset_name {name}: .*cannot be downloaded .no route to host.*--data_dir"):
        data.load(name, 32, 4, data_dir=tmp_path)


def test_tfds_names_load_through_the_same_function(tmp_path, monkeypatch):
    """A data set written by TFDS itself, with a feature that must not be decoded, stands in for the real one."""
    import tensorflow_datasets as tfds

    class TinyPets(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            breeds = [f"breed {k}" for k in range(37)]
            features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(names=breeds)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(8), "test": self._generate_examples(5)}

        def _generate_examples(self, count=0):
            for i in range(count):
                yield i, {"image": np.full((20 + i, 10, 3), 30 * i, np.uint8), "label": i}

    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: TinyPets(data_dir=data_dir))
    pets = data.load("oxford_iiit_pet", 16, 4, data_dir=tmp_path)
    assert (pets.num_classes, pets.train_count, pets.test_count) == (37, 8, 5)
    pairs = [pair for images, labels in pets.train(0) for pair in zip(labels.numpy(), images.numpy(), strict=True)]
    seen = {int(label): image.mean() for label, image in pairs}
    assert sorted(seen) == list(range(8))
    assert all(abs(mean - 30 * label) < 3 for label, mean in seen.items())
    assert len(labels_of(pets.test())) == 5
    assert pets.class_names[:2] == ("breed 0", "breed 1") and len(pets.class_names) == 37
