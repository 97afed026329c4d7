"""The public loop: it runs some steps, hands over its state and goes on; listeners; tasks other than images."""

import csv
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BATCH, make_small_data, make_small_model, make_table

from elastic_trainer import ArrayData, Settings, Trainer
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.listener import Listener
from elastic_trainer.selection.schemes import FixedScheme
from elastic_trainer.system.errors import UserError

SETTINGS = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6, deterministic=True)


def weights(trainer):
    return [variable.numpy() for variable in trainer.training.model.variables]


def image_trainer(**more):
    model = make_small_model()
    return Trainer(model, make_small_data(), "elastic_training", SETTINGS, table=make_table(model, t_fw_ms=1.0), **more)


def sequences(count=24):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, 6, 4)).astype(np.float32)
    return x, x[:, :, 0].mean(axis=1, keepdims=True), np.linspace(0.5, 1.5, count, dtype=np.float32)


def regression_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv1D(8, 3), keras.layers.Conv1D(6, 3, activation="relu"), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((6, 4)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


def regression_trainer(scheme="elastic_training_upper_part", **changes):
    model = regression_model()
    data = ArrayData(sequences(), sequences(8), batch_size=4)
    return Trainer(model, data, scheme, replace(SETTINGS, **changes), table=make_table(model, t_fw_ms=1.0))


def test_the_closed_form_head_is_one_step_whatever_the_settings_say():
    trainer = Trainer(make_small_model(), make_small_data(), "closed_form_head", SETTINGS)
    trainer.run()
    assert trainer.history.step == len(trainer.history.epochs) == 1


@pytest.mark.parametrize("make", [image_trainer, regression_trainer])
def test_a_run_in_parts_and_a_state_handed_over_at_any_step_give_what_one_run_gives(make):
    def kept(results):
        return {name: results[name] for name in results if name.startswith(("best_", "final_", "steps"))}

    whole, parts = make(), make()
    expected = whole.run()
    states = []
    for step in (1, 6, 9):
        assert parts.run(until_step=step) is None and parts.history.step == step
        states.append(parts.state())  # a copy: the run goes on
    for state in states:
        other = make()
        other.load(state)
        assert kept(other.run()) == kept(expected) and other.history.step == 18
        for one, another in zip(weights(whole), weights(other), strict=True):
            np.testing.assert_array_equal(one, another)
    assert kept(parts.run()) == kept(expected) and parts.is_finished
    for one, another in zip(weights(whole), weights(parts), strict=True):
        np.testing.assert_array_equal(one, another)


def test_exactly_the_selected_variables_of_a_regression_move_over_two_selections():
    trainer = regression_trainer("elastic_training")
    names, before = tensor_names(trainer.training.model), weights(trainer)
    for epoch in range(3):
        trainer.run(until_step=6 * (epoch + 1))
        after = weights(trainer)
        changed = {
            variable.path
            for variable, old, new in zip(trainer.training.model.variables, before, after, strict=True)
            if not np.array_equal(old, new)
        }
        mask = trainer.history.selections[epoch].mask
        assert changed == {name for name, trains in zip(names, mask, strict=True) if trains} and not mask.all()
        before = after


def test_features_of_a_regression_are_kept_and_give_the_same_weights():
    cached, plain = regression_trainer(interval=3, feature_cache="float32"), regression_trainer(interval=3, rho=0.9)
    cached.run()
    plain.scheme = FixedScheme(cached.history.selection.mask)
    plain.run()
    assert cached.results()["feature_mb"] > 0 == plain.results()["feature_mb"]
    for one, other in zip(weights(cached), weights(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def multi_label():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["binary_accuracy", keras.metrics.AUC(name="auc")])
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    return model, x, (x[:, :3] > 0).astype(np.float32)


def two_outputs():
    inputs = [keras.Input((4,)), keras.Input((2,))]
    x = keras.layers.Dense(6, "relu")(keras.layers.Concatenate()(inputs))
    model = keras.Model(inputs, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(2, name="b")(x)])
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 0.5])
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    return model, [x, x[:, :2]], [x[:, :1], x[:, 2:]]


