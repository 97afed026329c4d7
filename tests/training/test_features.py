"""Features that are kept: each is computed once, read as it was computed, and only where that saves time."""

import errno
import math

import keras
import numpy as np
import pytest
from conftest import BATCH, CLASSES, SIZE, make_small_data, make_small_model
from small_networks import built_optimizer, values

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.feature_cache import FeatureCache
from elastic_trainer.training.feature_store import FileStore, Kind, MemoryStore
from elastic_trainer.training.features import Features
from elastic_trainer.training.prefix import Cut, SplitStep
from elastic_trainer.training.state import TrainState
from elastic_trainer.training.step import TrainStep

layers = keras.layers


def images(augment="flip", count=24, **more):
    plain = make_small_data(count)
    return ImageData("small", plain.class_names, plain._train, plain._test, BATCH, 0, augment=augment, **more)


def head(model):
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[-2:] = True
    return mask


def split_at_head(model):
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, head(model))
    return SplitStep(step, Cut(step))


@pytest.fixture
def worth_it(monkeypatch):
    """Features are kept whatever the clock says."""
    monkeypatch.setattr("elastic_trainer.training.feature_cache.LEAST_SAVED", -math.inf)


@pytest.fixture
def computed(monkeypatch):
    """Keys whose features were computed to be kept, in their order."""
    keys: list[int] = []
    original = FeatureCache._write

    def counting(self, wanted):
        keys.extend(wanted.tolist())
        original(self, wanted)

    monkeypatch.setattr(FeatureCache, "_write", counting)
    return keys


def train(state, data, epochs, mask):
    """Losses of all steps of `epochs`."""
    losses = []
    for epoch in range(epochs):
        coming = data.order(epoch)
        state.adopt(mask, coming, epochs * data.steps_per_epoch)
        for batch in data.train(epoch):
            coming = coming.after(BATCH)
            losses.append(state.train(batch, coming).loss)
    return losses


def state_of(model, data, folder, **more):
    optimizer = built_optimizer("sgd", model)
    return TrainState(
        ImageClassification(model), optimizer, BATCH, features=Features(data, folder, **more) if folder else None
    )


@pytest.mark.parametrize("limit_mb", [None, 0.0])
def test_training_from_features_is_training_from_images_and_computes_each_once(tmp_path, worth_it, computed, limit_mb):
    """In memory and in a file."""
    results = []
    for folder in (None, tmp_path):
        model, data = make_small_model(), images(image_memory=limit_mb)
        state = state_of(model, data, folder)
        losses = train(state, data, 5, head(model))
        results.append((losses, values(model.variables)))
    assert state.features.cache is not None
    assert isinstance(state.features.cache._store, MemoryStore if limit_mb is None else FileStore)
    assert len(computed) == len(set(computed)) and set(computed) <= set(range(2 * 24))
    assert len(computed) > 40  # with two views in five epochs, 1 - 2^-5 of 48 are expected
    assert [*tmp_path.iterdir()] == []  # the file has no name
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_float16_takes_half_the_room_and_is_close(tmp_path, worth_it):
    sizes, losses = [], []
    for in_float16 in (False, True):
        model, data = make_small_model(), images()
        state = state_of(model, data, tmp_path, in_float16=in_float16)
        losses.append(train(state, data, 2, head(model)))
        sizes.append(state.features.megabytes)
    assert sizes[0] == 2 * sizes[1] > 0
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
    assert losses[0] != losses[1]


def test_stores_return_what_was_written(tmp_path):
    kinds: list[Kind] = [((2, 3), np.dtype(np.float32)), ((), np.dtype(np.int32)), ((4,), np.dtype(np.float16))]
    rng = np.random.default_rng(0)
    written = [rng.normal(size=(50, *shape)).astype(kind) for shape, kind in kinds]
    for store in (MemoryStore(50, kinds), FileStore(50, kinds, tmp_path)):
        for rows in np.split(rng.permutation(50), 5):
            store.write(rows, [array[rows] for array in written])
        rows = rng.permutation(50)[:7]
        for got, array in zip(store.read(rows), written, strict=True):
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array[rows])


def test_a_selection_that_trains_deeper_gets_new_features_and_a_shallower_one_keeps_them(tmp_path, worth_it):
    model, data = make_small_model(), images("none")
    state = state_of(model, data, tmp_path)
    deep = np.array([variable.path.startswith(("head", "tail_bn")) for variable in model.trainable_variables])
    for mask, keeps in ((deep, False), (head(model), True), (deep, True), (head(model), True)):
        before = state.features.cache
        train(state, data, 1, mask)
        assert state.features.cache is not None
        assert (state.features.cache is before) == keeps
    cache = state.features.cache
    state.adopt(deep, data.order(0), 6, keep_features=False)
    assert state.features.cache not in (None, cache)


