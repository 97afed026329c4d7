"""The training step: exactly the selected tensors change, over any number of selections."""

import keras
import numpy as np
import pytest
from conftest import BATCH
from small_images import pairs
from small_networks import built_optimizer, values

from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification, classification_loss


def slots_of(optimizer, count):
    """Slot variables of each trained variable: [count] lists."""
    slots = [v for v in optimizer.variables if len(v.shape)]  # the step count and the rate are scalars
    assert len(slots) % count == 0
    kinds: dict[str, list] = {"momentum": [], "velocity": []}
    for slot in slots:
        kinds["velocity" if slot.path.endswith("velocity") else "momentum"].append(slot)
    return [[group[k] for group in kinds.values() if group] for k in range(count)]


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_step_changes_exactly_the_selected_variables_and_their_slots(name, small_model, small_data):
    variables = small_model.trainable_variables
    count = len(variables)
    optimizer = built_optimizer(name, small_model)
    slots = slots_of(optimizer, count)
    statistics = [v for v in small_model.variables if v.name in ("moving_mean", "moving_variance")]
    frozen = values(statistics)
    rng = np.random.default_rng(0)
    masks = [rng.random(count) < 0.5 for _ in range(4)]
    masks[0][:] = False
    masks[0][-2:] = True  # only the head
    batches = list(pairs(small_data.train(0)))
    for mask in masks:
        step = TrainStep(ImageClassification(small_model), optimizer, BATCH, mask)
        for images, labels in batches[:2]:
            before, slots_before = values(variables), [values(one) for one in slots]
            step(images, labels)
            for k in range(count):
                moved = (variables[k].numpy() != before[k]).any()
                assert moved == mask[k], f"{variables[k].path} moved: {moved}"
                for slot, old in zip(slots[k], slots_before[k], strict=True):
                    assert (slot.numpy() != old).any() == mask[k], f"slot {slot.path}"
    assert int(optimizer.iterations) == 2 * len(masks)
    for variable, old in zip(statistics, frozen, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_reselected_tensor_continues_with_its_slots_and_step_count(name, small_model, small_data):
    """Its momentum is unchanged, and Adam's bias correction counts the steps of this tensor only.

    The update equals that of a tensor that was always selected, at the present learning rate.
    """
    variables = small_model.trainable_variables
    alone = np.zeros(len(variables), bool)
    alone[0] = True
    others = ~alone
    optimizer = built_optimizer(name, small_model)
    batches = list(pairs(small_data.train(0)))
    for mask in (alone, others):
        step = TrainStep(ImageClassification(small_model), optimizer, BATCH, mask)
        for images, labels in batches[:3]:
            step(images, labels)
    slots = [slot.numpy() for slot in slots_of(optimizer, len(variables))[0]]
    before, rate = variables[0].numpy(), float(optimizer.learning_rate)
    step = TrainStep(ImageClassification(small_model), optimizer, BATCH, alone)
    step(*batches[3])
    if name == "sgd":
        momentum = slots_of(optimizer, len(variables))[0][0].numpy()
        gradient = (0.9 * slots[0] - momentum) / rate  # the gradient that this update implies
        assert np.abs(gradient).max() > 0
        np.testing.assert_allclose(variables[0].numpy(), before * (1 - rate * 0.1) + momentum, rtol=1e-4, atol=1e-7)
        assert rate == pytest.approx(0.5e-2 * (1 + np.cos(np.pi * 6 / 100)), rel=1e-4)
    else:
        mean, square = (slot.numpy() for slot in slots_of(optimizer, len(variables))[0])
        corrected = (
            mean / (1 - 0.9**4) / (np.sqrt(square / (1 - 0.999**4)) + 1e-7)
        )  # the tensor's 4th step is the run's 7th
        np.testing.assert_allclose(variables[0].numpy(), before - rate * corrected, rtol=1e-3, atol=1e-6)


def test_step_loss_includes_the_regularisers_of_the_model(small_data):
    [(images, labels)] = pairs(small_data.importance_batches(0))
    inputs = keras.Input(images.shape[1:])
    penalised = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5), name="head")
    model = keras.Model(inputs, penalised(keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))))
    kernel = model.get_layer("head").kernel.numpy()
    expected = float(classification_loss(labels, model(images))) + 0.5 * np.sum(kernel**2)
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model, rate=1e-3, decay=0.0), BATCH)
    assert step(images, labels)[0] == pytest.approx(expected, rel=1e-5)
