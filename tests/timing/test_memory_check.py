"""The memory estimate: compared with counting by hand, and when training is refused."""

import keras
import numpy as np
import pytest
from elastic_trainer.networks.memory import check_memory, memory_needed_mb

import models
from elastic_trainer.errors import UserError
from elastic_trainer.networks import memory
from elastic_trainer.networks.names import MODEL_NAMES
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.registry import SCHEMES
from elastic_trainer.selection.schemes import trainable_mask
from elastic_trainer.settings import NetworkSettings


def everything(model):
    """The mask of full training."""
    return np.ones(len(model.trainable_variables), bool)


def test_memory_needed_equals_counting_by_hand():
    """A network of two convolutions, batch norm and two dense layers; sizes are in floats of 4 bytes."""
    inputs = keras.Input((8, 8, 3))
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    one = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(scaled)
    normal = keras.layers.BatchNormalization()(one)
    two = keras.layers.Conv2D(4, 1)(keras.layers.ReLU()(normal))
    flat = keras.layers.Flatten()(two)
    side = keras.layers.Dense(2)(keras.layers.Reshape((256,))(two))  # shares its memory with flat
    model = keras.Model(inputs, keras.layers.Add()([keras.layers.Dense(2)(flat), side]))
    batch, weights = 5, 27 * 16 + 32 + 16 * 4 + 4 + 2 * (256 * 2 + 2)
    image, wide, narrow = 8 * 8 * 3, 8 * 8 * 16, 8 * 8 * 4
    kept = batch * (image + wide + wide + narrow)  # inputs of: conv, batch norm, conv, both dense
    mb = 4 / 1e6
    assert memory_needed_mb(model, batch, 1, everything(model)) == pytest.approx(mb * (batch * image + weights + kept))
    importance = memory_needed_mb(model, batch, 2, everything(model), measures_importance=True)
    assert importance == pytest.approx(mb * (batch * image + 5 * weights + kept))
    head = memory_needed_mb(model, batch, 1, head_mask(model))
    largest_layer = batch * (wide + narrow)  # its input and output
    assert head == pytest.approx(mb * (batch * image + weights + largest_layer))


def test_memory_needed_counts_nested_models_once():
    backbone = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, include_top=False, weights=None)
    alone = keras.Model(backbone.inputs, keras.layers.Flatten()(backbone.output))
    inputs = keras.Input((32, 32, 3))
    nested = keras.Model(inputs, keras.layers.Flatten()(keras.Sequential([backbone])(inputs)))
    needed = [memory_needed_mb(model, 64, 1, everything(model)) for model in (alone, nested)]
    assert needed[0] == pytest.approx(needed[1])
    assert needed[0] > 20


def test_memory_needed_counts_the_input_of_a_nested_model_once():
    given = keras.Input((8, 8, 3))
    inner = keras.Model(given, keras.layers.Conv2D(3, 1)(given))
    inputs = keras.Input((8, 8, 3))
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    both = keras.layers.Add()([inner(scaled), keras.layers.Conv2D(3, 1)(scaled)])
    model = keras.Model(inputs, keras.layers.Conv2D(3, 1)(keras.layers.Conv2D(3, 1)(both)))
    images, weights = 4, 4 * 12  # the batch and three inputs of convolutions; momentum of four convolutions
    needed = memory_needed_mb(model, 1000, 1, everything(model))
    assert needed == pytest.approx(4 * (1000 * images * 8 * 8 * 3 + weights) / 1e6)


def check(model, train_type="elastic_training", **changed):
    """`check_memory` as main.py calls it."""
    network = NetworkSettings(**{"model_name": "mobilenetv2", "input_size": 32, "batch_size": 4, **changed})
    check_memory(model, network, trainable_mask(train_type, model, 1), SCHEMES[train_type].importance is not None)


def test_too_little_memory_is_refused_before_training(monkeypatch):
    model = models.build_model("mobilenetv2", 32, 10, alpha=0.35)
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    monkeypatch.setattr(memory, "available_memory_mb", lambda: 5 * count * 4 / 1e6)
    check(model)
    with pytest.raises(
        UserError,
        match=r"--batch_size 4096: training mobilenetv2 .* takes at least [\d,]+ MB more, and \d+ MB are avail",
    ):
        check(model, batch_size=4096)
    monkeypatch.setattr(memory, "available_memory_mb", lambda: 2.5 * count * 4 / 1e6)
    check(model, train_type="full_training")
    for more in ({}, {"optimizer": "adam"}):  # evaluating importance needs copies
        with pytest.raises(UserError, match="--batch_size 4: "):
            check(model, **more)
    monkeypatch.setattr(memory, "available_memory_mb", lambda: 50.0)  # the gradient of the head needs no other layer
    check(model, batch_size=256, train_type="traditional_tl_training")
    for scheme in ("full_training", "bn_plus_bias_training"):
        with pytest.raises(UserError, match="--batch_size 256: "):
            check(model, batch_size=256, train_type=scheme)
    monkeypatch.setattr(memory, "available_memory_mb", lambda: None)
    check(model, batch_size=10**9)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_no_network_is_refused_with_3_gb_available(name, monkeypatch):
    model = models.build_model(name, 64, 10)
    monkeypatch.setattr(memory, "available_memory_mb", lambda: 3000.0)
    for scheme in SCHEMES:
        check(model, model_name=name, optimizer="adam", train_type=scheme)
