"""Whatever a model ends in, what trains are logits, as many as there are classes."""

import keras
import numpy as np
import pytest
import softmax_zoo
from small_networks import some_images

from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.saved_model import save_model

CLASSES, SIZE = 5, softmax_zoo.SIZE
SHAPE = (SIZE, SIZE, 3)


def probabilities_of(logits, of):
    activation = keras.ops.sigmoid if "sigmoid" in of.__name__ else keras.ops.softmax
    return np.array(activation(logits))


def made(of, classes=CLASSES):
    keras.utils.set_random_seed(0)
    model = of(classes)
    if not model.built:
        model(some_images(SIZE))
    return model


@pytest.mark.parametrize("of", [*softmax_zoo.REMOVED, *softmax_zoo.KEPT], ids=lambda of: of.__name__)
def test_logits_have_the_probabilities_and_the_weights_of_the_model_and_are_saved_as_plain_keras(of, tmp_path, capsys):
    model = made(of)
    expected, weights = np.array(model(some_images(SIZE))), [w.numpy() for w in model.weights]
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("my.keras: ")
    assert ("stripping the final" if of in softmax_zoo.REMOVED else "their logarithm is used") in line
    found = np.array(logits(some_images(SIZE)))
    assert (found < 0).any() and np.abs(found.sum(axis=1) - 1).max() > 1e-2
    np.testing.assert_allclose(probabilities_of(found, of), expected, atol=1e-5)
    for weight, before in zip(logits.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(weight, before)
    save_model(logits, tmp_path / "best.keras")
    classes = {"Subclassed": softmax_zoo.Subclassed}
    loaded = keras.models.load_model(tmp_path / "best.keras", custom_objects=classes, safe_mode=False)
    np.testing.assert_allclose(loaded(some_images(SIZE)), found, atol=1e-6)


@pytest.mark.parametrize("of", softmax_zoo.REMOVED, ids=lambda of: of.__name__)
def test_no_probabilities_are_left_where_the_activation_can_be_removed(of):
    """Confidence that float32 rounds to 1 keeps its gradient."""
    model = made(of)
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    head = [v for v in model.trainable_variables if v.path.endswith("last/bias") or v.name == "bias"][-1]
    head.assign([0, 200, 0, 0, -200])
    found = np.array(logits(some_images(SIZE)))
    assert found[:, 1].min() > 150 and found[:, 4].max() < -150


@pytest.mark.parametrize(
    "of", [softmax_zoo.layer, softmax_zoo.sequential, softmax_zoo.nested, softmax_zoo.nested_twice, softmax_zoo.sigmoid]
)
def test_the_last_dense_layer_is_replaced_for_other_classes_however_deeply_it_is_nested(of, capsys):
    logits = with_logits(made(of, 7), SHAPE, CLASSES, "my.keras")
    assert logits.output_shape == (None, CLASSES)
    assert "last layer last has 7 outputs; replaced by a new one for 5" in capsys.readouterr().out
    assert [v.shape[-1] for v in logits.trainable_variables] == [4, 4, CLASSES, CLASSES]


def nonnegative(classes):
    return softmax_zoo._model(classes, "relu")


@pytest.mark.parametrize("of", [softmax_zoo.plain, nonnegative], ids=lambda of: of.__name__)
def test_logits_are_not_taken_for_probabilities(of, capsys):
    model = made(of)
    assert with_logits(model, SHAPE, CLASSES, "my.keras") is model
    assert not capsys.readouterr().out


def test_an_activation_that_is_also_used_inside_stays(capsys):
    """Here the same layer gates the features: without its softmax they would be others."""
    inputs = keras.Input(SHAPE)
    x = softmax_zoo._features(inputs)
    softmax = keras.layers.Activation("softmax")
    x = keras.layers.Multiply()([x, softmax(x)])
    model = keras.Model(inputs, softmax(keras.layers.Dense(CLASSES)(x)))
    expected = np.array(model(some_images(SIZE)))
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    assert "stripping the final" in capsys.readouterr().out
    np.testing.assert_allclose(keras.ops.softmax(logits(some_images(SIZE))), expected, atol=1e-5)


@pytest.mark.parametrize("of", [softmax_zoo.nested, softmax_zoo.subclassed], ids=lambda of: of.__name__)
def test_probabilities_in_half_precision_are_found(of, half_precision, capsys):
    model = made(of)
    expected = np.array(keras.ops.cast(model(some_images(SIZE)), "float32"))
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    assert capsys.readouterr().out
    found = keras.ops.softmax(keras.ops.cast(logits(some_images(SIZE)), "float32"))
    np.testing.assert_allclose(found, expected, atol=1e-2)
