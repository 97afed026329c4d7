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
    # Classes alone on one board, on two with photos of other kinds, and a board without images.
    features[150:] += 5
    half = np.arange(len(labels)) < 150
    parts = [labels == 0, (labels == 1) & half, (labels > 0) & ~half, (labels > 1) & half, labels > 9]
    is_held = held_back(labels)
    of_parts = [FeatureSums.of(features[part & ~is_held], labels[part & ~is_held], 5) for part in parts]
    heads = FeatureSums.together(of_parts).heads(SHRINKAGES)
    each = [held_losses(heads, features[part & is_held], labels[part & is_held]) for part in parts[:-1]]
    losses = np.sum(each, axis=0)
    whole = [FeatureSums.of(features[part], labels[part], 5) for part in parts]
    head, expected = FeatureSums.together(whole).head(*chosen(losses)), fit_head(features, labels, 5)
    np.testing.assert_allclose(head.kernel, expected.kernel, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(head.bias, expected.bias, rtol=1e-3)
    assert head.bias[4] == NO_IMAGES
