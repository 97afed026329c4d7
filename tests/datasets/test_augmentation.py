"""Views of training images: their pixels, which of them an epoch shows, and when they are read."""

import threading

import keras
import numpy as np
import pytest

from elastic_trainer.datasets import augmentation
from elastic_trainer.datasets.augmentation import Augmentation, rotated
from elastic_trainer.datasets.batches import Order
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import Images

SIZE = 9


def some_pixels(count=40):
    return np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def image_data(augment, pixels=None, batch_size=4, seed=0):
    pixels = some_pixels() if pixels is None else pixels
    decoded = Images(pixels, np.zeros(len(pixels), np.int32))
    return ImageData("made up", ["one"], decoded, decoded, batch_size, seed, augment=augment)


def pictures(batches):
    """{row: the image} of batches."""
    return {row: image for batch in batches for row, image in zip(batch.order.rows, batch.inputs.numpy(), strict=True)}


def assert_same_pictures(some, others):
    assert some
    for row, image in some.items():
        np.testing.assert_array_equal(image, others[row])


def test_without_augmentation_every_image_has_one_view_as_it_is():
    data = image_data("none")
    assert data.view_count == 1
    for batch in data.train(3):
        np.testing.assert_array_equal(batch.order.views, 0)
        np.testing.assert_array_equal(batch.inputs, some_pixels()[batch.order.rows].astype(np.float32))


def test_view_1_of_flip_is_the_image_mirrored_left_right():
    pixels, rows, views = some_pixels(), np.array([7, 7, 0, 39]), np.array([0, 1, 1, 0])
    data = image_data("flip")
    assert data.view_count == 2
    images = data.training_inputs(Order(rows, views))
    assert images.dtype == "float32"
    for image, row, view in zip(images.numpy(), rows, views, strict=True):
        np.testing.assert_array_equal(image, pixels[row][:, ::-1] if view else pixels[row])


def test_an_epoch_mirrors_about_half_of_the_images_and_each_epoch_others():
    views = Augmentation("flip", 0, 1000)
    epochs = np.stack([views.views(epoch) for epoch in range(8)])
    assert set(np.unique(epochs)) == {0, 1}
    assert (np.abs(epochs.mean(axis=1) - 0.5) < 0.08).all()
    agreement = (epochs[1:] == epochs[:-1]).mean(axis=1)
    assert (np.abs(agreement - 0.5) < 0.08).all()
    assert (views.views(0) != Augmentation("flip", 1, 1000).views(0)).mean() > 0.4


def test_a_run_of_flip_crop_shows_more_views_the_longer_it_is():
    views = Augmentation("flip_crop", 0, 1000)
    for epoch, count in ((0, 2), (7, 2), (8, 3), (9, 3), (10, 4), (18, 8), (1000, 8)):
        shown = np.bincount(views.views(epoch)) / 1000
        assert len(shown) == count and (np.abs(shown - 1 / count) < 0.08).all()


