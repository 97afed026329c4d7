"""What ElasticTraining refuses, in one line, or leaves to plain fit."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_table

from elastic_trainer import ElasticTraining
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory import free_memory_mb


def unfrozen():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(name="bn")])
    model.compile("sgd", "mse")
    return model


class OwnStep(keras.Model):
    """A model without `call`, as most GANs are."""

    def train_step(self, data):
        return {}


def own_step():
    model = OwnStep()
    model.compile("sgd", "mse")
    return model


def two_layers(optimizer="sgd", **settings):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    model.compile(optimizer, "mse", **settings)
    return model


def several_optimizers():
    return two_layers(
        keras.optimizers.MultiOptimizer({"sequential": keras.optimizers.SGD(), "*": keras.optimizers.Adam()})
    )


def overwriting():
    return two_layers(keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2))


X, Y = np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)
SPARSE = tf.data.Dataset.from_tensors((X, Y)).map(lambda x, y: (tf.sparse.from_dense(x), y))
RAGGED = tf.data.Dataset.from_tensors((tf.RaggedTensor.from_tensor(X[:, None]), Y))


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (unfrozen, (X, Y), r"bn would change .*freeze_batch_norm\(model\)"),
        (own_step, (X, Y), "its own train_step"),
        (partial(two_layers, run_eagerly=True), (X, Y), "^run_eagerly"),
        (several_optimizers, (X, Y), "^several optimizers"),
        (overwriting, (X, Y), "^ema_overwrite_frequency .*use_ema"),
        (two_layers, (SPARSE,), "dense tensors .*tf.sparse.to_dense"),
        (two_layers, (RAGGED,), "dense tensors .*to_tensor"),
    ],
)
def test_what_it_cannot_train_is_refused_in_one_line(make, data, message):
    if make is several_optimizers and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has none")
    with pytest.raises(UserError, match=message) as error:
        make().fit(*data, verbose=0, callbacks=[ElasticTraining(verbose=0)])
    assert "\n" not in str(error.value)


def test_a_rho_below_what_the_head_takes_names_the_smallest():
    model = two_layers()
    with pytest.raises(UserError, match=r"^rho 0\.01: training the head alone takes .* give at least 0\."):
        model.fit(X, Y, verbose=0, callbacks=[ElasticTraining(0.01, table=make_table(model), verbose=0)])


class OneLayer(keras.Model):
    def __init__(self, trainable):
        super().__init__()
        self.only = keras.layers.Dense(3, trainable=trainable)

    def call(self, inputs):
        return self.only(inputs)


@pytest.mark.parametrize(
    ("is_trainable", "message"), [(True, "every tensor belongs to the head"), (False, "no tensor is trainable")]
)
def test_where_there_is_nothing_to_select_it_trains_as_plain_fit(is_trainable, message, capsys):
    def trained(callbacks):
        keras.utils.set_random_seed(0)
        model = OneLayer(is_trainable)
        model.compile("sgd", "mse")
        return model.fit(X, Y, verbose=0, epochs=3, callbacks=callbacks).history["loss"]

    assert trained([ElasticTraining(scheme="elastic_training")]) == trained([])
    assert capsys.readouterr().out.count(message) == 1


@pytest.mark.parametrize("settings", [{"rho": 0}, {"rho": 1.5}, {"interval": 0}, {"scheme": "full_training"}])
def test_arguments_out_of_range_are_refused_at_once(settings):
    [name] = settings
    with pytest.raises(UserError, match=f"^{name} "):
        ElasticTraining(**settings)


def test_limits_of_memory_that_are_none_are_refused_in_one_line():
    wrong: list[Any] = ["900", "lots", "-3M", "0%", 0, -1.0, float("nan"), True, [900]]
    for memory in wrong:
        with pytest.raises(UserError, match=r"^memory .* must be a size, such as 900M, 1\.5G or 80%") as error:
            ElasticTraining(memory=memory)
        assert "\n" not in str(error.value)
    share = ElasticTraining(memory="50%").settings.memory or 0.0
    assert share == pytest.approx(0.5 * (free_memory_mb() or 0.0), rel=0.2)


def test_a_limit_needs_examples_of_one_shape():
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Conv1D(5, 3, padding="same")(inputs)))
    model.compile("sgd", "mse")
    parts = [np.ones((8, length, 4), np.float32) for length in (6, 4)]
    spec = tf.TensorSpec((None, None, 4))
    data = tf.data.Dataset.from_generator(lambda: ((p, p) for p in parts), output_signature=(spec, spec))
    with pytest.raises(UserError, match="memory: needs examples of one shape"):
        model.fit(data, verbose=0, callbacks=[ElasticTraining(memory="80%", verbose=0)])


@pytest.mark.parametrize(("rho", "is_refused"), [(0.5, True), (1.0, False)])
def test_several_replicas_are_refused_unless_it_leaves_fit_alone(rho, is_refused):
    callback, model = ElasticTraining(rho, verbose=0), SimpleNamespace(train_function=None)
    model.distribute_strategy = SimpleNamespace(num_replicas_in_sync=2)
    callback.set_model(model)
    with pytest.raises(UserError, match="one replica") if is_refused else nullcontext():
        callback.on_train_begin()
    assert model.train_function is None