def test_features_are_made_for_the_same_tensors_once_they_are_asked_for(tmp_path, worth_it):
    """A budget may find them worth it only later."""
    model, data = make_small_model(), images("none")
    state = state_of(model, data, tmp_path)
    assert state.adopt(head(model), data.order(0), steps=0) and state.features.cache is None
    assert not state.adopt(head(model), data.order(0), steps=0)
    assert state.adopt(head(model), data.order(0), steps=60) and state.features.cache is not None
    assert not state.adopt(head(model), data.order(0), steps=60)


def test_features_of_weights_that_were_restored_are_not_used(tmp_path, worth_it):
    model, data = make_small_model(), images("none")
    state = state_of(model, data, tmp_path)
    train(state, data, 1, head(model))
    saved = state.values()
    state.assign({name: value * 2 if "model" in name else value for name, value in saved.items()})
    assert state.features.cache is None and not state.is_adopted


@pytest.mark.parametrize("moment", ["at the start", "later"])
def test_a_full_disk_is_reported_and_training_continues(tmp_path, worth_it, monkeypatch, capsys, moment):
    plain_model, data = make_small_model(), images(image_memory=0.0)
    expected = train(state_of(plain_model, data, None), data, 2, head(plain_model))
    original, calls = FileStore.write, []

    def failing(self, rows, arrays):
        calls.append(rows)
        if moment == "at the start" or len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, rows, arrays)

    monkeypatch.setattr(FileStore, "write", failing)
    monkeypatch.setattr("elastic_trainer.training.feature_cache.MAX_ROWS", BATCH)
    model = make_small_model()
    state = state_of(model, data, tmp_path)
    assert train(state, data, 2, head(model)) == expected
    assert state.features.cache is None
    assert capsys.readouterr().out.count("feature cache disabled: [Errno 28] No space left on device") == 1


def test_too_small_a_disk_is_seen_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match="room"):
        FileStore(10**12, [((1024, 1024), np.dtype(np.float32))], tmp_path)


def test_new_views_in_every_epoch_are_reported_once(tmp_path, worth_it, capsys):
    model, data = make_small_model(), images("flip_rotate")
    state = state_of(model, data, tmp_path)
    train(state, data, 2, head(model))
    deeper = head(model)
    deeper[-4:] = True
    train(state, data, 1, deeper)
    assert state.features.cache is None
    assert capsys.readouterr().out.count("--cached_views") == 1


def test_kept_views_have_features(tmp_path, worth_it, computed):
    model, data = make_small_model(), images("flip_rotate", cached_views=3)
    train(state_of(model, data, tmp_path), data, 12, head(model))
    assert len(computed) == len(set(computed)) > 60  # of 72


@keras.saving.register_keras_serializable()
class LessBatchMean(keras.layers.Layer):
    """Subtracts the mean over the batch."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)


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


@pytest.mark.parametrize("layer", [LessBatchMean, PlusImagesBefore])
def test_layers_that_mix_the_images_of_a_batch_have_no_features(tmp_path, worth_it, capsys, layer):
    model, data = with_layer(layer()), images()
    state = state_of(model, data, tmp_path)
    train(state, data, 1, head(model))
    assert state.features.cache is None and "others of its batch" in capsys.readouterr().out


def test_features_beyond_the_range_of_float16_are_not_rounded(tmp_path, worth_it, capsys):
    model, data = with_layer(layers.Rescaling(1e6)), images()
    state = state_of(model, data, tmp_path, in_float16=True)
    train(state, data, 1, head(model))
    assert state.features.cache is None and "overflow" in capsys.readouterr().out


@pytest.mark.parametrize(("slow", "kept"), [("prefix", True), ("read", False)])
def test_features_are_kept_only_where_reading_takes_less_time(tmp_path, monkeypatch, slow, kept):
    import time

    owner = {"prefix": SplitStep, "read": FeatureCache}[slow]
    original = getattr(owner, slow)

    def waiting(self, *args):
        time.sleep(0.05)
        return original(self, *args)

    monkeypatch.setattr(owner, slow, waiting)
    model, data = make_small_model(), images("none")
    state = state_of(model, data, tmp_path)
    train(state, data, 3, head(model))
    assert (state.features.cache is not None) == kept


def test_features_that_would_hardly_be_read_again_are_not_computed(tmp_path, monkeypatch):
    """A block of images takes as long as so many single steps: with one epoch of one view nothing is read twice."""
    import time

    original = SplitStep.prefix

    def waiting(self, batch):
        time.sleep(0.005 * len(batch))
        return original(self, batch)

    monkeypatch.setattr(SplitStep, "prefix", waiting)
    kept = []
    for steps in (6, 60):
        model, data = make_small_model(), images("none")
        state = state_of(model, data, tmp_path)
        state.adopt(head(model), data.order(0), steps)
        kept.append(state.features.cache is not None)
    assert kept == [False, True]
