""".keras files: plain Keras loads them without this project, and this project restores its frozen layers."""

import itertools
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import SIZE, make_small_model
from small_networks import as_if_trained, some_images

import models
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.networks.saved_model import check_saving, load_model, save_last_and_best, save_model
from elastic_trainer.system import errors
from elastic_trainer.system.errors import UserError

ZOO = str(Path(zoo.__file__))


ELSEWHERE = """
import sys, numpy as np, keras
for kind in sys.argv[1:]:
    model = keras.models.load_model(f"{kind}.keras")
    assert "models" not in sys.modules and "utils" not in sys.modules, kind
    images = np.load(f"{kind}.npy")
    before = [v.numpy() for v in model.variables if "moving" in v.name]
    for training in (False, True):
        np.save(f"{kind}_{training}", model(images, training=training))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(images, np.zeros(len(images)), epochs=2, verbose=0)
    after = [v.numpy() for v in model.variables if "moving" in v.name]
    assert before and all((a == b).all() for a, b in zip(before, after)), kind
    norms = [layer for layer in model._flatten_layers() if type(layer) is keras.layers.BatchNormalization]
    assert norms and not any(norm.trainable_variables for norm in norms), kind
    assert any(v.name == "kernel" for v in model.trainable_variables), kind
"""


KINDS = ("nested", "branches", "normalisations")  # networks with batch norm, without dropout


def network(kind):
    """A network of the zoo, as after training."""
    keras.utils.set_random_seed(0)
    return as_if_trained(models.build_model(f"{ZOO}:{kind}", 12, 3))


