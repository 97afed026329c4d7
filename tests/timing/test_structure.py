"""The digest of what a network computes: equal in every process, and different once a layer changes."""

import subprocess
import sys

import keras
import pytest
from command_line import ROOT
from conftest import BATCH, make_small_model

from elastic_trainer.timing.structure import structure

layers = keras.layers


def network(stride=1, activation="relu", size=8):
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(4, 3, strides=stride, padding="same", activation=activation)(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def test_structure_does_not_depend_on_weights_and_names():
    first, other = make_small_model(0), make_small_model(1)
    assert structure(first, BATCH) == structure(other, BATCH)
    assert structure(network(), BATCH) == structure(network(), BATCH)


@pytest.mark.parametrize("change", [{"stride": 2}, {"activation": "tanh"}, {"size": 16}])
def test_structure_changes_with_a_layer_though_no_tensor_changes_its_shape(change):
    changed = network(**change)
    assert [v.shape for v in changed.trainable_variables] == [v.shape for v in network().trainable_variables]
    assert structure(changed, BATCH) != structure(network(), BATCH)


def test_structure_is_the_same_in_another_process():
    code = (
        "import utils; utils.load_tensorflow(); import models; from elastic_trainer.timing.structure import structure; "
        "print(structure(models.build_model('mobilenetv2', 32, 3, alpha=0.35), 4))"
    )
    words = [sys.executable, "-c", code]
    answers = {
        subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1] for _ in range(2)
    }
    assert len(answers) == 1
