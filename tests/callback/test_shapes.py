"""Shapes of networks as in Keras' own examples, each made small."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_table
from keras import layers, ops

from elastic_trainer import ElasticTraining

CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def labels(*shape, classes=3):
    return np.random.default_rng(0).integers(0, classes, shape)


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
    return Recommender(), labels(16, 2, classes=9), labels(16)


class Graph(keras.Model):
    """Inputs are numbers of nodes; features and edges are constants."""

    def __init__(self):
        super().__init__()
        self.nodes, self.edges = tf.constant(normal(9, 4)), labels(2, 30, classes=9)
        self.before, self.after, self.head = layers.Dense(4), layers.Dense(4), layers.Dense(3)

    def call(self, inputs):
        nodes = self.before(self.nodes)
        sums = tf.math.unsorted_segment_mean(tf.gather(nodes, self.edges[1]), self.edges[0], num_segments=9)
        nodes = nodes + self.after(tf.concat([nodes, sums], axis=1))
        return self.head(tf.gather(tf.nn.l2_normalize(nodes, axis=-1), inputs))


def graph():
    return Graph(), labels(16, classes=9), labels(16)


SHAPES = [distillation, endpoint, translation, recommender, graph]


def trained(make, rho):
    """Losses, the weights before and after, and which tensors the callback trained (None: without it)."""
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