def test_later_views_of_flip_crop_are_other_crops_of_each_image_and_every_second_is_mirrored():
    """Of images whose pixels hold their own place."""
    places = np.stack([*np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij"), np.zeros((SIZE, SIZE))], axis=2)
    data, rows = image_data("flip_crop", np.tile(places, (40, 1, 1, 1)).astype(np.uint8)), np.arange(40)
    corners = []
    for view in (1, 2, 3, 6):
        shown = data.training_inputs(Order(rows, np.full(40, view))).numpy()
        assert shown.shape == (40, SIZE, SIZE, 3) and shown.min() >= 0 and shown.max() <= SIZE - 1
        down, right = (np.diff(shown[..., axis], axis=1 + axis) for axis in (0, 1))
        assert (down > 0).all() and (right < 0 if view % 2 else right > 0).all()
        np.testing.assert_allclose(down.mean(axis=(1, 2)), np.abs(right).mean(axis=(1, 2)), rtol=1e-4)
        assert view == 1 or (0.5 <= down.mean(axis=(1, 2)).min() < 0.65 and down.max() < 1 + 1e-5)
        corners.append(shown[:, 0, 0])
    assert (corners[1] != corners[3]).any(axis=1).all() and len(np.unique(corners[1], axis=0)) == 40


@pytest.mark.parametrize("augment", ["flip", "flip_crop", "flip_rotate"])
def test_a_picture_depends_on_seed_epoch_and_image_alone(augment):
    data = image_data(augment)
    complete = pictures(data.train(2))
    assert len(complete) == 40
    assert_same_pictures(pictures(data.train(2, skip=4, count=3)), complete)  # as after a resume
    assert_same_pictures(pictures(image_data(augment, batch_size=7).train(2)), complete)
    for others in (pictures(data.train(3)), pictures(image_data(augment, seed=1).train(2))):
        assert sum((others[row] != image).any() for row, image in complete.items()) > 10
    for batch in data.train(2):
        np.testing.assert_array_equal(data.training_inputs(batch.order), batch.inputs)


@pytest.mark.parametrize("size", [8, 9])
def test_rotation_is_that_of_keras_for_each_image(size):
    images = np.random.default_rng(0).uniform(0, 255, (5, size, size, 3)).astype(np.float32)
    turns = np.array([-0.2, -0.07, 0.0, 0.13, 0.2])
    for image, turn, result in zip(images, turns, rotated(keras.ops.convert_to_tensor(images), turns), strict=True):
        layer = keras.layers.RandomRotation((turn, turn))  # a range of one angle
        np.testing.assert_allclose(result, layer(image[None], training=True)[0], atol=0.01)
        assert turn == 0 or np.abs(result - image).max() > 50


def test_a_view_of_flip_rotate_is_mirrored_or_not_and_rotated_by_up_to_a_fifth_of_a_turn(monkeypatch):
    pixels, angles = some_pixels(400), []

    def record(images, turns):
        angles.append(turns)
        return images

    monkeypatch.setattr(augmentation, "rotated", record)
    rows = np.arange(400)
    images = image_data("flip_rotate", pixels).training_inputs(Order(rows, rows % 5)).numpy()
    mirrored = (images == pixels[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (mirrored | (images == pixels).all(axis=(1, 2, 3))).all()
    assert 0.4 < mirrored.mean() < 0.6
    [turns] = angles
    assert -0.2 <= turns.min() < -0.18 and 0.18 < turns.max() <= 0.2 and np.abs(turns.mean()) < 0.02
    assert len(np.unique(turns)) == 400


def test_importance_batches_are_augmented_and_test_images_are_not():
    pixels = np.zeros((40, SIZE, SIZE, 3), np.uint8)
    pixels[:, :, 0] = 255  # a white line on the left
    data = image_data("flip", pixels)
    drawn = np.concatenate([batch.inputs.numpy() for batch in data.importance_batches(0, 10)])
    assert 0.2 < (drawn[:, 0, 0, 0] == 0).mean() < 0.8
    tested = np.concatenate([batch.inputs.numpy() for batch in data.test()])
    np.testing.assert_array_equal(tested, pixels)


class Watched(np.memmap):
    """Images in a file; `readers` holds the thread of each reading."""

    readers: list[int]

    def __getitem__(self, rows):
        self.readers.append(threading.get_ident())
        return np.asarray(super().__getitem__(rows)).view(np.ndarray)


@pytest.fixture
def watched(tmp_path):
    pixels = some_pixels()
    pixels.tofile(tmp_path / "pixels")
    mapped = np.memmap(tmp_path / "pixels", np.uint8, "r", shape=pixels.shape).view(Watched)
    mapped.readers = []
    return mapped


def test_images_that_nobody_asks_for_are_not_read(watched):
    batches = [*image_data("flip", watched).train(0)]
    assert len(batches) == 10 and [len(batch) for batch in batches] == [4] * 10
    assert not watched.readers
    _ = batches[3].inputs, batches[3].inputs
    assert len(watched.readers) == 1


def test_images_in_a_file_are_read_in_the_background_once_they_are_asked_for(watched):
    batches = image_data("flip", watched).train(0)
    for _ in range(4):
        _ = next(batches).inputs
    next(batches), next(batches), next(batches)
    batches.close()  # waits for the reader
    here = threading.get_ident()
    assert watched.readers.count(here) == 2, "the first two, before it is known that images are asked for"
    assert len(watched.readers) == 6, "two more were on their way when the images were no longer asked for"
