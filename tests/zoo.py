"""Models as a user may bring them, one for each way to build a network: `--model_name zoo.py:function`."""

import keras
from keras import layers


def _image(input_shape):
    inputs = keras.Input(input_shape)
    return inputs, layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)


def _classify(inputs, x, num_classes, **options):
    return keras.Model(inputs, layers.Dense(num_classes, name="classes", **options)(x))


def branches(input_shape, num_classes):
    """Parallel branches and a concatenation."""
    inputs, x = _image(input_shape)
    x = layers.Conv2D(6, 3, padding="same", activation="relu")(x)
    wide = layers.BatchNormalization()(layers.Conv2D(4, 5, padding="same", use_bias=False)(x))
    x = layers.Concatenate()([layers.Conv2D(4, 1)(x), wide, layers.MaxPooling2D(3, 1, padding="same")(x)])
    return _classify(inputs, layers.GlobalAveragePooling2D()(x), num_classes)


def shared_weights(input_shape, num_classes):
    """One convolution applied three times, one dense layer on two branches that are added."""
    inputs, x = _image(input_shape)
    x = layers.Conv2D(6, 1)(x)
    again = layers.Conv2D(6, 3, padding="same", activation="relu", name="again")
    x = again(again(again(x)))
    both = layers.Dense(8, activation="relu", name="both")
    pooled = [both(layers.GlobalAveragePooling2D()(x)), both(layers.GlobalMaxPooling2D()(x))]
    return _classify(inputs, layers.Add()(pooled), num_classes)


def gru(input_shape, num_classes):
    """A loop over image rows."""
    inputs, x = _image(input_shape)
    x = layers.Reshape((input_shape[0], input_shape[1] * input_shape[2]))(x)
    return _classify(inputs, layers.GRU(12)(x), num_classes)


def attention(input_shape, num_classes):
    """Multi-head attention over image rows, with LayerNorm and a residual."""
    inputs, x = _image(input_shape)
    x = layers.Dense(12)(layers.Reshape((input_shape[0], input_shape[1] * input_shape[2]))(x))
    normalised = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(num_heads=2, key_dim=6)(normalised, normalised)])
    return _classify(inputs, layers.GlobalAveragePooling1D()(x), num_classes)


def depthwise_and_grouped(input_shape, num_classes):
    inputs, x = _image(input_shape)
    x = layers.Conv2D(8, 3, padding="same")(x)
    x = layers.DepthwiseConv2D(3, padding="same", activation="relu")(x)
    x = layers.SeparableConv2D(8, 3, padding="same")(x)
    return _classify(inputs, layers.Flatten()(layers.Conv2D(8, 3, groups=4)(x)), num_classes)


def normalisations(input_shape, num_classes):
    """LayerNorm, GroupNorm, and a batch norm inside a wrapper."""
    inputs, x = _image(input_shape)
    x = layers.LayerNormalization()(layers.Conv2D(8, 3)(x))
    x = layers.GroupNormalization(groups=2)(layers.Conv2D(8, 3)(x))
    x = layers.TimeDistributed(layers.BatchNormalization())(x)
    return _classify(inputs, layers.GlobalMaxPooling2D()(x), num_classes)


class Gated(layers.Layer):
    """A layer with variables and an inner layer."""

    def build(self, input_shape):
        self.gate = self.add_weight(shape=(input_shape[-1],), name="gate")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.mix = layers.Dense(input_shape[-1])

    def call(self, inputs):
        return self.scale * inputs * keras.ops.sigmoid(self.gate) + self.mix(inputs)


def custom_layer(input_shape, num_classes):
    inputs, x = _image(input_shape)
    x = Gated()(layers.Conv2D(6, 3)(x))
    return _classify(inputs, layers.GlobalAveragePooling2D()(x), num_classes)


def nested(input_shape, num_classes):
    """A model within a model within a model; its outputs are probabilities."""
    core = keras.Sequential([keras.Input(input_shape), layers.Conv2D(6, 3), layers.BatchNormalization(), layers.ReLU()])
    outer = keras.Sequential([keras.Input(input_shape), core, layers.Conv2D(8, 3), layers.GlobalAveragePooling2D()])
    inputs, x = _image(input_shape)
    return _classify(inputs, outer(x), num_classes, activation="softmax")


class Subclassed(keras.Model):
    """A model without a graph, which Keras cannot save: it has an argument that is no number or text."""

    def __init__(self, last):
        super().__init__()
        self.first = layers.Conv2D(6, 3)
        self.norm = layers.BatchNormalization()
        self.last = last

    def call(self, inputs):
        return self.last(keras.ops.mean(self.norm(self.first(inputs / 255)), axis=(1, 2)))


def subclassed(input_shape, num_classes):
    return Subclassed(layers.Dense(num_classes))


class Idle(layers.Layer):
    """Has a variable that its output does not depend on."""

    def build(self, input_shape):
        self.unused = self.add_weight(shape=(5,), name="unused")

    def call(self, inputs):
        return inputs


def without_gradient(input_shape, num_classes):
    inputs, x = _image(input_shape)
    x = Idle()(layers.Conv2D(6, 3)(x))
    return _classify(inputs, layers.GlobalAveragePooling2D()(x), num_classes)


ALL = (
    branches,
    shared_weights,
    gru,
    attention,
    depthwise_and_grouped,
    normalisations,
    custom_layer,
    nested,
    subclassed,
    without_gradient,
)
