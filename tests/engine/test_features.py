"""Cached features: each is computed once, and read as it was computed; validation from them."""

from collections import Counter

import keras
import numpy as np
import pytest
from conftest import BATCH, CLASSES, SIZE, make_small_data, make_small_model
from small_networks import built_optimizer, values

import train as training
from elastic_trainer.datasets.batches import Batch
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.engine.closed_form_head import closed_form_head
from elastic_trainer.engine.features import Evaluation, FeatureCache
from elastic_trainer.engine.prefix import SplitStep
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings

layers = keras.layers


def images(augment="flip", count=24, kind=ImageData):
    plain = make_small_data(count)
    return kind("small", plain.class_names, plain.train_images, plain.test_images, BATCH, 0, augment=augment)


def head(model):
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[-2:] = True
    return mask


@pytest.fixture
def computed(monkeypatch):
    """Rows and views of the training images that were asked for, in their order."""
    keys: list[tuple[int, int]] = []
    original = ImageData.training_inputs

    def counting(self, order):
        keys.extend(zip(*(part.tolist() for part in order), strict=True))
        return original(self, order)

    monkeypatch.setattr(ImageData, "training_inputs", counting)
    return keys


def train(state, data, epochs, mask, uses_features=True):
    """Losses of all steps of `epochs`."""
    state.adopt(mask, uses_features)
    return [state.train(batch).loss for epoch in range(epochs) for batch in data.train(epoch)]


def state_of(model, data):
    return TrainState(ImageClassification(model), built_optimizer("sgd", model), BATCH, features=FeatureCache(data))


@pytest.mark.parametrize(("augment", "views"), [("flip", 2), ("flip_crop", 5)])
def test_training_from_features_is_training_from_images_and_computes_each_once(augment, views, computed):
    results = []
    for uses_features in (False, True):
        model, data = make_small_model(), images(augment)
        computed.clear()
        state = state_of(model, data)
        losses = train(state, data, 13, head(model), uses_features)
        results.append((losses, values(model.variables)))
        assert (state.features.split is not None) == uses_features
    made = computed[BATCH:]  # the first ones find the shapes
    shown = {pair for epoch in range(13) for batch in data.train(epoch) for pair in zip(*batch.order, strict=True)}
    assert len(made) == len(set(made)) and set(made) == shown and {view for _, view in made} == set(range(views))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_pass_over_the_training_images_leaves_their_features_to_training(computed):
    data = images()
    expected = train(state_of(make_small_model(), data), data, 3, head(make_small_model()))
    state = state_of(make_small_model(), data)
    state.adopt(head(state.model), True)
    assert state.features.missing_share == 1
    closed_form_head(state.task, data, kept=state.features)
    assert state.features.missing_share == 0
    computed.clear()
    assert train(state, data, 3, head(state.model)) == expected
    assert {view for _, view in computed} == {1}, "of the photos themselves, no feature is missing"


class InSmallBlocks(ImageData):
    max_rows = property(lambda self: 8, lambda self, rows: None)


def test_a_run_computes_each_feature_once_its_first_model_and_its_last_included(computed, tmp_path):
    settings = Settings(
        trained_layers=2, feature_cache="float32", starts_with_head=True, average_head=True, save_model=True
    )
    model, data = make_small_model(), images(kind=InSmallBlocks)
    with RunLog(tmp_path, {}, tensor_names(model)) as log:
        summary = training.train("last_layers_training", model, data, settings, log)
    assert summary["starts_with_head"] and summary["average_head_seconds"] and summary["feature_seconds"]
    later = [pair for pair in computed if pair[0] >= 8]  # the first block is compared
    assert {*Counter(later).values()} == {1} and {view for _, view in later} == {0, 1}
    assert later[:16] == [(row, 0) for row in range(8, 24)], "the first model's pass comes before the first step"


def test_another_selection_gets_new_features_and_the_same_keeps_them():
    model, data = make_small_model(), images("none")
    state = state_of(model, data)
    deep = np.array([variable.path.startswith(("head", "tail_bn")) for variable in model.trainable_variables])
    for mask, keeps in ((deep, False), (deep, True), (head(model), False), (deep, False)):
        before = state.features.split
        train(state, data, 1, mask)
        assert state.features.split is not None
        assert (state.features.split is before) == keeps


def test_features_are_made_for_the_same_tensors_once_they_are_asked_for():
    """A budget may find them worth it only later."""
    model, data = make_small_model(), images("none")
    state = state_of(model, data)
    for uses_features, compiled in ((False, 1), (False, 1), (True, 2), (True, 2)):
        state.adopt(head(model), uses_features)
        assert state.compiled == compiled and (state.features.split is not None) == uses_features


