"""The same small network with a softmax or sigmoid at its end, in each way that Keras allows."""

import keras
from keras import layers

SIZE = 12


def _features(inputs):
    return layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, activation="relu")(layers.Rescaling(1 / 255)(inputs)))


def _model(classes, activation, after=lambda x: x):
    inputs = keras.Input((SIZE, SIZE, 3))
    return keras.Model(inputs, after(layers.Dense(classes, activation=activation, name="last")(_features(inputs))))


def plain(classes):
    return _model(classes, None)


def activation(classes):
    return _model(classes, "softmax")


def layer(classes):
    return _model(classes, None, layers.Softmax())


def operation(classes):
    return _model(classes, None, keras.ops.softmax)


def function(classes):
    return _model(classes, lambda x: keras.ops.softmax(x, axis=-1))


def lambda_layer(classes):
    return _model(classes, None, layers.Lambda(lambda x: keras.ops.softmax(x, axis=-1)))


def before_linear(classes):
    return _model(classes, "softmax", layers.Activation("linear", dtype="float32"))


def before_flatten(classes):
    return _model(classes, None, lambda x: layers.Flatten()(layers.Softmax()(x)))


def before_arithmetic(classes):
    return _model(classes, "softmax", lambda x: keras.ops.add(keras.ops.multiply(x, 1.0), 0.0))


def sequential(classes):
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(classes, name="last"),
            layers.Softmax(),
        ]
    )


def nested(classes):
    inputs = keras.Input((SIZE, SIZE, 3))
    return keras.Model(inputs, layer(classes)(inputs))


def nested_twice(classes):
    return keras.Sequential([keras.Input((SIZE, SIZE, 3)), nested(classes), layers.Flatten()])


def sigmoid(classes):
    return _model(classes, "sigmoid")


def nested_sigmoid(classes):
    inputs = keras.Input((SIZE, SIZE, 3))
    return keras.Model(inputs, sigmoid(classes)(inputs))


class Subclassed(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.options = {"classes": classes}
        self.first, self.last = layers.Conv2D(4, 3), layers.Dense(classes, activation="softmax")

    def call(self, images):
        return self.last(keras.ops.mean(self.first(images / 255), axis=(1, 2)))

    def get_config(self):
        return self.options


def subclassed(classes):
    return Subclassed(classes)


def by_hand(classes):
    """Exponentials over their sum, in the graph."""

    def normalised(x):
        exponentials = keras.ops.exp(x)
        return exponentials / keras.ops.sum(exponentials, axis=-1, keepdims=True)

    return _model(classes, None, normalised)


def mean_of_two(classes):
    """Two heads on the same features, whose probabilities are averaged."""
    inputs = keras.Input((SIZE, SIZE, 3))
    x = _features(inputs)
    heads = [layers.Dense(classes, activation="softmax")(x) for _ in range(2)]
    return keras.Model(inputs, layers.Average()(heads))


REMOVED = (
    *(activation, layer, operation, function, lambda_layer, before_linear, before_flatten, before_arithmetic),
    *(sequential, nested, nested_twice, sigmoid, nested_sigmoid),
)
KEPT = (subclassed, by_hand, mean_of_two)
