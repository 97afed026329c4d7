"""The steps that benchmark_step.py compares."""

import keras
import numpy as np
import pytest
from benchmark_step import elastic_masks, keras_step, upper_masks, variants_of
from command_line import ROOT
from common import few_digits
from conftest import BATCH, SIZE, make_small_model, make_table
from small_networks import as_if_trained, values

import models
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import Images
from elastic_trainer.engine.optimizers import idle_optimizer
from elastic_trainer.engine.prefix import SplitStep
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.settings import Settings

NETWORK = Settings("small", SIZE, 3, BATCH, weights="none")


def small_model():
    model = as_if_trained(make_small_model())
    next(layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)).rate = 0.0
    return model


def noise():
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH, SIZE, SIZE, 3), np.uint8)
    images = Images(pixels, np.zeros(BATCH, np.int32))
    return ImageData("noise", ["all"], images, images, BATCH)


def made(model, mask):
    """The steps of a selection by variant, as far as it has them."""
    return variants_of(model, idle_optimizer(model, "sgd"), mask, noise())


def test_all_variants_of_a_selection_compute_the_same_loss_and_move_no_weight():
    model = small_model()
    before = values(model.variables)
    losses = {variant: run()[0] for variant, run in made(model, head_mask(model)).items()}
    assert [*losses] == ["unfolded", "folded", "prefix", "cached"]
    losses["keras"] = float(keras_step(model, NETWORK, noise())())
    np.testing.assert_allclose([*losses.values()], losses["unfolded"], rtol=1e-5)
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


def test_each_variant_runs_what_its_name_says(monkeypatch):
    model = small_model()
    runs = made(model, head_mask(model))
    assert runs["folded"].func.folded_pairs and not runs["unfolded"].func.folded_pairs
    monkeypatch.delattr(SplitStep, "prefix")
    runs["cached"]()
    with pytest.raises(AttributeError, match="prefix"):
        runs["prefix"]()


def test_only_steps_that_are_different_programs_are_measured():
    model = small_model()
    assert [*made(model, all_mask(model))] == ["unfolded", "folded"], "nothing is frozen"
    inputs = keras.Input((SIZE, SIZE, 3))
    dense = keras.layers.Dense(4)(keras.layers.Flatten()(inputs))
    without_batch_norm = keras.Model(inputs, keras.layers.Dense(3)(dense))
    assert [*made(without_batch_norm, head_mask(without_batch_norm))] == ["folded", "prefix", "cached"]


def test_rho_below_that_of_steps_without_a_cache_is_what_cached_features_allow():
    network = Settings(f"{ROOT}/tests/zoo.py:branches", 16, 10, BATCH, weights="none")
    model = models.build(network)
    table = make_table(model, t_fw_ms=1.0)
    smallest = [smallest_rho(table, head_mask(model), share) for share in (1.0, 0.0)]
    assert smallest[1] < smallest[0]
    rhos = (smallest[1] - 0.01, smallest[1] + 0.01, 1.0)
    masks = elastic_masks(model, few_digits(network, 1), table, rhos)
    assert [*masks] == [f"rho {rho:g}" for rho in rhos[1:]], "the first is not feasible"
    assert masks[f"rho {rhos[1]:g}"].sum() == 2 < masks["rho 1"].sum()


def test_upper_masks_train_the_tensors_nearest_the_output_and_the_head():
    head = np.array([False] * 8 + [True] * 2)
    masks = upper_masks(head, np.arange(10)[::-1], (0.5, 0.1))
    assert {name: np.flatnonzero(mask).tolist() for name, mask in masks.items()} == {
        "upper 50 %": [5, 6, 7, 8, 9],
        "upper 10 %": [8, 9],
        "head": [8, 9],
    }
