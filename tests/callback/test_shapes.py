"""Shapes of networks as in Keras' own examples, each made small."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_table
from keras import layers, ops

from elastic_trainer import ElasticTraining

RNG = np.random.default_rng(0)  # made again for each network
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def labels(*shape):
    return RNG.integers(0, 3, shape)


class Student(keras.Model):
    """Distillation: its loss runs another network, too."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = (
            keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(3)]) for _ in range(2)
        )

    def call(self, inputs):
        return self.student(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        return CLASSES(y, y_pred) + ops.mean(ops.square(self.teacher(x, training=False) - y_pred))


def distillation():
    return Student(), normal(16, 5), labels(16)


def towers():
    """One network for two inputs."""
    tower = keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(3)])
    inputs = [keras.Input((6, 6, 1)) for _ in range(2)]
    closeness = layers.Lambda(lambda pair: pair[0] * pair[1], output_shape=(3,))([tower(one) for one in inputs])
    return keras.Model(inputs, layers.Dense(3)(closeness)), [normal(16, 6, 6, 1), normal(16, 6, 6, 1)], labels(16)


class Attention(layers.Layer):
    """Over a list of inputs; weights of its own, with a penalty."""

    def build(self, shapes):
        penalty = keras.regularizers.L2(0.01)
        self.v = self.add_weight(shape=(shapes[0][1], 4), regularizer=penalty, name="v")
        self.w = self.add_weight(shape=(4, 1), name="w")

    def call(self, inputs):
        scores = ops.stack([ops.tanh(one @ self.v) @ self.w for one in inputs])
        weights = ops.softmax(scores, axis=0)
        return [weights[k] for k in range(len(inputs))]


def bags():
    inputs, shared = [keras.Input((5,)) for _ in range(3)], layers.Dense(4)
    parts = [shared(one) for one in inputs]
    weighted = [layers.multiply([weight, part]) for weight, part in zip(Attention()(parts), parts, strict=True)]
    return keras.Model(inputs, layers.Dense(3)(layers.concatenate(weighted))), [normal(16, 5)] * 3, labels(16)


class Endpoint(layers.Layer):
    """Takes the targets as an input and adds the loss."""

    def call(self, targets, outputs):
        self.add_loss(ops.mean(ops.square(targets - outputs)))
        return outputs


def endpoint():
    inputs, targets = keras.Input((6, 2), name="x"), keras.Input((6, 1), name="targets")
    h = layers.GRU(3, return_sequences=True, dropout=0.25, go_backwards=True)(inputs)
    model = keras.Model([inputs, targets], Endpoint()(targets, layers.Dense(1)(h)))
    return model, {"x": normal(16, 6, 2), "targets": normal(16, 6, 1)}, None


def pixels():
    """Segmentation: strides down, transposed convolutions up, a residual."""
    inputs = keras.Input((8, 8, 3))
    down = layers.SeparableConv2D(4, 3, strides=2, padding="same")(inputs)
    up = layers.UpSampling2D(2)(layers.Conv2DTranspose(4, 3, padding="same")(down))
    up = layers.add([up, layers.Conv2D(4, 1)(inputs)])
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(up)), normal(16, 8, 8, 3), labels(16, 8, 8)