def test_plain_keras_loads_saved_models_and_keeps_batch_norm_frozen(tmp_path):
    expected = {}
    for kind in KINDS:
        model = network(kind)
        save_model(model, tmp_path / f"{kind}.keras")
        images = some_images(12)
        np.save(tmp_path / f"{kind}.npy", images)
        expected[kind] = model(images, training=False).numpy()
    words = [sys.executable, "-I", "-c", ELSEWHERE, *KINDS]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for kind, training in itertools.product(KINDS, (False, True)):
        got = np.load(tmp_path / f"{kind}_{training}.npy")
        np.testing.assert_allclose(got, expected[kind], atol=1e-4 * np.abs(got).max(), err_msg=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_load_model_restores_layers_variables_and_trainability(kind, tmp_path):
    model = network(kind)
    untrained = next(layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization)
    untrained.trainable = False
    save_model(model, tmp_path / "best.keras")
    loaded = load_model(tmp_path / "best.keras", "--evaluate")
    kinds = [type(layer) for layer in loaded._flatten_layers()]
    assert FrozenBatchNormalization in kinds and keras.layers.BatchNormalization not in kinds
    for now, before in zip(loaded.trainable_variables, model.trainable_variables, strict=True):
        assert (now.name, now.shape) == (before.name, before.shape)
    for old, new in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    images = some_images(12)
    np.testing.assert_array_equal(loaded(images, training=True), model(images, training=True))
    save_model(loaded, tmp_path / "again.keras")
    again = load_model(tmp_path / "again.keras", "--evaluate")
    assert len(again.trainable_variables) == len(model.trainable_variables)


def test_saving_during_training_does_not_change_the_result(tmp_path):
    def train(saving):
        model = as_if_trained(make_small_model())
        optimizer = make_optimizer("sgd", 0.1, 5e-4, 10)
        optimizer.build(model.trainable_variables)
        step = TrainStep(ImageClassification(model), optimizer, 4)
        for k in range(4):
            step(tf.constant(some_images(SIZE, seed=k)), tf.constant([0, 1, 2, 0]))
            if saving:
                save_model(model, tmp_path / "last.keras")
        assert all(layer.trainable for layer in model._flatten_layers())
        return model

    plain, saved = train(False), train(True)
    for expected, got in zip(plain.variables, saved.variables, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [type(layer) for layer in plain.layers] == [type(layer) for layer in saved.layers]
    with pytest.raises((OSError, ValueError)):
        save_model(saved, tmp_path / "no" / "such" / "folder.keras")
    trained = keras.models.clone_model(saved)
    assert len(trained.trainable_variables) == len(saved.trainable_variables)


def test_weight_files_load_into_frozen_and_plain_networks_alike(tmp_path):
    model = network("branches")
    save_model(model, tmp_path / "best.keras")
    model.save_weights(tmp_path / "frozen.weights.h5")
    plain = keras.models.load_model(tmp_path / "best.keras")
    plain.save_weights(tmp_path / "plain.weights.h5")
    assert type(plain.layers[-1]) is not FrozenBatchNormalization
    for target, name in ((plain, "frozen.weights.h5"), (model, "plain.weights.h5"), (model, "best.keras")):
        expected = [variable.numpy() for variable in target.variables]
        for variable in target.variables:
            variable.assign(tf.zeros_like(variable))
        target.load_weights(tmp_path / name)
        for old, new in zip(expected, target.variables, strict=True):
            np.testing.assert_array_equal(old, new)


def test_a_plain_model_keeps_the_trainability_of_its_batch_norms(tmp_path):
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.BatchNormalization(name="fixed", trainable=False)(keras.layers.Conv2D(3, 3)(inputs))
    x = keras.layers.Flatten()(keras.layers.BatchNormalization(name="free")(x))
    keras.Model(inputs, keras.layers.Dense(3)(x)).save(tmp_path / "my.keras")
    loaded = load_model(tmp_path / "my.keras", "--model_name")
    assert [loaded.get_layer(name).trainable for name in ("fixed", "free")] == [False, True]
    assert type(loaded.get_layer("fixed")) is FrozenBatchNormalization


@pytest.mark.parametrize("function", zoo.ALL, ids=lambda function: function.__name__)
def test_a_model_that_cannot_be_saved_is_found_before_training(function):
    keras.utils.set_random_seed(0)
    model = models.build_model(f"{ZOO}:{function.__name__}", 12, 3)
    before = [variable.numpy() for variable in model.variables]
    if function is zoo.subclassed:
        with pytest.raises(
            UserError, match=r"^--save_model: Keras cannot save .*override `get_config\(\)`.*; or leave"
        ):
            check_saving(model, "--save_model", changes_shape=False)
    else:
        check_saving(model, "--save_model", changes_shape=False)
    if function is zoo.custom_layer:
        with pytest.raises(UserError, match=r"^--train_type prunetrain: Keras cannot save .*: it has custom layers"):
            check_saving(model, "--train_type prunetrain", changes_shape=True)
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, old)


def test_a_model_with_a_lambda_layer_is_refused_without_advice_that_no_flag_follows(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(2)])
    model.save(tmp_path / "my.keras")
    with pytest.raises(UserError, match=r"--model_name .*my\.keras: .* Lambda layer.*file\.py:function") as caught:
        load_model(tmp_path / "my.keras", "--model_name")
    assert "safe_mode" not in str(caught.value)


def test_a_model_whose_package_is_missing_is_refused_in_a_line_that_names_the_extra(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "my.keras", "w") as file:
        file.writestr("config.json", '{"module": "vit_keras.layers"}')
    monkeypatch.setitem(sys.modules, "vit_keras", None)
    with pytest.raises(UserError, match=r'/my.keras: needs vit-keras; pip install "elastic-trainer\[vit\]"'):
        load_model(tmp_path / "my.keras", "--model_name")


def test_packages_that_do_not_fit_each_other_are_reported_in_a_line():
    line = r"^data.py: a package .* the others: gencode 6 runtime 5; docs/devices.md"
    with pytest.raises(UserError, match=line), errors.importing("data.py"):
        raise RuntimeError("gencode 6 runtime 5\nmore")


def test_only_a_better_score_replaces_the_best_model(small_model, tmp_path):
    scores = (0.5, 0.5, float("nan"), 0.4, 0.7)
    best, kept = None, []
    for score in scores:
        small_model.trainable_variables[0].assign(small_model.trainable_variables[0] + 1.0)
        best = score if save_last_and_best(small_model, tmp_path, score, best) else best
        last = (tmp_path / "last.keras").read_bytes()
        kept.append((best, last == (tmp_path / "best.keras").read_bytes()))
    assert kept == [(0.5, True), (0.5, False), (0.5, False), (0.5, False), (0.7, True)]
