"""What `ElasticTraining(rho)` decides by itself in `fit`, by losses and by times of steps, which are made up here."""

from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from conftest import make_small_model, make_table

from elastic_trainer import ElasticTraining
from elastic_trainer.runs import keras_fit
from elastic_trainer.selection import payoff
from elastic_trainer.selection.payoff import Payoff, Phase, StepTimes, chosen_interval, has_settled, vectors_moved
from elastic_trainer.timing.table import sharpened

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = np.random.default_rng(0).normal(size=(40, 8, 8, 3)).astype(np.float32), np.arange(40) % 3
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}
RANDOM, TRAINED = [np.zeros(4), np.ones(4), np.zeros(1)], [np.arange(4.0), np.zeros(4), np.arange(3.0)]


def test_biases_and_scales_say_whether_a_network_was_trained():
    assert vectors_moved(RANDOM) == (0, 2) and vectors_moved(TRAINED) == (2, 3)


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        ([3.0, 1.0, 1.0, 1.0, 1.0], False),  # too few
        ([3.0, 2.0, 1.0, 1.2, 0.99, 1.1], True),
        ([3.0, 2.0, 1.0, 1.2, 0.9, 1.1], False),
        ([3.0, 3.1, 3.2, 3.3, 3.4, 3.5], False),  # nothing was learned yet
        ([3.0, 1.0, 1.0, *[float("nan")] * 3], False),
    ],
)
def test_a_loss_has_settled_if_the_later_half_of_epochs_hardly_lowered_it(losses, settled):
    assert has_settled(losses) is settled


def timed(vectors=TRAINED, is_new=True, first_ms=5000.0):
    weights = [keras.Variable(vector) for vector in [*vectors, np.ones((2, 2))]]
    optimizer = SimpleNamespace(iterations=keras.Variable(0 if is_new else 7, dtype="int32"))
    task: Any = SimpleNamespace(model=SimpleNamespace(trainable_variables=weights, optimizer=optimizer), variables=None)
    payoff = Payoff(0.5, task)
    assert payoff.decide(10_000) == (Phase.WAITS, "")
    for call in range(11):
        is_timed_now = payoff.record_call(100.0 if call else first_ms)
        assert is_timed_now == (call == 10)
    return payoff


def test_what_is_saved_must_be_twice_what_the_change_takes():
    few, enough = timed().decide(195), timed().decide(197)
    assert few.phase is Phase.LEFT and "could save 9.8 s, less than twice the 4.9 s" in few.why
    assert enough.phase is Phase.COMPARES and "2 of 3 biases" in enough.why
    assert timed(first_ms=50.0).decide(1).phase is Phase.COMPARES


@pytest.mark.parametrize(
    ("fit", "why"), [((RANDOM, True), "since only 0 of 2 biases"), ((TRAINED, False), "has trained it before")]
)
def test_a_network_of_random_weights_or_of_an_earlier_fit_trains_until_its_validation_settles(fit, why):
    payoff = timed(*fit)
    for loss, validation in ((2.0, 3.0), (1.5, 2.0), (1.0, 1.0), (0.5, 1.2), (0.4, 1.3)):
        payoff.record_epoch({"loss": loss, "val_loss": validation})
        assert payoff.decide(10_000).phase is Phase.WAITS and why in payoff.decide(10_000).why
    payoff.record_epoch({"loss": 0.1, "val_loss": 1.3})
    decision = payoff.decide(10_000)
    assert decision.phase is Phase.COMPARES and "hardly lowered val_loss" in decision.why


def test_a_table_is_corrected_by_one_measured_selection_and_keeps_the_full_step():
    model = make_small_model()
    table, mask = make_table(model, t_fw_ms=1.0), np.arange(11) >= 6
    corrected = sharpened(table, mask, 18.0)
    assert table.predict_ms(mask) == 23.0 and corrected.predict_ms(mask) == pytest.approx(18.0)
    assert corrected.predict_ms(np.ones(11, bool)) == pytest.approx(35.0)
    assert sharpened(table, mask, 36.0) is table, "no step takes longer than a full one"


def test_times_in_turn_say_whether_elastic_steps_are_shorter_and_what_share_they_take():
    times, slow = StepTimes(pairs=2), StepTimes(pairs=2)
    for elastic_ms, waiting_ms, between_ms in ((60.0, 20.0, 30.0), (60.0, 20.0, 10.0)):
        times.elastic.append((elastic_ms, waiting_ms, between_ms))
        assert times.wants_full and not times.is_done
        times.full.append(100.0)
        slow.elastic.append((98.0, 90.0, 0.0))
        slow.full.append(100.0)
    assert times.is_done and times.medians() == (100.0, 60.0, 20.0) and times.decide().phase is Phase.TRAINS
    assert times.share(80.0) == (60 + 20) / (100 + 20)
    assert slow.decide().phase is Phase.LEFT
    assert "elastic steps take 98 ms, full ones 100 ms, 90 ms of them waiting for data" in slow.decide().why
    assert StepTimes().share(80.0) is None


