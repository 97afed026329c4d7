"""Validation from features of the test examples is validation from the examples."""

import numpy as np
import pytest
from conftest import BATCH, make_small_data, make_small_model
from small_networks import built_optimizer

from elastic_trainer.engine.features import Evaluation, FeatureCache
from elastic_trainer.engine.prefix import SplitStep
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import ImageClassification


@pytest.fixture
def passes(monkeypatch):
    """How many examples each call of a prefix computed."""
    counts: list[int] = []
    original = SplitStep.prefix

    def counting(self, inputs):
        counts.append(len(inputs))
        return original(self, inputs)

    monkeypatch.setattr(SplitStep, "prefix", counting)
    return counts


def upper_part(model, count):
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[-count:] = True
    return mask


def test_validation_from_features_is_validation_from_examples_and_computes_them_once_a_selection(passes):
    model, data = make_small_model(), make_small_data()
    task = ImageClassification(model)
    state = TrainState(task, built_optimizer("sgd", model), BATCH, features=FeatureCache(data))
    for count in (2, 4, 4):
        state.adopt(upper_part(model, count), True)
        for batch in data.train(count):
            state.train(batch)
            passes.clear()
            results = state.evaluation(data.test())
            assert results == Evaluation(task)(data.test()), "from the examples themselves"
        assert not passes, "only the first validation of a selection computes features"
    state.assign(state.values())
    assert state.evaluation(data.test()) == Evaluation(task)(data.test())


def test_no_features_of_the_test_examples_are_kept_without_memory_for_them(passes):
    model, data = make_small_model(), make_small_data()
    evaluation = Evaluation(ImageClassification(model))
    for room_mb, kept in ((0.0, 0), (1e3, data.test_count)):
        evaluation.keep_features(model.trainable_variables[-2:], data.test_count, room_mb)
        evaluation(data.test())
        assert sum(passes) == kept
