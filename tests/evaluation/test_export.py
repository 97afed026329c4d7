"""What leaves the project: TensorFlow Lite files that answer as Keras does, and .keras files that plain Keras loads."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import CLASSES, SIZE, make_small_data, make_small_model

import models
from elastic_trainer.evaluation import export
from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm_statistics
from elastic_trainer.networks.saved_model import load_model, save_model
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.step import TrainStep
from utils import UserError

ZOO = str(Path(zoo.__file__))


def unsettled(model, seed=0):
    """`model` with batch-norm statistics and weights as far from their start as training would take them."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if variable.name in ("moving_mean", "beta", "bias"):
            variable.assign(rng.normal(0, 0.1, variable.shape))
        if variable.name in ("moving_variance", "gamma"):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def some_images(size, count=4, seed=0):
    return np.random.default_rng(seed).uniform(0, 255, (count, size, size, 3)).astype(np.float32)


def largest_difference(model, converted, images):
    """Of the logits, as a share of the largest logit."""
    expected = model(images, training=False).numpy()
    interpreter = export.Interpreter(converted)
    got = np.array([interpreter(image) for image in images])
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


# --- TensorFlow Lite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantise", [False, True])
def test_the_small_network_answers_as_keras_does(quantise):
    model = unsettled(make_small_model())
    converted = export.convert(model, quantise)
    assert converted.tensorflow_kernels == ()
    assert largest_difference(model, converted, some_images(SIZE)) < (0.05 if quantise else 1e-5)
    details = export.Interpreter(converted).input
    assert (tuple(details["shape"]), details["dtype"]) == ((1, SIZE, SIZE, 3), np.float32)


def test_mobilenet_without_its_augmentation_and_smaller_when_quantised():
    keras.utils.set_random_seed(0)
    model = unsettled(models.build_model("mobilenetv2", 32, 10, alpha=0.35, augment="flip_rotate"))
    plain, quantised = export.convert(model, False), export.convert(model, True)
    assert largest_difference(model, plain, some_images(32)) < 1e-4
    assert len(quantised.content) < 0.5 * len(plain.content) < 0.5 * 4.5 * model.count_params()
    assert largest_difference(model, quantised, some_images(32)) < 0.5
    assert plain.tensorflow_kernels == quantised.tensorflow_kernels == ()


@pytest.mark.parametrize("function", zoo.ALL, ids=lambda function: function.__name__)
def test_own_networks_convert(function):
    keras.utils.set_random_seed(0)
    model = unsettled(models.build_model(f"{ZOO}:{function.__name__}", 12, CLASSES, augment="flip"))
    assert largest_difference(model, export.convert(model, False), some_images(12)) < 1e-4


class ByPython(keras.layers.Layer):
    """An operation that only Python can do."""

    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(lambda x: x * 2, [inputs], tf.float32), inputs.shape)


def test_what_the_converter_cannot_express_is_one_line():
    inputs = keras.Input((SIZE, SIZE, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(ByPython()(inputs))))
    with pytest.raises(UserError, match="--export tflite: TensorFlow Lite cannot express this model") as caught:
        export.convert(model, False)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


class ErrorFunction(keras.layers.Layer):
    """An operation that TensorFlow Lite has no kernel for, but TensorFlow has."""

    def call(self, inputs):
        return tf.math.erf(inputs / 255)


def test_tensorflows_kernels_are_taken_where_need_be_and_said(tmp_path):
    inputs = keras.Input((SIZE, SIZE, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(ErrorFunction()(inputs))))
    text = export.export_tflite(model, make_small_data(), tmp_path, "m")
    assert "model.tflite needs TensorFlow's own kernels (SELECT_TF_OPS): Erf" in text
    row = json.loads((tmp_path / "export.json").read_text())["model.tflite"]
    assert row["tensorflow_kernels"] == ["Erf"]
    assert (tmp_path / "model.tflite").stat().st_size == row["bytes"]
    if row["accuracy"] is None:  # TensorFlow 2.20 and later
        assert "NOT checked" in text
    else:
        assert row["largest_logit_difference"] < 1e-4


def test_the_files_are_written_checked_and_reported(tmp_path):
    model, dataset = unsettled(make_small_model()), make_small_data()
    text = export.export_tflite(model, dataset, tmp_path, "somewhere/best.keras")
    record = json.loads((tmp_path / "export.json").read_text())
    assert (tmp_path / "labels.txt").read_text().splitlines() == ["0", "1", "2"]
    images = np.concatenate([batch.numpy() for batch, _ in dataset.test()])
    labels = np.concatenate([labels.numpy() for _, labels in dataset.test()])
    accuracy = np.mean(model(images).numpy().argmax(axis=1) == labels)
    for name in ("model.tflite", "model_dynamic.tflite"):
        row = record[name]
        assert row["bytes"] == (tmp_path / name).stat().st_size
        assert row["latency_one_thread_ms"] > 0 and row["latency_all_threads_ms"] > 0
    assert record["keras"]["accuracy"] == record["model.tflite"]["accuracy"] == pytest.approx(accuracy)
    assert record["model.tflite"]["same_class_share"] == 1.0
    assert record["model.tflite"]["largest_logit_difference"] < 1e-4
    assert (record["checked_images"], record["input"], record["outputs"]) == (24, [1, SIZE, SIZE, 3], 3)
    assert "model_dynamic.tflite" in text and "warning" not in text
    # as any other program would read the file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tf.lite's own end
        interpreter = tf.lite.Interpreter(str(tmp_path / "model.tflite"))
    run = interpreter.get_signature_runner()
    np.testing.assert_allclose(run(image=images[:1])["logits"], model(images[:1]), rtol=1e-4, atol=1e-5)


