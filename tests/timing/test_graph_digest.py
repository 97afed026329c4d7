"""The digest of a network changes with what it computes, and with nothing else."""

import subprocess
import sys

import keras
import pytest
import zoo
from command_line import ROOT
from keras import layers

from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.timing.graph_digest import graph_digest

SIZE, BATCH = 16, 4


def network(strides=1, dilation=1, activation="relu", recurrent="tanh", seed=0, scale=255, rate=0.2, penalty=0.1):
    """The number of filters and the sizes of all weights are the same, whatever the arguments."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.RandomFlip("horizontal", seed=seed)(layers.Rescaling(1 / scale)(inputs))
    x = layers.Conv2D(4, 3, padding="same", strides=strides, dilation_rate=dilation, activation=activation)(x)
    x = layers.GRU(3, activation=recurrent)(layers.Reshape((-1, 4))(x))
    x = layers.Dropout(rate, seed=seed)(x)
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer=keras.regularizers.L2(penalty))(x))


def digest(model):
    return graph_digest(ImageClassification(model), BATCH)


@pytest.mark.parametrize(
    "changed", [{"strides": 2}, {"dilation": 2}, {"activation": "gelu"}, {"recurrent": "relu"}], ids=str
)
def test_a_change_of_the_computation_changes_the_digest(changed):
    assert digest(network(**changed)) != digest(network())


def test_names_seeds_and_weights_do_not_change_the_digest():
    expected = digest(network())
    model = network(seed=7)  # Keras numbers its layers on
    model.trainable_variables[0].assign(keras.ops.ones(model.trainable_variables[0].shape))
    assert digest(model) == expected
    assert digest(model) == expected
    assert digest(network(scale=127.5, rate=0.5, penalty=0.2)) == expected, "constants take no time"


ELSEWHERE = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests", {root!r} + "/tests/timing"]
from elastic_trainer.system.machine import load_tensorflow; load_tensorflow()
import tensorflow as tf; tf.config.experimental.enable_op_determinism()
import keras; keras.utils.set_random_seed(5)
import zoo
from test_graph_digest import digest
for function in (zoo.gru, zoo.attention):
    print(digest(function((16, 16, 3), 3)))
"""


def test_another_process_with_deterministic_operations_finds_the_same_digest():
    words = [sys.executable, "-c", ELSEWHERE.format(root=str(ROOT))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    expected = [digest(function((SIZE, SIZE, 3), 3)) for function in (zoo.gru, zoo.attention)]
    assert done.stdout.splitlines() == expected
