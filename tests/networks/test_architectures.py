"""Networks by name: their parts, their preprocessing, their logits compared with plain Keras, and refused sizes."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import NEEDS_VIT, with_vit

import models
from elastic_trainer.cli.commands import parse_profiler
from elastic_trainer.networks.architectures import preprocess
from elastic_trainer.networks.tensors import head_mask, normalisation_and_bias_mask, tensor_names
from elastic_trainer.settings.network_names import GLYPH_WEIGHTS, KERAS_NETWORKS, MODEL_NAMES
from elastic_trainer.system.errors import UserError

pytestmark = pytest.mark.usefixtures("small_vit")


@pytest.mark.parametrize("name", with_vit(MODEL_NAMES))
def test_each_network_has_its_layers_and_loads_after_saving(name, tmp_path):
    model = models.build_model(name, 32, 7, alpha=0.35)
    kinds = [type(layer) for layer in model.layers]
    for kind in (keras.layers.Rescaling, keras.layers.Dropout):
        assert kind in kinds
    assert model.get_layer("dropout").rate == 0.2
    images = tf.random.uniform((2, 32, 32, 3), 0, 255, seed=0)
    logits = model(images, training=False).numpy()
    assert logits.shape == (2, 7)
    names = tensor_names(model)
    assert len(set(names)) == len(names) == len(model.trainable_variables)
    head = head_mask(model)
    assert [names[k] for k in np.flatnonzero(head)] == ["head/kernel", "head/bias"]
    for one, trains in zip(names, normalisation_and_bias_mask(model), strict=True):
        assert trains == (one.endswith(("/gamma", "/beta", "/bias")) or one.startswith("head/"))
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(copy(images, training=False), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mobilenetv2", 64, 10, "no/such.h5"), "No such file"),
        (("mobilenetv2", 64, 10, __file__), r"must be \.h5"),
        (("mobilenetv2", 64, 10, str(GLYPH_WEIGHTS), 1.0), "does not fit mobilenetv2"),
        (("resnet50", 64, 10, str(GLYPH_WEIGHTS)), "does not fit resnet50"),
        pytest.param(("vit", 40, 10), "--model_name vit: .*--input_size 40.* multiple", marks=NEEDS_VIT),
        (("vgg16", 16, 10), "--model_name vgg16: .*--input_size 16.* at least 32"),
        (("xception", 64, 10), "--model_name xception: .*--input_size 64.* at least 71"),
        (("mobilenetv2", 64, 10, "imagenet", 0.4), "--alpha 0.4 and --weights imagenet: .*alpha"),
    ],
)
def test_weights_and_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        models.build_model(*arguments)


def test_the_names_are_those_of_keras_applications():
    offered = {name for name in vars(keras.applications) if name[0].isupper()}
    assert set(KERAS_NETWORKS.values()) == offered
    parsed = parse_profiler(["--model_name", "EfficientNetB0", "--weights", "none"])
    assert parsed.model_name == "efficientnetb0"
    with pytest.raises(UserError, match=r"--model_name: .*did you mean 'efficientnetb0'"):
        parse_profiler(["--model_name", "eficientnetb0"])


MODULES = sorted({getattr(keras.applications, own).__module__: name for name, own in KERAS_NETWORKS.items()}.values())


@pytest.mark.parametrize("name", MODULES)
def test_preprocessing_is_that_of_keras_applications(name):
    images = np.random.default_rng(0).uniform(0, 255, (2, 5, 5, 3)).astype(np.float32)
    module = sys.modules[getattr(keras.applications, KERAS_NETWORKS[name]).__module__]
    inputs = keras.Input((5, 5, 3))
    ours = keras.Model(inputs, keras.layers.Identity()(preprocess(name, inputs)))
    np.testing.assert_allclose(ours(images), module.preprocess_input(images.copy()), rtol=1e-5, atol=1e-4)
    assert keras.config.floatx() == "float32"


@NEEDS_VIT
def test_preprocessing_of_vit_is_that_of_vit_keras():
    from vit_keras import vit

    images = np.random.default_rng(0).uniform(0, 255, (2, 5, 5, 3)).astype(np.float32)
    ours = preprocess("vit", images)
    np.testing.assert_allclose(ours, vit.preprocess_inputs(images.copy()), atol=1e-5)


@pytest.mark.parametrize("name", ["mobilenetv2", "efficientnetb0"])
def test_logits_are_those_of_the_plain_keras_network(name):
    """Compared with a network built by Keras' functions alone, with the same weights and images."""
    model = models.build_model(name, 32, 5)
    function = getattr(keras.applications, KERAS_NETWORKS[name])
    plain = function(input_shape=(32, 32, 3), include_top=False, weights=None, pooling="avg")
    backbone = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    rng = np.random.default_rng(0)
    for variable in backbone.variables:
        if variable.name == "moving_variance":
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    plain.set_weights(backbone.get_weights())
    images = rng.uniform(0, 255, (2, 32, 32, 3)).astype(np.float32)
    features = plain(sys.modules[function.__module__].preprocess_input(images.copy()), training=False)
    expected = model.get_layer("head")(features).numpy()
    np.testing.assert_allclose(model(images, training=False), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
