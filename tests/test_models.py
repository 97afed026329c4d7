"""Networks: frozen batch-norm statistics, weights from files, clear refusals."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import models
import options
from optimizers import make_optimizer
from training_step import TrainStep
from utils import UserError

SHARED_WEIGHTS = (
    Path(__file__).resolve().parents[2]
    / "shared"
    / "weights"
    / "mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_224_no_top.h5"
)


def plain_backbone(name):
    """The Keras network with moving statistics as far from their start as training would take them."""
    kinds = {"mobilenetv2": keras.applications.MobileNetV2, "resnet50": keras.applications.ResNet50}
    extra = {"alpha": 0.35} if name == "mobilenetv2" else {}
    backbone = kinds[name](input_shape=(32, 32, 3), include_top=False, weights=None, **extra)
    rng = np.random.default_rng(0)
    for variable in backbone.variables:
        if variable.name == "moving_mean":
            variable.assign(rng.normal(0, 0.1, variable.shape))
        if variable.name == "moving_variance":
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return backbone


def statistics_of(model):
    return [v.numpy() for v in model.variables if v.name in ("moving_mean", "moving_variance")]


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet50"])
def test_frozen_network_equals_the_plain_one_in_inference_even_when_called_for_training(name):
    plain = plain_backbone(name)
    frozen = keras.models.clone_model(plain)
    frozen.set_weights(plain.get_weights())
    models.freeze_batch_norm_statistics(frozen)
    images = tf.random.uniform((2, 32, 32, 3), -1, 1, seed=0)
    expected = plain(images, training=False).numpy()
    scale = np.abs(expected).max()
    for training in (False, True):
        inner = frozen(images, training=training).numpy()
        outer = keras.Sequential([frozen])(images, training=training).numpy()
        np.testing.assert_allclose(inner, expected, atol=1e-4 * scale)
        np.testing.assert_allclose(outer, expected, atol=1e-4 * scale)
    assert np.abs(plain(images, training=True).numpy() - expected).max() > 1e-2 * scale


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet50"])
def test_batch_norm_statistics_never_move(name):
    model = models.build_model(name, 32, 10, alpha=0.35)
    before = statistics_of(model)
    assert len(before) > 50
    images, labels = tf.random.uniform((4, 32, 32, 3), 0, 255, seed=0), tf.constant([0, 1, 2, 3])
    model(images, training=True)
    keras.Sequential([model])(images, training=True)
    optimizer = make_optimizer("sgd", 1e-2, 5e-4, 10)
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, optimizer, 4)
    for _ in range(3):
        step(images, labels)
    for old, new in zip(before, statistics_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_frozen_batch_norm_trains_gamma_and_beta_as_the_plain_one_does_in_inference():
    x = tf.random.normal((2, 4, 4, 3), seed=0)
    plain = keras.layers.BatchNormalization()
    plain.build(x.shape)
    plain.moving_mean.assign([0.1, 0.2, 0.3])
    plain.moving_variance.assign([0.5, 1.0, 2.0])
    for other in ({}, {"scale": False}, {"center": False}):
        reference = keras.layers.BatchNormalization(**other)
        frozen = models.FrozenBatchNormalization(**other)
        gradients = []
        for layer, training in ((reference, False), (frozen, True)):
            layer.build(x.shape)
            layer.moving_mean.assign(plain.moving_mean)
            layer.moving_variance.assign(plain.moving_variance)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(layer(x, training=training)))
            gradients.append(tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)]))
        for expected, got in zip(*gradients, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_frozen_batch_norm_takes_other_shapes():
    layer = models.FrozenBatchNormalization()
    x = tf.random.normal((5, 3), mean=4.0, seed=0)
    np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1 + layer.epsilon), rtol=1e-5)


@pytest.mark.parametrize("name", options.MODEL_NAMES)
def test_every_network_has_its_parts_and_survives_saving(name, tmp_path):
    model = models.build_model(name, 32, 7, alpha=0.35, augmentation="flip_rotation")
    kinds = [type(layer) for layer in model.layers]
    for kind in (keras.layers.RandomFlip, keras.layers.RandomRotation, keras.layers.Rescaling, keras.layers.Dropout):
        assert kind in kinds
    assert model.get_layer("dropout").rate == 0.2
    images = tf.random.uniform((2, 32, 32, 3), 0, 255, seed=0)
    logits = model(images, training=False).numpy()
    assert logits.shape == (2, 7)
    names = models.tensor_names(model)
    assert len(set(names)) == len(names) == len(model.trainable_variables)
    head = models.head_mask(model)
    assert [names[k] for k in np.flatnonzero(head)] == ["head/kernel", "head/bias"]
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(copy(images, training=False), logits, rtol=1e-4, atol=1e-5)


def test_normalisation_and_bias_mask():
    model = models.build_model("mobilenetv2", 32, 5, alpha=0.35)
    mask = models.normalisation_and_bias_mask(model)
    for name, trains in zip(models.tensor_names(model), mask, strict=True):
        assert trains == (name.endswith(("/gamma", "/beta", "/bias")) or name.startswith("head/"))


def test_the_committed_weights_load_and_are_small():
    assert options.GLYPH_WEIGHTS.stat().st_size < 3e6
    model = models.build_model("mobilenetv2", 64, 10, str(options.GLYPH_WEIGHTS), alpha=0.35)
    other = models.build_model("mobilenetv2", 64, 10, "none", alpha=0.35)
    assert not np.allclose(model.get_weights()[0], other.get_weights()[0])


def test_imagenet_weights_in_keras_own_layout_load():
    if not SHARED_WEIGHTS.is_file():
        pytest.skip("../shared/weights is not here")
    model = models.build_model("mobilenetv2", 64, 10, str(SHARED_WEIGHTS), alpha=0.35)
    variance = next(v for v in model.variables if v.name == "moving_variance")
    assert not np.allclose(variance.numpy(), 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mobilenetv2", 64, 10, "no/such.h5"), "no such file"),
        (("mobilenetv2", 64, 10, __file__), "must end in .h5"),
        (("mobilenetv2", 64, 10, str(options.GLYPH_WEIGHTS), 1.0), "does not fit mobilenetv2"),
        (("resnet50", 64, 10, str(options.GLYPH_WEIGHTS)), "does not fit resnet50"),
        (("vit", 40, 10), "multiple of 16"),
        (("vgg16", 16, 10), "at least 32"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        models.build_model(*arguments)


@pytest.mark.parametrize("name", ["mobilenetv2", "vit"])
def test_a_failing_download_of_imagenet_weights_says_what_to_do(name, monkeypatch):
    def no_network(*_, **__):
        raise Exception("URL fetch failure")

    monkeypatch.setattr("keras.src.utils.file_utils.get_file", no_network)  # what keras.applications calls
    monkeypatch.setattr(keras.utils, "get_file", no_network)  # what vit-keras calls
    with pytest.raises(UserError, match=r"--weights imagenet: the weights of .* cannot be downloaded"):
        models.build_model(name, 64, 10, "imagenet")