@pytest.mark.parametrize("make", [multi_label, two_outputs])
def test_full_training_of_any_task_is_what_keras_does_on_the_same_batches(make):
    keras.utils.set_random_seed(0)
    model, x, y = make()
    twin, *_ = make()
    twin.set_weights(model.get_weights())
    data = ArrayData((x, y), (x, y), batch_size=BATCH)
    trainer = Trainer(model, data, "full_training", Settings(num_epochs=2))
    trainer.run()
    for epoch in range(2):
        for batch in data.train(epoch):
            twin.train_on_batch(batch.inputs, batch.targets)
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    expected = twin.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    row = trainer.history.epochs[-1]
    assert {name.removeprefix("test_") for name in row if name.startswith("test_")} == set(expected)
    for name, value in expected.items():
        assert row[f"test_{name}"] == pytest.approx(value, rel=1e-3), name
    assert "test_accuracy" not in row


class Hooks(Listener):
    """The names of all hooks in the order they are called, without those that Keras calls from others."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __getattribute__(self, name):
        if name.startswith("on_") and not name.startswith(("on_batch", "on_tick")):
            self.names.append(name)
        return super().__getattribute__(name)


def test_hooks_come_in_keras_order():
    hooks = Hooks()
    image_trainer(listeners=[hooks]).run(until_step=7)
    step = ["on_train_batch_begin", "on_train_batch_end"]
    first = ["on_train_batch_begin", "on_selection_begin", "on_selection_end", "on_train_batch_end"]
    validation = ["on_test_begin", "on_test_batch_begin", "on_test_end", "on_epoch_end"]
    assert hooks.names == ["on_train_begin", "on_epoch_begin", *first, *step * 5, *validation, "on_epoch_begin", *first]


def test_callbacks_of_keras_listen(tmp_path):
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)
    log, events = keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path)
    trainer = image_trainer(listeners=[stop, log, events])
    results = trainer.run()
    assert results["epochs"] == 2 and results["steps"] == 12 and trainer.is_finished, "early stopping ended it"
    rows = [*csv.DictReader((tmp_path / "log.csv").open())]
    assert len(rows) == 2 and {"loss", "accuracy", "val_loss", "val_accuracy"} <= {*rows[0]}
    assert list(tmp_path.glob("**/events.out.*"))


def test_a_table_of_another_network_is_refused():
    for other in (make_small_model(), keras.Sequential([keras.Input((6, 4)), keras.layers.Dense(1)])):
        with pytest.raises(UserError, match="table is of another network"):
            Trainer(regression_model(), ArrayData(sequences(), sequences(8), 4), table=make_table(other))


def test_a_compiled_model_is_not_pruned():
    with pytest.raises(UserError, match="prunetrain: replaces the network"):
        Trainer(regression_model(), ArrayData(sequences(), sequences(8), 4), "prunetrain")


def test_arrays_that_are_no_examples_are_refused():
    (x, y, w), nothing = sequences(), sequences(0)
    for train, test, message in (
        (nothing, (x, y, w), "no examples"),
        ((x, y, w), nothing, "no examples"),
        ((x, y, w), (x, y), "for both, or for none"),
        (x, y, r"tuple \(inputs, targets\)"),
        ((x, y[:-1], w), (x, y, w), r"\[23, 24\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ArrayData(train, test, 4)


def test_inputs_of_any_structure_come_in_the_same_order():
    x = {"a": np.arange(8), "b": [np.arange(8) * 2.0]}
    data = ArrayData((x, np.arange(8), np.arange(8)), (x, np.arange(8), np.ones(8)), batch_size=4)
    for batch in data.train(0):
        np.testing.assert_array_equal(batch.inputs["a"], batch.targets)
        np.testing.assert_array_equal(batch.inputs["b"][0], 2.0 * tf.cast(batch.weights, tf.float64))
