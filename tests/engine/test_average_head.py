"""The head that a run ends with: the mean of the trained one and the closed form for the trained network."""

import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import CLASSES, make_small_data, make_small_model
from small_networks import values

from elastic_trainer import Settings, Trainer
from elastic_trainer.engine.closed_form_head import closed_form_head
from elastic_trainer.engine.feature_sums import Head, mean_head
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.runs.listener import Listener
from elastic_trainer.system.errors import Stopped

SETTINGS = Settings(learning_rate=0.05, num_epochs=2, average_head=True)


class StopsInTheLastValidation(Listener):
    """As a signal does."""

    def on_test_begin(self, logs=None):
        if self.trainer.history.step == self.trainer.schedule.total_steps:
            raise Stopped(15, "now")


class StopsInItsFirstPass(Listener):
    """As a signal does while the head is averaged, before the last validation."""

    is_validating = False

    def on_test_begin(self, logs=None):
        self.is_validating = True

    def on_test_batch_begin(self, batch, logs=None):
        if not self.is_validating:
            raise Stopped(15, "now")

    def on_test_end(self, logs=None):
        self.is_validating = False


def trainer(settings=SETTINGS, *listeners):
    return Trainer(make_small_model(), make_small_data(), "full_training", settings, listeners)


def weights(trained):
    return [variable.numpy() for variable in trained.training.model.variables]


@pytest.fixture(scope="module")
def plain():
    """A run that keeps its trained head."""
    found = trainer(replace(SETTINGS, average_head=False))
    found.run()
    return found


@pytest.fixture(scope="module")
def averaged():
    """The same run with the mean of both heads."""
    found = trainer()
    found.run()
    return found


def assert_same(one, other):
    for first, second in zip(weights(one), weights(other), strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_run_ends_with_the_mean_of_the_trained_and_the_closed_form_head(plain, averaged):
    results, plain_results = averaged.results(), plain.results()
    *below, kernel, bias = weights(averaged)
    *expected, trained_kernel, trained_bias = weights(plain)
    for one, other in zip(below, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    found = closed_form_head(plain.task, plain.data)
    assert found is not None
    head = found.head
    np.testing.assert_allclose(kernel, (trained_kernel + head.kernel) / 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(bias, (trained_bias + head.bias) / 2, rtol=1e-4, atol=1e-6)
    assert np.abs(kernel - trained_kernel).max() > 1e-3
    last = averaged.history.epochs[-1]
    assert last["test_loss"] == pytest.approx(averaged.evaluate()["loss"]), "the last validation has the mean"
    assert averaged.history.epochs[0]["test_loss"] == plain.history.epochs[0]["test_loss"]
    assert 0 < results["average_head_seconds"] < results["train_seconds"]
    assert plain_results["average_head_seconds"] is None


@pytest.mark.parametrize("stops", [StopsInItsFirstPass, StopsInTheLastValidation])
def test_a_run_stopped_while_it_averages_or_validates_averages_once(stops, plain, averaged):
    first, second = trainer(SETTINGS, stops()), trainer()
    with pytest.raises(Stopped):
        first.run()
    if stops is StopsInItsFirstPass:
        assert first.history.step == first.schedule.total_steps and first.history.average_head_seconds is None
        assert_same(plain, first)
    second.load(first.state())
    second.run()
    assert_same(averaged, second)


def test_outputs_without_images_stay_as_trained():
    model = make_small_model(classes=CLASSES + 2)
    found = closed_form_head(ImageClassification(model), make_small_data())
    assert found is not None
    (kernel, bias), _ = values(model.trainable_variables[-2:]), found.average()
    averaged_kernel, averaged_bias = values(model.trainable_variables[-2:])
    np.testing.assert_array_equal(kernel[:, CLASSES:], averaged_kernel[:, CLASSES:])
    np.testing.assert_array_equal(bias[CLASSES:], averaged_bias[CLASSES:])
    assert (np.abs(kernel - averaged_kernel)[:, :CLASSES].max(axis=0) > 1e-3).all()


def test_a_head_whose_scale_nothing_tells_is_not_averaged():
    """With fewer than five images of each class, none is held back."""
    plain, averaged = (
        Trainer(make_small_model(), make_small_data(count=4 * CLASSES), "full_training", settings)
        for settings in (replace(SETTINGS, average_head=False), SETTINGS)
    )
    plain.run()
    averaged.run()
    assert averaged.history.average_head_seconds is None
    assert_same(plain, averaged)


def test_without_the_memory_for_it_the_head_stays_as_it_is(plain, capsys):
    short = trainer()
    short.run(until_step=1)
    short.training.memory.limit_mb = 1.0
    short.run()
    assert re.search(r"no closed-form head: it takes \d+ MB, and 0 MB are left", capsys.readouterr().out)
    assert_same(plain, short)


@pytest.mark.parametrize("loss", [0.0, 0.5])
def test_where_the_closed_form_is_sure_of_everything_the_mean_is_as_sure_as_the_trained_head(loss):
    random = np.random.default_rng(0)
    trained = Head(*(random.normal(size=shape).astype(np.float32) for shape in ((8, 5), (5,))))
    closed = Head(*(100 * random.normal(size=shape).astype(np.float32) for shape in ((8, 5), (5,))))
    is_scaled, features = np.array([True] * 4 + [False]), random.normal(size=(40, 8)).astype(np.float32)
    mean = mean_head(trained, closed, is_scaled, loss)
    plain = Head((trained.kernel + closed.kernel) / 2, (trained.bias + closed.bias) / 2)
    logits, expected = mean.logits(features)[:, :4], plain.logits(features)[:, :4]
    np.testing.assert_array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
    np.testing.assert_array_equal(mean.kernel[:, 4], trained.kernel[:, 4])
    if loss:
        np.testing.assert_allclose(logits, expected, rtol=1e-4)
    else:
        assert 0.5 < np.std(logits) / np.std(trained.logits(features)[:, :4]) < 2
