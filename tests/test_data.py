"""Data sets: what reaches the network, in which order, and what is refused."""

import numpy as np
import pytest
import tensorflow as tf

import data
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


def test_order_depends_on_seed_and_epoch_alone():
    first, again, other = (data.load("digits", 8, 16, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(labels_of(first.train(3)), labels_of(again.train(3)))
    assert (labels_of(first.train(3)) != labels_of(first.train(4))).any()
    assert (labels_of(first.train(3)) != labels_of(other.train(3))).any()
    assert len(labels_of(first.train(0))) == first.steps_per_epoch * 16


def test_each_probe_is_a_fresh_batch():
    digits = data.load("digits", 8, 16)
    probes = [digits.probe(index)[0].numpy() for index in (0, 1, 0)]
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
    with pytest.raises(UserError, match=r"batch_size 11.*only 10 training images"):
        data.load("image_folder", 16, 11, data_dir=folder)
    with pytest.raises(UserError, match=r"num_classes 1: .* has 2 classes"):
        data.load("image_folder", 16, 2, data_dir=folder, num_classes=1)
    (folder / "test" / "green").mkdir()
    with pytest.raises(UserError, match="class 'green' is not among"):
        data.load("image_folder", 16, 2, data_dir=folder)


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