def test_a_file_that_answers_differently_is_warned_about(tmp_path, monkeypatch):
    model, dataset = unsettled(make_small_model()), make_small_data()
    other = unsettled(make_small_model(), seed=1)
    right = export.convert
    monkeypatch.setattr(export, "convert", lambda model, quantise: right(other, quantise))
    text = export.export_tflite(model, dataset, tmp_path, "m")
    assert "warning: model.tflite differs from Keras" in text
    assert json.loads((tmp_path / "export.json").read_text())["model.tflite"]["largest_logit_difference"] > 0.01


def test_the_checked_images_are_spread_over_the_whole_split():
    dataset = make_small_data()
    images, labels = export.checked_images(dataset, most=7)
    everything = np.concatenate([batch.numpy() for batch, _ in dataset.test()])
    positions = [int(np.flatnonzero((everything == image).all(axis=(1, 2, 3)))[0]) for image in images]
    assert positions == [0, 4, 8, 12, 15, 19, 23]
    assert list(labels) == [position % CLASSES for position in positions]
    assert len(export.checked_images(dataset)[0]) == 24


# --- .keras files -----------------------------------------------------------------------------------------------------

ELSEWHERE = """
import sys, numpy as np, keras
path, images, answers = sys.argv[1:]
model = keras.models.load_model(path)
assert "models" not in sys.modules and "utils" not in sys.modules
images = np.load(images)
before = [v.numpy() for v in model.variables if "moving" in v.name]
for training in (False, True):
    np.save(answers + str(training), model(images, training=training))
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(images, np.zeros(len(images)), epochs=2, verbose=0)
after = [v.numpy() for v in model.variables if "moving" in v.name]
assert before and all((a == b).all() for a, b in zip(before, after))
norms = [layer for layer in model._flatten_layers() if type(layer) is keras.layers.BatchNormalization]
assert norms and not any(norm.trainable_variables for norm in norms)
assert any(v.name == "kernel" for v in model.trainable_variables)
"""


def network(kind):
    """A network without dropout and augmentation, so that training and inference must agree; and its input size."""
    keras.utils.set_random_seed(0)
    if kind == "mobilenetv2":
        inputs = keras.Input((32, 32, 3))
        backbone = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, include_top=False, weights=None)
        x = keras.layers.GlobalAveragePooling2D()(backbone(keras.layers.Rescaling(1 / 127.5, -1)(inputs)))
        model = keras.Model(inputs, keras.layers.Dense(3)(x))
        return unsettled(freeze_batch_norm_statistics(model)), 32
    return unsettled(models.build_model(f"{ZOO}:{kind}", 12, 3, augment="none")), 12


@pytest.mark.parametrize("kind", ["mobilenetv2", "nested", "branches", "normalisations"])
def test_a_saved_model_loads_where_nobody_knows_this_project(kind, tmp_path):
    model, size = network(kind)
    save_model(model, tmp_path / "best.keras")
    images = some_images(size)
    np.save(tmp_path / "images.npy", images)
    words = [sys.executable, "-I", "-c", ELSEWHERE, "best.keras", "images.npy", "answers"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    expected = model(images, training=False).numpy()
    for training in (False, True):
        got = np.load(tmp_path / f"answers{training}.npy")
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["mobilenetv2", "nested", "branches", "normalisations"])
def test_here_a_saved_model_is_what_it_was(kind, tmp_path):
    model, size = network(kind)
    untrained = next(layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization)
    untrained.trainable = False  # as a user may wish
    save_model(model, tmp_path / "best.keras")
    loaded = load_model(tmp_path / "best.keras", "--evaluate")
    kinds = [type(layer) for layer in loaded._flatten_layers()]
    assert FrozenBatchNormalization in kinds and keras.layers.BatchNormalization not in kinds
    for now, before in zip(loaded.trainable_variables, model.trainable_variables, strict=True):
        assert (now.name, now.shape) == (before.name, before.shape)
    for old, new in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    images = some_images(size)
    np.testing.assert_array_equal(loaded(images, training=True), model(images, training=True))
    save_model(loaded, tmp_path / "again.keras")
    again = load_model(tmp_path / "again.keras", "--evaluate")
    assert len(again.trainable_variables) == len(model.trainable_variables)


def test_saving_does_not_disturb_a_model_in_training(tmp_path):
    def train(saving):
        model = unsettled(make_small_model())
        optimizer = make_optimizer("sgd", 0.1, 5e-4, 10)
        optimizer.build(model.trainable_variables)
        step = TrainStep(model, optimizer, 4)
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
    trained = keras.models.clone_model(saved)
    assert len(trained.trainable_variables) == len(saved.trainable_variables)


def test_a_failing_save_leaves_the_model_as_it_was(tmp_path):
    model = make_small_model()
    kinds = [type(layer) for layer in model.layers]
    with pytest.raises((OSError, ValueError)):
        save_model(model, tmp_path / "no" / "such" / "folder.keras")
    assert [type(layer) for layer in model.layers] == kinds


def test_weights_go_to_and_fro_between_frozen_and_plain_networks(tmp_path):
    model, _ = network("branches")
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


def test_a_plain_model_of_the_users_keeps_what_it_trains(tmp_path):
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.BatchNormalization(name="fixed", trainable=False)(keras.layers.Conv2D(3, 3)(inputs))
    x = keras.layers.Flatten()(keras.layers.BatchNormalization(name="free")(x))
    keras.Model(inputs, keras.layers.Dense(3)(x)).save(tmp_path / "my.keras")
    loaded = load_model(tmp_path / "my.keras", "--model_name")
    assert [loaded.get_layer(name).trainable for name in ("fixed", "free")] == [False, True]
    assert type(loaded.get_layer("fixed")) is FrozenBatchNormalization
