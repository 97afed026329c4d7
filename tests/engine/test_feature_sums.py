"""Sums of features of the parts of a data set give the head of all its images."""

import numpy as np

from elastic_trainer.engine.feature_sums import (
    NO_IMAGES,
    SHRINKAGES,
    FeatureSums,
    chosen,
    fit_head,
    held_back,
    held_losses,
)


def made_up(count=300, features=12, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes - 1, count)  # the last class has no images
    return (10 + 2 * rng.normal(size=(count, features)) + labels[:, None] ** 2).astype(np.float32), labels


def test_sums_of_uneven_parts_give_the_head_of_all_images():
    features, labels = made_up()
    parts = [labels == 0, labels == 1, labels > 1]  # each class on one board alone
    is_held = held_back(labels)
    of_parts = [FeatureSums.of(features[part & ~is_held], labels[part & ~is_held], 5) for part in parts]
    heads = FeatureSums.together(of_parts).heads(SHRINKAGES)
    each = [held_losses(heads, features[part & is_held], labels[part & is_held]) for part in parts]
    losses = np.sum(each, axis=0)
    whole = [FeatureSums.of(features[part], labels[part], 5) for part in parts]
    head, expected = FeatureSums.together(whole).head(*chosen(losses)), fit_head(features, labels, 5)
    np.testing.assert_allclose(head.kernel, expected.kernel, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(head.bias, expected.bias, rtol=1e-3)
    assert head.bias[4] == NO_IMAGES


def test_a_class_on_two_boards_counts_what_lies_between_their_means():
    features, labels = made_up(60, 4, 3)
    features[:30] += 5  # the boards see other photos of the same classes
    halves = [FeatureSums.of(features[part], labels[part], 3) for part in (slice(0, 30), slice(30, 60))]
    found, expected = FeatureSums.together(halves), FeatureSums.of(features, labels, 3)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_board_without_images_adds_nothing():
    features, labels = made_up(40, 4, 3)
    of_all = FeatureSums.of(features, labels, 3)
    nothing = FeatureSums.of(features[:0], labels[:0], 3)
    for one, other in zip(FeatureSums.together([of_all, nothing]), of_all, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
