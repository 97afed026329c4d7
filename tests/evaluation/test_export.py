"""TensorFlow Lite files: they predict what Keras predicts, and the report says where they do not."""

import json
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from command_line import NETWORK, train_here
from conftest import CLASSES, SIZE, make_small_data, make_small_model
from small_images import labels_of
from small_networks import as_if_trained, some_images

import main
import models
from elastic_trainer.cli.commands import parse_main
from elastic_trainer.datasets.images import evenly
from elastic_trainer.evaluation import export
from elastic_trainer.system.errors import UserError

ZOO = str(Path(zoo.__file__))


def largest_difference(model, converted, images):
    """The largest difference between two logits, divided by the largest logit."""
    expected = model(images, training=False).numpy()
    interpreter = export.Interpreter(converted)
    got = np.array([interpreter(image) for image in images])
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


def test_converted_mobilenet_is_smaller_when_quantised():
    keras.utils.set_random_seed(0)
    model = as_if_trained(models.build_model("mobilenetv2", 32, 10, alpha=0.35))
    plain, quantised = export.convert(model, False, True)
    assert largest_difference(model, plain, some_images(32)) < 1e-4
    assert len(quantised) < 0.5 * len(plain) < 0.5 * 4.5 * model.count_params()
    assert largest_difference(model, quantised, some_images(32)) < 0.5


@pytest.mark.parametrize("function", zoo.ALL, ids=lambda function: function.__name__)
def test_converted_own_networks_return_the_logits_of_keras(function):
    keras.utils.set_random_seed(0)
    model = as_if_trained(models.build_model(f"{ZOO}:{function.__name__}", 12, CLASSES))
    [converted] = export.convert(model, False)
    assert largest_difference(model, converted, some_images(12)) < 1e-4


class Calls(keras.layers.Layer):
    """Calls a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return tf.ensure_shape(self.function(inputs), inputs.shape)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: tf.numpy_function(lambda x: x * 2, [x], tf.float32), "[^\n]{1,300}"),  # it runs Python
        (tf.math.erf, "it has no kernel for Erf"),  # in TensorFlow Lite
    ],
)
def test_a_model_that_cannot_be_converted_is_refused_in_one_line_and_nothing_is_written(function, reason, tmp_path):
    inputs = keras.Input((SIZE, SIZE, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(Calls(function)(inputs))))
    with pytest.raises(UserError, match=f"^--export: .* cannot run this model: {reason}$"):
        export.export_tflite(model, make_small_data(), tmp_path, "m")
    assert not [*tmp_path.iterdir()]


def interpreter_of(path):
    """As any other program would read the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tf.lite.Interpreter is deprecated
        return tf.lite.Interpreter(str(path))


def test_the_files_are_written_checked_and_reported(tmp_path):
    model, dataset = as_if_trained(make_small_model()), make_small_data(120)
    text = export.export_tflite(model, dataset, tmp_path, "somewhere/best.keras")
    record = json.loads((tmp_path / "export.json").read_text())
    assert (tmp_path / "labels.txt").read_text().splitlines() == ["0", "1", "2"]
    images = np.concatenate([batch.inputs.numpy() for batch in dataset.test()])
    labels = labels_of(dataset.test())
    accuracy = np.mean(model(images).numpy().argmax(axis=1) == labels)
    for name in ("model.tflite", "model_dynamic.tflite"):
        row = record[name]
        assert row["bytes"] == (tmp_path / name).stat().st_size
        assert row["latency_ms"] > 0
    assert record["keras"]["accuracy"] == record["model.tflite"]["accuracy"] == pytest.approx(accuracy)
    assert record["model.tflite"]["same_class_share"] == 1.0
    assert record["model.tflite"]["largest_logit_difference"] < 1e-4
    assert (record["checked_images"], record["input"], record["outputs"]) == (120, [1, SIZE, SIZE, 3], 3)
    assert evenly(24, 7).tolist() == [0, 4, 8, 12, 15, 19, 23], "of more, those that are checked are spread"
    assert "model_dynamic.tflite" in text and "warning" not in text and "accuracy" in text
    run = interpreter_of(tmp_path / "model.tflite").get_signature_runner()
    np.testing.assert_allclose(run(image=images[:1])["logits"], model(images[:1]), rtol=1e-4, atol=1e-5)


def test_a_file_of_integers_alone_predicts_what_the_float_model_predicts(tmp_path, capsys):
    more = ["--batch_size", "16", "--train_type", "full_training", "--num_epochs", "8", "--learning_rate", "0.1"]
    train_here(*NETWORK, *more, "--logdir", tmp_path, "--run_name", "mine", "--export", "tflite_int8")
    printed = capsys.readouterr().out
    assert "model_int8.tflite is calibrated on 100 training images" in printed
    interpreter = interpreter_of(tmp_path / "mine" / "model_int8.tflite")
    ends = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    assert [one["dtype"] for one in ends] == [np.int8, np.int8]
    kinds = {np.dtype(tensor["dtype"]).name for tensor in interpreter.get_tensor_details()}
    assert kinds <= {"int8", "int32", "int64"}, "biases and shapes have more bits"
    record = json.loads((tmp_path / "mine" / "export_int8.json").read_text())
    row, accuracy = record["model_int8.tflite"], record["keras"]["accuracy"]
    assert accuracy > 0.3 and abs(row["accuracy"] - accuracy) < 0.05 and row["same_class_share"] > 0.85
    assert f"{accuracy:.1%}" in printed and f"{row['accuracy']:.1%}" in printed
    evaluation = parse_main(["--evaluate", str(tmp_path / "mine"), "--export", "tflite_int8"])
    main.evaluate(evaluation)
    assert "model_int8.tflite is calibrated on 100 test images" in capsys.readouterr().out


def test_a_deadline_cuts_the_check_short_but_not_the_files(tmp_path):
    model, dataset = as_if_trained(make_small_model()), make_small_data()
    text = export.export_tflite(model, dataset, tmp_path, "m", seconds=0.0)
    record = json.loads((tmp_path / "export.json").read_text())
    assert record["checked_images"] == 1 and record["model.tflite"]["accuracy"] in (0.0, 1.0)
    assert "checked on 1 images" in text and "accuracy" not in text, "one image says little of it"
    assert (tmp_path / "model_dynamic.tflite").stat().st_size > 0


def test_a_file_with_other_logits_is_warned_about(tmp_path, monkeypatch):
    model, dataset = as_if_trained(make_small_model()), make_small_data()
    other = as_if_trained(make_small_model(), seed=1)
    right = export.convert
    monkeypatch.setattr(export, "convert", lambda model, *quantise: right(other, *quantise))
    text = export.export_tflite(model, dataset, tmp_path, "m")
    assert "warning: model.tflite differs from Keras" in text
    assert json.loads((tmp_path / "export.json").read_text())["model.tflite"]["largest_logit_difference"] > 0.01
