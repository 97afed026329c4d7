"""Batches: their content, their order, and where decoded images are kept."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from small_images import digests_of, labels_of, load_photos, pairs, write_noise, write_red_and_blue

import data
from elastic_trainer.settings import Settings


def digits_of(**more):
    """Settings of the digits; none is mirrored."""
    return Settings(**{"dataset_name": "digits", "augment": "none", **more})


@pytest.fixture
def folder(tmp_path):
    return write_red_and_blue(tmp_path)


def first_images(batches):
    return next(iter(batches)).inputs.numpy()


def test_digits_are_split_in_half_by_class_and_become_rgb():
    digits = data.load(digits_of(input_size=32, batch_size=16))
    assert (digits.num_classes, digits.train_count, digits.test_count) == (10, 898, 899)
    assert digits.class_names == tuple("0123456789")
    images, labels = next(iter(pairs(digits.train(0))))
    assert images.shape == (16, 32, 32, 3) and images.dtype == tf.float32 and labels.dtype == tf.int32
    assert float(tf.reduce_min(images)) >= 0 and 200 < float(tf.reduce_max(images)) <= 255
    np.testing.assert_array_equal(images[..., 0], images[..., 1])
    tested = labels_of(digits.test())
    assert len(tested) == 899
    assert np.ptp(np.bincount(tested)) <= 5
    other_seed = data.load(digits_of(input_size=32, batch_size=16, seed=5))
    np.testing.assert_array_equal(labels_of(other_seed.test()), tested)


def test_guessing_loss_is_the_cross_entropy_of_the_classes_shares():
    digits = data.load(digits_of(input_size=8, batch_size=4))
    shares = np.bincount(labels_of(digits.train(0)), minlength=10) / (4 * digits.steps_per_epoch)
    assert digits.guessing_loss == pytest.approx(-sum(share * np.log(share) for share in shares), abs=1e-3)
    assert digits.guessing_loss < np.log(10)


def test_importance_batches_differ_by_index_and_from_the_epochs():
    digits = data.load(digits_of(input_size=8, batch_size=16))
    batches = [digits.importance_batches(index)[0].inputs.numpy() for index in (0, 1, 0)]
    assert batches[0].shape == (16, 8, 8, 3)
    assert (batches[0] != batches[1]).any()
    np.testing.assert_array_equal(batches[0], batches[2])
    assert (batches[0] != first_images(digits.train(0))).any()


def test_images_in_a_file_give_the_same_batches_as_images_in_memory(folder, tmp_path):
    in_memory = load_photos(folder, 16, 2)
    mapped = load_photos(folder, 16, 2, logdir=tmp_path / "logs", kept_mb=0)
    assert (tmp_path / "logs" / "images").is_dir()
    for one, other in ((in_memory.train(1), mapped.train(1)), (in_memory.test(), mapped.test())):
        for (images, labels), (same_images, same_labels) in zip(pairs(one), pairs(other), strict=True):
            np.testing.assert_array_equal(images, same_images)
            np.testing.assert_array_equal(labels, same_labels)


def test_the_record_stays_where_the_folder_moves_and_changes_with_an_image(folder, tmp_path):
    def recorded(place, **more):
        return load_photos(place, 16, 2, **more).record()

    moved = tmp_path / "moved"
    for split in ("train", "test"):
        shutil.copytree(folder / split, moved / split)
    before = recorded(folder)
    assert before == recorded(moved) and before["training_images"].startswith("10, digest ")
    colour = np.full((20, 30, 3), 7, np.uint8)
    Image.fromarray(colour).save(moved / "train" / "red" / "1.png")
    after = recorded(moved)
    assert after["training_images"] != before["training_images"] and after["test_images"] == before["test_images"]
    (moved / "train" / "red" / "1.png").write_bytes(b"")
    skipped = recorded(moved)
    (moved / "train" / "red" / "1.png").unlink()
    assert skipped == recorded(moved) != after, "an image that is left out is as if it did not exist"


@pytest.mark.parametrize("memory_mb", [1e3, 0])
def test_test_images_that_are_left_out_are_in_no_batch(tmp_path, memory_mb):
    photos = write_noise(tmp_path / "photos")
    images = load_photos(photos, 12, 2, logdir=tmp_path / "logs", kept_mb=memory_mb)
    before = np.concatenate([batch.inputs for batch in images.test()])
    known = [*digests_of(photos, "test/ant/1.png"), *digests_of(photos, "test/cat/0.png")]
    record = images.record()
    assert images.leave_out_of_test(np.array([*known, 7], np.uint64)) == 2
    assert images.test_count == 7
    np.testing.assert_array_equal(
        np.concatenate([batch.inputs for batch in images.test()]), before[[0, 2, 3, 4, 5, 7, 8]]
    )
    assert labels_of(images.test()).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert images.leave_out_of_test(np.array(known, np.uint64)) == 0
    assert images.record()["test_images"] != record["test_images"]
