"""The closed-form head is the linear discriminant of what its layer reads, also by sums of many boards."""

import keras
import numpy as np
import pytest
from conftest import CLASSES, SIZE, make_small_data, make_small_model
from scipy.stats import multivariate_normal
from small_networks import values

from elastic_trainer.engine import feature_sums
from elastic_trainer.engine.closed_form_head import closed_form_head
from elastic_trainer.engine.feature_sums import (
    NO_IMAGES,
    SHRINKAGES,
    FeatureSums,
    chosen,
    fit_head,
    held_back,
    held_losses,
)
from elastic_trainer.engine.task import ImageClassification


def made_up(count, classes=3, width=5, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    mixing = rng.normal(size=(width, width))
    centres = rng.normal(0, 2, (classes, width))
    return (centres[labels] + rng.normal(size=(count, width)) @ mixing).astype(np.float32), labels


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_it_is_the_posterior_of_normal_classes_with_one_shrunk_covariance(monkeypatch):
    monkeypatch.setattr(feature_sums, "SHRINKAGES", (0.2,))
    monkeypatch.setattr(feature_sums, "SCALES", np.array([1.0]))
    features, labels = made_up(60)
    means = np.array([features[labels == c].mean(axis=0) for c in range(3)])
    within = features - means[labels]
    covariance = within.T @ within / len(labels)
    shrunk = 0.8 * covariance + 0.2 * np.trace(covariance) / 5 * np.eye(5)
    densities = np.array([multivariate_normal(mean, shrunk).pdf(features) for mean in means]).T
    expected = densities / densities.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(softmax(fit_head(features, labels, 3).logits(features)), expected, atol=1e-4)


def test_the_scale_fits_held_back_images_and_noise_is_not_trusted():
    features, _ = made_up(200)
    labels = np.random.default_rng(1).integers(0, 4, 200)
    probabilities = softmax(fit_head(features, labels, 4).logits(features))
    assert probabilities.max() < 0.6, "the features say nothing about these labels"
    features, labels = made_up(200)
    assert (fit_head(features, labels, 3).logits(features).argmax(axis=1) == labels).mean() > 0.9


@pytest.mark.parametrize("count", [3, 6, 40])
def test_few_images_and_classes_without_any_are_possible(count):
    features, labels = made_up(count)
    logits = fit_head(features, labels, 5).logits(features)
    assert np.isfinite(logits).all() and (logits.argmax(axis=1) < 3).all()
    apart = features + 100 * np.eye(3, 5, dtype=np.float32)[labels]
    assert np.argmax(fit_head(apart, labels, 5).logits(apart.mean(axis=0))) < 3, "far from all classes"


def test_one_image_of_each_class_gives_a_head_of_usual_size():
    features, labels = made_up(3)
    head = fit_head(features, labels, 3)
    assert np.abs(head.kernel).max() < 10
    assert (head.logits(features).argmax(axis=1) == labels).all()


def test_sums_of_uneven_parts_give_the_head_of_all_images():
    features, labels = made_up(300, classes=4, width=12)
    features += 10
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


def test_it_reads_what_the_last_layer_reads_and_leaves_the_network_as_it_is():
    model, data = make_small_model(), make_small_data()
    before = values(model.variables)
    found = closed_form_head(ImageClassification(model), data)
    assert found is not None and found.layer is model.layers[-1]
    for was, now in zip(before, values(model.variables), strict=True):
        np.testing.assert_array_equal(was, now)
    below = keras.Model(model.inputs, found.layer.input)
    features = below(data.train_images.pixels.astype(np.float32), training=False).numpy()
    expected = fit_head(features, data.train_images.labels, CLASSES)
    np.testing.assert_allclose(found.head.kernel, expected.kernel, rtol=1e-3, atol=1e-4)
    found.assign()
    logits = model(data.train_images.pixels.astype(np.float32), training=False).numpy()
    assert np.mean(logits.argmax(axis=1) == data.train_images.labels) == found.accuracy


@pytest.mark.parametrize("end", ["softmax", "activation", "twice", "no bias", "too wide", "huge features"])
def test_a_network_that_ends_otherwise_has_none(end, monkeypatch):
    if end == "too wide":
        monkeypatch.setattr("elastic_trainer.engine.closed_form_head.MAX_FEATURES", 5)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(6, 3)(inputs))
    activation = "relu" if end == "activation" else None
    last = keras.layers.Dense(CLASSES, activation, use_bias=end != "no bias")
    outputs = last(x * 1e25 if end == "huge features" else x)
    if end == "softmax":
        outputs = keras.layers.Softmax()(outputs)
    if end == "twice":
        outputs = outputs + last(2 * x)
    assert closed_form_head(ImageClassification(keras.Model(inputs, outputs)), make_small_data()) is None