class DepthToSpace(layers.Layer):
    def call(self, inputs):
        count, height, width, depth = ops.shape(inputs)
        x = ops.transpose(ops.reshape(inputs, [count, height, width, 2, 2, depth // 4]), [0, 1, 3, 2, 4, 5])
        return ops.reshape(x, [count, height * 2, width * 2, depth // 4])


def any_size():
    inputs = keras.Input((None, None, 1))
    x = layers.Conv2D(4, 3, padding="same", kernel_initializer="orthogonal")(inputs)
    return (
        keras.Model(inputs, DepthToSpace()(layers.Conv2D(12, 3, padding="same")(x))),
        normal(16, 4, 4, 1),
        labels(16, 8, 8),
    )


def volumes():
    convolutions = [layers.Conv3D(2, 2), layers.MaxPool3D(2), layers.GlobalAveragePooling3D()]
    return (
        keras.Sequential([keras.Input((6, 6, 6, 1)), *convolutions, layers.Dense(3)]),
        normal(16, 6, 6, 6, 1),
        labels(16),
    )


def films():
    recurrent = layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True)
    network = [recurrent, layers.Conv3D(3, 3, padding="same")]
    return keras.Sequential([keras.Input((None, 4, 4, 1)), *network]), normal(16, 3, 4, 4, 1), labels(16, 3, 4, 4)


def translation():
    """A recurrent layer that starts from the states of another one."""
    given, previous = keras.Input((None, 4)), keras.Input((None, 5))
    _, *states = layers.LSTM(3, return_state=True)(given)
    outputs, *_ = layers.LSTM(3, return_sequences=True, return_state=True)(previous, initial_state=states)
    return keras.Model([given, previous], layers.Dense(3)(outputs)), [normal(16, 5, 4), normal(16, 4, 5)], labels(16, 4)


class Recommender(keras.Model):
    """Embeddings of whole numbers, whose products go through the whole batch."""

    def __init__(self):
        super().__init__()
        self.users, self.bias = layers.Embedding(9, 4, embeddings_regularizer="l2"), layers.Embedding(9, 1)
        self.head = layers.Dense(3)

    def call(self, inputs):
        users, films = self.users(inputs[:, 0]), self.users(inputs[:, 1])
        return self.head(ops.tensordot(users, films, 2) + self.bias(inputs[:, 0]))


def recommender():
    return Recommender(), RNG.integers(0, 9, (16, 2)), labels(16)


class Graph(keras.Model):
    """Inputs are numbers of nodes; features and edges are constants."""

    def __init__(self):
        super().__init__()
        self.nodes, self.edges = tf.constant(normal(9, 4)), RNG.integers(0, 9, (2, 30))
        self.before, self.after, self.head = layers.Dense(4), layers.Dense(4), layers.Dense(3)

    def call(self, inputs):
        nodes = self.before(self.nodes)
        sums = tf.math.unsorted_segment_mean(tf.gather(nodes, self.edges[1]), self.edges[0], num_segments=9)
        nodes = nodes + self.after(tf.concat([nodes, sums], axis=1))
        return self.head(tf.gather(tf.nn.l2_normalize(nodes, axis=-1), inputs))


def graph():
    return Graph(), RNG.integers(0, 9, 16), labels(16)


class Tree(keras.Model):
    def __init__(self):
        super().__init__()
        self.leaves = self.add_weight(shape=(4, 3), initializer="random_normal")
        self.routes = layers.Dense(4, activation="softmax")

    def call(self, inputs):
        return self.routes(inputs) @ keras.activations.softmax(self.leaves)


def forest():
    """Models in a model, on columns by name."""
    inputs = {"age": keras.Input((), name="age"), "place": keras.Input((), dtype="int32", name="place")}
    columns = [ops.expand_dims(inputs["age"], -1), layers.Embedding(3, 2)(inputs["place"])]
    features = layers.concatenate(columns)
    x = {"age": normal(16), "place": labels(16)}
    return keras.Model(inputs, layers.Average()([Tree()(features) for _ in range(2)])), x, labels(16)


def transformed():
    """Points that a small network of its own turns first, with a penalty of what it says."""
    inputs = keras.Input((5, 3))
    start = {"kernel_initializer": "zeros", "bias_initializer": keras.initializers.Constant(np.eye(3).ravel())}
    turn = layers.Dense(9, **start, activity_regularizer="l2")(layers.GlobalMaxPooling1D()(layers.Conv1D(4, 1)(inputs)))
    h = layers.Conv1D(4, 1)(layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(turn)]))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling1D()(h))), normal(16, 5, 3), labels(16)


SHAPES = [distillation, towers, bags, endpoint, pixels, any_size, volumes, films]
SHAPES += [translation, recommender, graph, forest, transformed]


def trained(make, rho):
    """Losses, the weights before and after, and which tensors the callback trained (None: without it)."""
    global RNG  # noqa: PLW0603
    RNG = np.random.default_rng(0)
    keras.utils.set_random_seed(0)
    model, x, y = make()
    model.compile("adam", None if y is None else CLASSES)
    data = tf.data.Dataset.from_tensor_slices(x if y is None else (tuple(x) if isinstance(x, list) else x, y)).batch(4)
    if not model.built:
        model(x[:4])
    before, callbacks = [one.numpy() for one in model.trainable_variables], []
    if rho is not None:
        scheme = "elastic_training_upper_part"
        callbacks = [ElasticTraining(rho, 1, make_table(model), scheme=scheme, deterministic=True, verbose=0)]
    losses = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    after = [one.numpy() for one in model.trainable_variables]
    return losses, before, after, callbacks and callbacks[0].history.selection.mask


@pytest.mark.parametrize("make", SHAPES)
def test_networks_of_keras_examples_train_as_plain_fit_or_in_part(make):
    losses, _, weights, _ = trained(make, None)
    elastic_losses, _, elastic_weights, _ = trained(make, 1.0)
    assert elastic_losses == losses
    for one, other in zip(weights, elastic_weights, strict=True):
        np.testing.assert_array_equal(one, other)
    _, before, after, mask = trained(make, 0.7)
    moved = [not np.array_equal(*pair) for pair in zip(before, after, strict=True)]
    assert 0 < sum(mask) < len(mask) and moved == mask.tolist()
