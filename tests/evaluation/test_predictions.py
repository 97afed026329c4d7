"""Predictions of the test images: compared with NumPy, down to the last incomplete batch."""

import numpy as np
import pytest
from conftest import BATCH, CLASSES, make_small_data, make_small_model
from small_images import labels_of

from elastic_trainer.evaluation.predictions import SHOWN_MISTAKES, predict
from elastic_trainer.system.errors import UserError


def test_predictions_equal_the_models_and_keep_the_highest_losses():
    model, dataset = make_small_model(), make_small_data(20 * BATCH + 1)  # the last batch is incomplete
    predictions = predict(model, dataset)
    images = np.concatenate([batch.inputs.numpy() for batch in dataset.test()])
    labels = labels_of(dataset.test())
    logits = model(images, training=False).numpy().astype(np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    np.testing.assert_array_equal(predictions.labels, labels)
    np.testing.assert_array_equal(predictions.predicted, logits.argmax(axis=1))
    np.testing.assert_allclose(predictions.losses, losses, rtol=1e-5)
    assert predictions.accuracy == np.mean(labels == logits.argmax(axis=1))
    wrong = np.flatnonzero(labels != logits.argmax(axis=1))
    worst = wrong[np.argsort(-losses[wrong])][:SHOWN_MISTAKES]
    assert 3 < len(worst) < len(wrong)
    assert [*predictions.worst] == list(worst)
    for number, image in predictions.worst.items():
        np.testing.assert_array_equal(image, images[number].astype(np.uint8))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(predictions.confidences, shares.max(axis=1), rtol=1e-5)


def test_logits_that_are_not_finite_are_refused():
    model = make_small_model()
    model.layers[-1].bias.assign([np.nan] * CLASSES)
    with pytest.raises(UserError, match="not finite"):
        predict(model, make_small_data())
