"""Measuring inside `fit` changes nothing that training depends on, whoever made the variables."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastic_trainer import ElasticTraining, profile
from elastic_trainer.system.errors import UserError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 5, 3)).astype(np.float32), RNG.integers(0, 3, 16)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Counting(keras.layers.Layer):
    """Its variable is TensorFlow's: Keras does not know it."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs * (1 + 0.1 * self.calls)


def with_states():
    """A stateful recurrent layer, dropout, power iterations, a count: all change in a forward pass."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 3), batch_size=4)
    recurrent, counting = keras.layers.GRU(4, stateful=True), Counting()
    x = recurrent(keras.layers.Dense(4)(inputs))
    x = counting(keras.layers.Dropout(0.3)(keras.layers.SpectralNormalization(keras.layers.Dense(4))(x)))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS, metrics=["accuracy"])
    more = [recurrent.states[0], counting.calls]
    return model, lambda: [*model.variables, *model.metrics_variables, *model.optimizer.variables, *more]


@pytest.mark.skipif(keras.__version__.startswith("3.12."), reason="Keras 3.12 asks a stateful layer for its batch size")
def test_no_variable_is_changed_by_a_profile_by_importance_or_by_passes_that_measure_the_speed():
    model, variables = with_states()
    model.fit(X, Y, batch_size=4, verbose=0)
    before = [np.array(variable) for variable in variables()]
    table = profile(model, X[:4], Y[:4], seconds=0.1)
    for old, variable in zip(before, variables(), strict=True):
        np.testing.assert_array_equal(np.array(variable), old)
    histories: list[Any] = []
    for callbacks in ([], [ElasticTraining(1.0, interval=1, table=table, verbose=0)]):
        model, _ = with_states()
        arguments: dict[str, Any] = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
        histories.append((model.fit(X, Y, **arguments, callbacks=callbacks).history, model.get_weights()))
    (plain, plain_weights), (elastic, weights) = histories
    assert plain == elastic, "with all tensors, it is plain fit, bit for bit"
    for old, new in zip(plain_weights, weights, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
def test_lists_of_inputs_are_profiled_unless_another_profiler_runs(tmp_path):
    first, second = keras.Input((3,)), keras.Input((3,))
    x = keras.layers.Dense(4)(first) + keras.layers.Dense(4)(second)
    model = keras.Model([first, second], keras.layers.Dense(3)(x))
    model.compile("sgd", LOSS)
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(UserError, match="another profiler is running"):
            profile(model, [X[:, 0], X[:, 1]], Y, seconds=0.1)
    finally:
        tf.profiler.experimental.stop(save=False)
    assert len(profile(model, [X[:, 0], X[:, 1]], Y, seconds=0.1).names) == 6
