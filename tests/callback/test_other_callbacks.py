"""ElasticTraining beside callbacks that change weights or layers, compile, go on after a crash, or copy it."""

import contextlib
import copy
import pickle
from typing import Any

import keras
import numpy as np
import pytest
from conftest import make_small_model, make_table

from elastic_trainer import ElasticTraining, freeze_batch_norm
from elastic_trainer.system.errors import UserError

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 8, 8, 3)).astype(np.float32), np.arange(24) % 3
FIT: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}


def folded(optimizer=None):
    """A batch norm that is folded into its convolution, without dropout."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), keras.layers.BatchNormalization(name="norm")]
    rest = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)]
    model = freeze_batch_norm(keras.Sequential([keras.Input((8, 8, 3)), *layers, *rest]))
    model.compile(optimizer or "sgd", LOSS)
    return model


def elastic(model, rho=0.55, **settings):
    """The head alone trains at this rho, by a table that does not follow the clock."""
    more = {"interval": 2, "scheme": "elastic_training_upper_part", "deterministic": True, "verbose": 0, **settings}
    return ElasticTraining(rho, table=make_table(model), **more)


class AtEpochEnd(keras.callbacks.Callback):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch, logs=None):
        self.change(self.model)


def shift(model):
    [norm] = [layer for layer in model.layers if layer.name == "norm"]
    norm.beta.assign_add(np.ones(4, np.float32))


def test_weights_that_a_callback_assigns_between_epochs_are_those_of_the_next_steps():
    model, losses = folded(keras.optimizers.SGD(0.0)), []
    others = [AtEpochEnd(shift), keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: losses.append(evaluated()))]

    def evaluated():
        return float(LOSS(Y, model(X)))

    callback = elastic(model)
    found = model.fit(X, Y, **FIT, epochs=3, callbacks=[callback, *others]).history["loss"]
    assert not callback.history.selection.mask.all() and losses[0] != losses[1] != losses[2]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_averages_that_are_swapped_in_for_validation_and_at_the_end_are_those_of_plain_fit():
    results = []
    for is_elastic in (False, True):
        model = folded(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
        others = [elastic(model, rho=1.0)] if is_elastic else []
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        history = model.fit(X, Y, **FIT, epochs=3, validation_data=(X, Y), callbacks=[*others, swap]).history
        results.append([*history["loss"], *history["val_loss"]])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def compile_again(model):
    model.compile("sgd", LOSS)
    model.make_train_function()


def freeze(model):
    model.layers[0].trainable = False


@pytest.mark.parametrize(("change", "message"), [(compile_again, "^the model was compiled"), (freeze, "^`trainable`")])
def test_what_makes_its_steps_wrong_is_refused_in_one_line(change, message):
    model = folded()
    with pytest.raises(UserError, match=message) as error:
        model.fit(X, Y, **FIT, epochs=4, callbacks=[elastic(model), AtEpochEnd(change)])
    assert "\n" not in str(error.value)


def test_layers_that_were_frozen_after_compile_do_not_train():
    results = []
    for is_elastic in (False, True):
        model = folded()
        model.layers[0].trainable = False
        history = model.fit(X, Y, **FIT, callbacks=[elastic(model, rho=1.0)] if is_elastic else []).history
        results.append([history["loss"], *map(np.ravel, model.get_weights())])
    for plain, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-4)


def test_layers_that_were_freed_after_the_optimizer_was_built_are_refused_in_one_line():
    model = folded()
    model.layers[0].trainable = False
    model.compile("sgd", LOSS)
    model.fit(X, Y, **FIT)
    model.layers[0].trainable = True
    with pytest.raises(UserError, match=r"compile the model again after changing trainable$") as error:
        model.fit(X, Y, **FIT, callbacks=[elastic(model)])
    assert "\n" not in str(error.value)


class Crash(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            raise RuntimeError("power cut")


def test_after_a_crash_it_selects_at_the_steps_of_an_undisturbed_fit(tmp_path):
    def trained(*more, epochs=6):
        model = make_small_model()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOSS)
        callback = elastic(model, 0.7, scheme="elastic_training")
        with contextlib.suppress(RuntimeError):
            model.fit(X, Y, **FIT, epochs=epochs, callbacks=[callback, *more])
        return [selection.step for selection in callback.history.selections], int(model.optimizer.iterations.numpy())

    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert trained() == ([0, 6, 12], 18)
    assert trained(backup, Crash()) == ([0, 6], 9)
    assert trained(keras.callbacks.BackupAndRestore(tmp_path / "backup")) == ([0, 3], 18), "after 9 steps, at 12"


def test_a_callback_serves_several_models_and_batch_sizes_and_is_copied():
    callback = ElasticTraining(0.7, deterministic=True, verbose=0, table=make_table(make_small_model()))
    for fold, batch_size in enumerate((8, 6)):
        model = make_small_model(fold)
        model.compile("sgd", LOSS)
        model.fit(X, Y, **{**FIT, "batch_size": batch_size}, callbacks=[callback])
        assert callback.history.step == 24 // batch_size
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        model = make_small_model()
        model.compile("sgd", LOSS)
        model.fit(X, Y, **FIT, callbacks=[other])
        assert other.history.step == 3 and callback.history.step == 4