def test_too_little_memory_is_reported_and_training_goes_on_from_images(capsys, monkeypatch):
    monkeypatch.setattr("elastic_trainer.datasets.images.free_memory_mb", lambda: 0.0)
    plain_model, data = make_small_model(), images()
    expected = train(state_of(plain_model, data), data, 2, head(plain_model), uses_features=False)
    model = make_small_model()
    state = state_of(model, data)
    assert train(state, data, 2, head(model)) == expected
    assert state.features.split is None and not state.features.are_possible
    assert capsys.readouterr().out.count("0 MB are available") == 1


def test_where_memory_is_little_fewer_views_are_kept_which_stand_for_the_others(monkeypatch):
    state, data = state_of(make_small_model(), images("flip_crop")), images("flip_crop")
    train(state, data, 1, head(state.model))
    view_mb = state.features.kept_mb / 8

    class Fewer(ImageData):
        def views(self, epoch):
            return super().views(epoch) % 3

    state = state_of(make_small_model(), data)
    expected = train(state, images("flip_crop", kind=Fewer), 13, head(state.model), uses_features=False)
    monkeypatch.setattr("elastic_trainer.datasets.images.free_memory_mb", lambda: 4 * 6.5 * view_mb)
    state = state_of(make_small_model(), data)
    assert train(state, data, 13, head(state.model)) == expected
    assert state.features.kept_mb == pytest.approx(3 * view_mb), "the rest of the half is too little for a fourth"


@pytest.mark.parametrize("uses_features", [True, False])
def test_new_views_in_every_epoch_are_reported_once(capsys, uses_features):
    model, data = make_small_model(), images("flip_rotate")
    state = state_of(model, data)
    train(state, data, 2, head(model), uses_features)
    deeper = head(model)
    deeper[-4:] = True
    train(state, data, 1, deeper, uses_features)
    assert state.features.split is None
    assert capsys.readouterr().out.count("new views in every epoch") == 1


@keras.saving.register_keras_serializable()
class PlusImagesBefore(keras.layers.Layer):
    """The sum of each image and those before it in the batch."""

    def call(self, inputs):
        return keras.ops.cumsum(inputs, axis=0)


def with_layer(layer):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layer(layers.Conv2D(4, 3)(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D()(x)))


def test_layers_that_mix_the_images_of_a_batch_have_no_features(capsys):
    model, data = with_layer(PlusImagesBefore()), images()
    state = state_of(model, data)
    train(state, data, 1, head(model))
    assert state.features.split is None and "others of its batch" in capsys.readouterr().out


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


def test_validation_from_features_is_validation_from_examples_and_computes_them_once_a_selection(passes):
    model, data = make_small_model(), make_small_data()
    state, task = state_of(model, data), ImageClassification(model)
    for count in (2, 4, 4):
        state.adopt(np.arange(len(model.trainable_variables)) >= len(model.trainable_variables) - count, True)
        for batch in data.train(count):
            state.train(batch)
            passes.clear()
            results = state.evaluation(data.test())
            assert (state.evaluation.made_seconds > 0) == bool(passes) and state.evaluation.has_features
            assert results == Evaluation(task)(data.test()), "from the examples themselves"
        assert not passes, "only the first validation of a selection computes features"
    no_inputs = (Batch(lambda: 1 / 0, batch.targets) for batch in data.test())
    assert state.evaluation(no_inputs) == results, "the later ones read no example"
    state.assign(state.values())
    assert state.evaluation(data.test()) == Evaluation(task)(data.test())


def test_no_features_of_the_test_examples_are_kept_without_memory_for_them(passes):
    model, data = make_small_model(), make_small_data()
    evaluation = Evaluation(ImageClassification(model))
    for room_mb, kept in ((0.0, 0), (1e3, data.test_count)):
        evaluation.keep_features(model.trainable_variables[-2:], data.test_count, room_mb)
        evaluation(data.test())
        assert sum(passes) == kept


@pytest.mark.parametrize("spoils", [False, True])
def test_a_closed_form_head_starts_from_the_features_if_they_are_what_it_needs(spoils, passes, monkeypatch):
    model, data = make_small_model(), images("none")
    data.max_rows = 4
    state = state_of(model, data)
    train(state, data, 2, head(model))
    if spoils:  # as where the step keeps other tensors of the same shape
        read = FeatureCache.read
        monkeypatch.setattr(FeatureCache, "read", lambda self, order: [value + 1 for value in read(self, order)])
    passes.clear()
    found = closed_form_head(state.task, data, kept=state.features)
    assert sum(passes) == 4, "the first block is compared"
    expected = closed_form_head(state.task, data)
    assert found is not None and expected is not None
    for one, other in zip(found.head, expected.head, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
