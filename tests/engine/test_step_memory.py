"""The memory of steps by their depth: against a count by following inputs one by one, and against traced steps."""

import keras
import numpy as np
import pytest

import models
from elastic_trainer.engine.memory import MARGIN, step_memory
from elastic_trainer.engine.optimizers import idle_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.profiling.measuring import CALIBRATION, HEAD, calibration_masks
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.fit import depth_of

SAME = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "ReadVariableOp", "StopGradient"}


def by_depth(step, model):
    """The memory by depth of the step that trains everything, and its attribution."""
    attribution = attribute(step, model.trainable_variables)
    return step_memory(step, attribution.places, attribution.positions), attribution


@pytest.fixture(scope="module")
def chain():
    """Of 6 convolutions and a head: the model, and steps by the batch size and how many of the 7 layers train."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((48, 48, 3))
    x = inputs
    for _ in range(6):
        x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    optimizer, count = idle_optimizer(model, "sgd"), len(model.trainable_variables)

    def step(batch_size, layers):
        mask = np.arange(count) >= count - 2 * layers
        assert (mask | head_mask(model) == mask).all()
        return TrainStep(ImageClassification(model), optimizer, batch_size, mask)

    return model, step


def test_a_step_keeps_what_its_selection_reads(chain):
    """Each layer's output takes 48·48·16·4 bytes an image."""
    output_mb = MARGIN * 32 * 48 * 48 * 16 * 4 / 1e6
    model, steps = chain
    found = [float(step_memory(steps(32, layers)).by_rows_mb[0]) / output_mb for layers in (1, 3, 5, 7)]
    images = 2 * 3 / 16
    assert found == pytest.approx([images + count for count in (2, 4, 6, 7)], abs=0.1), "the last one is of a gradient"
    memory, _ = by_depth(steps(32, 7), model)
    assert memory.by_rows_mb[[1, 5, 9, 13]] / output_mb == pytest.approx(found, abs=0.1)


def test_another_batch_takes_memory_in_proportion(chain):
    _, steps = chain
    small, large = (step_memory(steps(size, 7)) for size in (16, 64))
    assert small.needed_mb(64) == pytest.approx(large.needed_mb(64), rel=0.02)
    assert large.needed_mb(16) == pytest.approx(small.needed_mb(16), rel=0.02)


def test_a_depth_is_above_all_selections_of_that_depth():
    model = models.build_model("mobilenetv2", 64, 10, alpha=0.35)
    task, optimizer = ImageClassification(model), idle_optimizer(model, "sgd")
    memory, attribution = by_depth(TrainStep(task, optimizer, 8), model)
    convolutions, _ = by_depth(TrainStep(task, optimizer, 8, with_products=False), model)
    masks = calibration_masks(attribution.positions, attribution.kernels, head_mask(model), [HEAD, *CALIBRATION])
    for mask in [*masks[:-1:4], masks[-1]]:
        traced = step_memory(TrainStep(task, optimizer, 8, mask)).needed_mb(8)[0]
        bound = memory.needed_mb(8)[depth_of(mask[attribution.positions]) - 1]
        assert traced <= 1.02 * bound
        is_upper_part = mask.sum() >= depth_of(mask[attribution.positions])
        # Products, which have more operations, are where gradients pass: more of them are in the full step.
        alike = step_memory(TrainStep(task, optimizer, 8, mask, with_products=False)).needed_mb(8)[0]
        least = convolutions.needed_mb(8)[depth_of(mask[attribution.positions]) - 1]
        assert not is_upper_part or alike >= 0.85 * least