@pytest.fixture
def made_up_times(monkeypatch):
    """Calls of Keras' function take 100 ms, the first one 5 s; elastic steps what the list says, one a comparison."""
    calls_ms, record = chain([5000.0], repeat(100.0)), Payoff.record_call
    monkeypatch.setattr(Payoff, "record_call", lambda self, _, steps=1: record(self, next(calls_ms), steps))
    elastic_ms: list[float] = []

    class MadeUp(StepTimes):
        made_up: float | None = None

        def __init__(self):
            super().__init__(pairs=2)

        def medians(self):
            self.made_up = elastic_ms.pop(0) if self.made_up is None else self.made_up
            return 100.0, self.made_up, 0.0

    monkeypatch.setattr(keras_fit, "StepTimes", MadeUp)
    return elastic_ms


def fitted(callbacks, epochs, is_pretrained=True):
    model = make_small_model()
    if is_pretrained:
        rng = np.random.default_rng(1)
        for variable in model.trainable_variables[:-2]:
            variable.assign(variable + 0.1 * rng.normal(size=variable.shape))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), LOSS)
    kept = [model.get_weights()]
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kept.append(model.get_weights()))
    losses = model.fit(X, Y, **FIT, epochs=epochs, callbacks=[*callbacks, keep]).history["loss"]
    return losses, kept


def equal(first, second):
    return all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def test_a_short_fit_is_left_alone(made_up_times, capsys):
    losses, weights = fitted([ElasticTraining()], 30)
    plain, plain_weights = fitted([], 30)
    assert losses == plain and equal(weights[-1], plain_weights[-1])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line]
    assert "less than twice the 4.9 s that measuring" in line and "fit goes on" in line


def test_a_pretrained_network_trains_its_upper_part_after_ten_timed_steps(made_up_times, capsys):
    made_up_times += [52.0]
    callback = ElasticTraining()
    losses, weights = fitted([callback], 50)
    plain, plain_weights = fitted([], 50)
    assert losses[:2] == plain[:2] and equal(weights[2], plain_weights[2]), "everything, by Keras' own step"
    moved = [not np.array_equal(*pair) for pair in zip(weights[-2], weights[-1], strict=True)]
    assert 0 < sum(moved) < len(moved) and not moved[0] and moved[-1]
    [selection] = callback.history.selections
    assert selection.importance is None and 0.3 < selection.predicted_share <= 0.5
    text = capsys.readouterr().out
    assert "6 of 7 biases and scales" in text and "tensors train" in text
    assert callback.history.step == 250 - 11 - 2, "two full steps came in between"


def test_steps_that_took_longer_than_asked_are_selected_again_at_most_twice(made_up_times):
    made_up_times += [70.0, 70.0, 70.0]
    callback = ElasticTraining()
    fitted([callback], 60)
    counts = [int(selection.mask.sum()) for selection in callback.history.selections]
    assert not made_up_times and len(counts) == 3 and counts[0] >= counts[1] >= counts[2]


def test_elastic_steps_that_are_not_shorter_are_not_taken(made_up_times, capsys):
    made_up_times += [110.0]
    _, weights = fitted([ElasticTraining()], 60)
    assert "elastic steps take 110 ms, full ones 100 ms; fit goes on" in capsys.readouterr().out
    assert all(not np.array_equal(*pair) for pair in zip(weights[-2][:3], weights[-1][:3], strict=True))


def test_random_weights_train_as_in_plain_fit_until_the_loss_settles(made_up_times, capsys, monkeypatch):
    monkeypatch.setattr(payoff, "has_settled", lambda losses: len(losses) == 7)
    made_up_times += [50.0]
    callback = ElasticTraining()
    losses, weights = fitted([callback], 60, is_pretrained=False)
    plain, plain_weights = fitted([], 8, is_pretrained=False)
    assert callback.history.step == 53 * 5 - 2
    assert losses[:7] == plain[:7] and equal(weights[7], plain_weights[7]) and not equal(weights[8], plain_weights[8])
    text = capsys.readouterr().out
    assert text.index("until the loss settles, since only 0 of 7") < text.index("everything has trained for 7 epochs")


@pytest.mark.parametrize("told", [{"interval": 1}, {"scheme": "elastic_training"}])
def test_what_it_is_told_holds_from_the_first_step(told):
    callback = ElasticTraining(0.6, table=make_table(make_small_model()), deterministic=True, verbose=0, **told)
    fitted([callback], 2)
    assert callback.history.step == 10 and callback.history.selections[0].importance is not None
    assert len(callback.history.selections) == (2 if "interval" in told else 1)


def test_a_forced_selection_on_random_weights_is_one_line(capsys):
    callback = ElasticTraining(0.6, scheme="elastic_training", table=make_table(make_small_model()), deterministic=True)
    fitted([callback], 1, is_pretrained=False)
    assert capsys.readouterr().out.count("may keep their random weights: only 0 of 7 biases and scales") == 1


def test_selections_take_a_tenth_of_what_steps_save():
    assert chosen_interval(1000.0, 4000.0, 0.5, 3) == 5
    assert chosen_interval(1000.0, 1e9, 0.5, 3) == chosen_interval(1.0, 0.0, 1.0, 3) == 3
