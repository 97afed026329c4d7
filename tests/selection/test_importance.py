"""Importance equals its definition, and measuring it changes no variable."""

import keras
import numpy as np
import pytest
from conftest import BATCH, make_small_model
from small_images import pairs
from small_networks import built_optimizer, values

from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification, classification_loss
from elastic_trainer.selection.importance import GradientMagnitude, ImportanceEvaluator, WeightMagnitude
from elastic_trainer.system.errors import UserError


def without_dropout(model):
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def gradients_on(model, batch):
    """Loss and gradients on one batch, in eager TensorFlow."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = classification_loss(batch.targets, model(batch.inputs, training=True))
    return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("kind", "batches"), [(ImportanceEvaluator, 1), (ImportanceEvaluator, 3), (GradientMagnitude, 1)]
)
def test_measuring_importance_restores_all_variables(kind, batches, name, small_model, small_data):
    optimizer = built_optimizer(name, small_model)
    step = TrainStep(ImageClassification(small_model), optimizer, BATCH)
    for images, labels in pairs(small_data.train(0)):
        step(images, labels)
    everything = [*small_model.variables, *optimizer.variables]
    assert any("seed" in v.path for v in everything)
    before = values(everything)
    evaluator = kind(ImageClassification(small_model), BATCH)
    evaluator.importance(optimizer, small_data.importance_batches(0, batches))
    assert evaluator.pass_ms(small_data.importance_batches(0)[0]) > 0
    for variable, old in zip(everything, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old, err_msg=variable.path)
    [batch] = small_data.importance_batches(1)
    step(batch.inputs, batch.targets)
    assert any((v.numpy() != old).any() for v, old in zip(everything, before, strict=True))


@pytest.mark.parametrize(("rate", "share"), [(1e-4, 1.0), (0.05, 1e-4 / 0.05)])
def test_importance_is_the_first_order_loss_reduction_of_the_update(rate, share, small_data):
    """Compared with the definition in eager TensorFlow (there is no momentum yet, so dw = -lr·g)."""
    model, decay = without_dropout(make_small_model()), 0.1
    optimizer = built_optimizer("sgd", model, rate, decay)
    [batch] = small_data.importance_batches(0)

    measured = ImportanceEvaluator(ImageClassification(model), BATCH).importance(optimizer, [batch])
    loss_before, first = gradients_on(model, batch)
    start = values(model.trainable_variables)
    updates = [-rate * (decay * weights + gradient.numpy()) for weights, gradient in zip(start, first, strict=True)]
    for variable, weights, update in zip(model.trainable_variables, start, updates, strict=True):
        variable.assign(weights + share * update)
    loss_after, second = gradients_on(model, batch)
    expected = np.array([-np.sum(g.numpy() * update) for g, update in zip(second, updates, strict=True)])
    np.testing.assert_allclose(measured, expected / np.abs(expected).max(), rtol=1e-3, atol=1e-6)
    assert np.abs(measured).max() == pytest.approx(1.0)
    assert loss_after < loss_before and expected.sum() > 0


@pytest.mark.parametrize(("evaluator", "of"), [(WeightMagnitude, "weights"), (GradientMagnitude, "gradients")])
def test_magnitude_importances_are_normalised_sums_of_magnitudes(evaluator, of, small_model, small_data):
    optimizer = built_optimizer("sgd", small_model)
    [batch] = small_data.importance_batches(0)
    measured = evaluator(ImageClassification(small_model), BATCH).importance(optimizer, [batch])
    expected = values(small_model.trainable_variables)
    if of == "gradients":
        expected = [g.numpy() for g in gradients_on(small_model, batch)[1]]
    sums = np.array([np.abs(array).sum() for array in expected])
    np.testing.assert_allclose(measured, sums / sums.max(), rtol=1e-4, atol=1e-7)


def test_importance_over_several_batches_judges_an_update_on_other_batches(small_data):
    """Compared with the definition in eager TensorFlow."""
    model, rate, decay = without_dropout(make_small_model()), 0.05, 0.1
    optimizer = built_optimizer("sgd", model, rate, decay)
    batches = small_data.importance_batches(0, 5)
    assert (batches[0].inputs.numpy() != batches[1].inputs.numpy()).any()
    np.testing.assert_array_equal(batches[0].inputs, small_data.importance_batches(0)[0].inputs)
    measured = ImportanceEvaluator(ImageClassification(model), BATCH).importance(optimizer, batches)
    gradients = [gradients_on(model, batch)[1] for batch in batches]
    expected = []
    for index, weights in enumerate(values(model.trainable_variables)):
        one, other = (np.mean([g[index].numpy() for g in half], axis=0) for half in (gradients[::2], gradients[1::2]))
        expected.append(np.sum(one * (decay * weights + other) + other * (decay * weights + one)))
    np.testing.assert_allclose(measured, expected / np.abs(expected).max(), rtol=1e-3, atol=1e-6)
    on_themselves = np.array([sum(np.sum(g[index].numpy() ** 2) for g in gradients) for index in range(len(expected))])
    assert np.abs(measured - on_themselves / on_themselves.max()).max() > 0.1


@pytest.mark.parametrize(("weight", "rate"), [(np.nan, 1e-3), (0.0, np.inf)])
def test_importance_that_is_not_finite_raises_an_error(weight, rate, small_model, small_data):
    optimizer = built_optimizer("sgd", small_model, rate)
    small_model.get_layer("head").bias.assign([weight, 0, 0])
    evaluator, batches = ImportanceEvaluator(ImageClassification(small_model), BATCH), small_data.importance_batches(0)
    with pytest.raises(UserError, match=r"importance is not finite at step 0 .*lower --learning_rate"):
        evaluator.importance(optimizer, batches)
