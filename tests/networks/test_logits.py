"""Whatever a model ends in, what trains are logits, as many as there are classes."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers
from small_networks import some_images

from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.saved_model import save_model

CLASSES, SIZE = 5, 12
SHAPE = (SIZE, SIZE, 3)


def features(inputs):
    return layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, activation="relu")(layers.Rescaling(1 / 255)(inputs)))


def model_of(classes, activation, after=lambda x: x):
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, after(layers.Dense(classes, activation=activation, name="last")(features(inputs))))


def softmax(x):
    return keras.ops.softmax(x, axis=-1)


def sequential(*more):
    return keras.Sequential([keras.Input(SHAPE), *more])


def nested(model):
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, model(inputs))


class Subclassed(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.options = {"classes": classes}
        self.first, self.last = layers.Conv2D(4, 3), layers.Dense(classes, activation="softmax")

    def call(self, images):
        return self.last(keras.ops.mean(self.first(images / 255), axis=(1, 2)))

    def get_config(self):
        return self.options


def by_hand(x):
    """Exponentials over their sum, in the graph."""
    exponentials = keras.ops.exp(x)
    return exponentials / keras.ops.sum(exponentials, axis=-1, keepdims=True)


def mean_of_two(classes):
    """Two heads on the same features, whose probabilities are averaged."""
    inputs = keras.Input(SHAPE)
    x = features(inputs)
    heads = [layers.Dense(classes, activation="softmax")(x) for _ in range(2)]
    return keras.Model(inputs, layers.Average()(heads))


# The same small network with a softmax or sigmoid at its end, in each way that Keras allows.
REMOVED: dict[str, Callable[[int], keras.Model]] = {
    "activation": lambda classes: model_of(classes, "softmax"),
    "layer": lambda classes: model_of(classes, None, layers.Softmax()),
    "operation": lambda classes: model_of(classes, None, keras.ops.softmax),
    "function": lambda classes: model_of(classes, softmax),
    "lambda layer": lambda classes: model_of(classes, None, layers.Lambda(softmax)),
    "before linear": lambda classes: model_of(classes, "softmax", layers.Activation("linear", dtype="float32")),
    "before flatten": lambda classes: model_of(classes, None, lambda x: layers.Flatten()(layers.Softmax()(x))),
    "before arithmetic": lambda classes: model_of(
        classes, "softmax", lambda x: keras.ops.add(keras.ops.multiply(x, 1.0), 0.0)
    ),
    "sequential": lambda classes: sequential(
        *(layers.Rescaling(1 / 255), layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()),
        *(layers.Dense(classes, name="last"), layers.Softmax()),
    ),
    "nested": lambda classes: nested(REMOVED["layer"](classes)),
    "nested twice": lambda classes: sequential(REMOVED["nested"](classes), layers.Flatten()),
    "sigmoid": lambda classes: model_of(classes, "sigmoid"),
    "nested sigmoid": lambda classes: nested(REMOVED["sigmoid"](classes)),
}
KEPT = {
    "subclassed": Subclassed,
    "by hand": lambda classes: model_of(classes, None, by_hand),
    "mean of two": mean_of_two,
}


def made(kind, classes=CLASSES):
    keras.utils.set_random_seed(0)
    model = {**REMOVED, **KEPT}[kind](classes)
    if not model.built:
        model(some_images(SIZE))
    return model


@pytest.mark.parametrize("kind", [*REMOVED, *KEPT])
def test_logits_have_the_probabilities_and_the_weights_of_the_model_and_are_saved_as_plain_keras(
    kind, tmp_path, capsys
):
    model = made(kind)
    expected, weights = np.array(model(some_images(SIZE))), [w.numpy() for w in model.weights]
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("my.keras: ")
    assert ("stripping the final" if kind in REMOVED else "their logarithm is used") in line
    found = np.array(logits(some_images(SIZE)))
    assert (found < 0).any() and np.abs(found.sum(axis=1) - 1).max() > 1e-2
    activation = keras.ops.sigmoid if "sigmoid" in kind else keras.ops.softmax
    np.testing.assert_allclose(activation(found), expected, atol=1e-5)
    for weight, before in zip(logits.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(weight, before)
    save_model(logits, tmp_path / "best.keras")
    loaded = keras.models.load_model(
        tmp_path / "best.keras", custom_objects={"Subclassed": Subclassed}, safe_mode=False
    )
    np.testing.assert_allclose(loaded(some_images(SIZE)), found, atol=1e-6)
    if kind in REMOVED:  # confidence that float32 rounds to 1 keeps its gradient
        model.trainable_variables[-1].assign([0, 200, 0, 0, -200])
        found = np.array(logits(some_images(SIZE)))
        assert found[:, 1].min() > 150 and found[:, 4].max() < -150


@pytest.mark.parametrize("kind", ["layer", "sequential", "nested", "nested twice", "sigmoid"])
def test_the_last_dense_layer_is_replaced_for_other_classes_however_deeply_it_is_nested(kind, capsys):
    logits = with_logits(made(kind, 7), SHAPE, CLASSES, "my.keras")
    assert logits.output_shape == (None, CLASSES)
    assert "last layer last has 7 outputs; replaced by a new one for 5" in capsys.readouterr().out
    assert [v.shape[-1] for v in logits.trainable_variables] == [4, 4, CLASSES, CLASSES]


@pytest.mark.parametrize("activation", [None, "relu"])
def test_logits_are_not_taken_for_probabilities(activation, capsys):
    keras.utils.set_random_seed(0)
    model = model_of(CLASSES, activation)
    assert with_logits(model, SHAPE, CLASSES, "my.keras") is model
    assert not capsys.readouterr().out


def test_an_activation_that_is_also_used_inside_stays(capsys):
    """Here the same layer gates the features: without its softmax they would be others."""
    inputs = keras.Input(SHAPE)
    x = features(inputs)
    gate = layers.Activation("softmax")
    x = layers.Multiply()([x, gate(x)])
    model = keras.Model(inputs, gate(layers.Dense(CLASSES)(x)))
    expected = np.array(model(some_images(SIZE)))
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    assert "stripping the final" in capsys.readouterr().out
    np.testing.assert_allclose(keras.ops.softmax(logits(some_images(SIZE))), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["nested", "subclassed"])
def test_probabilities_in_half_precision_are_found(kind, half_precision, capsys):
    model = made(kind)
    expected = np.array(keras.ops.cast(model(some_images(SIZE)), "float32"))
    logits = with_logits(model, SHAPE, CLASSES, "my.keras")
    assert capsys.readouterr().out
    found = keras.ops.softmax(keras.ops.cast(logits(some_images(SIZE)), "float32"))
    np.testing.assert_allclose(found, expected, atol=1e-2)
