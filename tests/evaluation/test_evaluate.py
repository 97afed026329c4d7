"""main.py --evaluate: options, loading the model and its data set, refusals, and the complete command."""

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from command_line import command, train_here
from small_images import write_noise

import models
from elastic_trainer.cli.commands import parse_main, results_folder
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_record
from main import load_to_evaluate


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


ZOO = str(Path(zoo.__file__))


def flags_for(photos, *more):
    return ["--dataset_name", "image_folder", "--data_dir", str(photos), "--batch_size", "4", *more]


def saved(path, size=12, classes=3, last=None):
    inputs = keras.Input((size, size, 3))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(inputs))
    x = keras.layers.Dense(classes, name="last")(x)
    keras.Model(inputs, last(x) if last else x).save(path)
    return path


def test_evaluate_uses_the_options_of_the_run_unless_given(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.keras").touch()
    (run / "last.keras").touch()
    trained = Settings(dataset_name="image_folder", data_dir=Path("photos"), input_size=96, batch_size=8)
    write_record(run / "config.json", trained.to_record())
    found = parse_main(["--evaluate", str(run)])
    assert (found.evaluate, results_folder(found)) == (run / "best.keras", run)
    assert (found.dataset_name, found.data_dir) == ("image_folder", Path("photos"))
    assert (found.input_size, found.batch_size) == (96, 8)
    found = parse_main(["--evaluate", str(run / "last.keras"), "--data_dir", "more", "--batch_size", "2"])
    assert (results_folder(found), found.data_dir) == (run / "last", Path("more"))
    assert (found.batch_size, found.input_size) == (2, 96)
    found = parse_main(["--evaluate", str(run), "--dataset_name", "digits"])
    assert (found.dataset_name, found.data_dir) == ("digits", None)
    (run / "config.json").unlink()
    found = parse_main(["--evaluate", str(run / "best.keras"), "--logdir", "here"])
    assert results_folder(found) == Path("here/evaluated_best")
    assert (found.dataset_name, found.input_size) == ("caltech_birds2011", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluate", "no/such"], "--evaluate no/such: must be the folder of a run or a file that ends in .keras"),
        (["--evaluate", "no/such.keras"], "--evaluate no/such.keras: there is no such file"),
        (["--evaluate", "{}"], "contains no best.keras; runs save it with --save_model"),
        (["--evaluate", "{}/my.keras", "--rho", "0.5"], "--rho: cannot be combined with --evaluate"),
        (["--evaluate", "{}/my.keras", "--augment", "flip"], "--augment: cannot be combined with --evaluate"),
        (["--evaluate", "{}/my.keras", "--model_name", "vit"], "--model_name vit: --evaluate takes the network from"),
        (["--evaluate", "{}/damaged/my.keras"], "damaged/config.json: is damaged or of another version; delete it"),
        (["--evaluate", "{}/my.keras", "--test_fraction", "0.3"], "--test_fraction 0.3: --evaluate tests a run on all"),
        (
            ["--evaluate", "{}/my.keras", "--export", "board"],
            "--export board: cannot be combined with --evaluate; give",
        ),
        (["--export", "onnx"], "--export: 'onnx' is not one of tflite"),
    ],
)
def test_wrong_options_are_named(arguments, message, tmp_path):
    (tmp_path / "damaged").mkdir()
    for path in (tmp_path / "my.keras", tmp_path / "damaged" / "my.keras"):
        path.touch()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "trained_images.bin").touch()
    with pytest.raises(UserError) as caught:
        parse_main([argument.format(tmp_path) for argument in arguments])
    assert message in str(caught.value)


def test_a_keras_file_is_loaded_at_its_input_size_without_its_softmax(photos, tmp_path):
    path = saved(tmp_path / "my.keras", last=keras.layers.Softmax())
    command = parse_main(flags_for(photos, "--evaluate", str(path)))
    model, dataset = load_to_evaluate(command)
    assert (dataset.input_size, dataset.class_names) == (12, ("ant", "bee", "cat"))
    images = next(iter(dataset.test())).inputs
    probabilities = keras.models.load_model(path)(images)
    np.testing.assert_allclose(tf.nn.softmax(model(images)), probabilities, atol=1e-6)
    assert np.abs(model(images).numpy().sum(axis=1) - 1).max() > 1e-3


def test_models_that_do_not_fit_the_data_set_are_refused_in_one_line(photos, tmp_path):
    (tmp_path / "junk.keras").write_text("no model")
    saved(tmp_path / "my.keras")
    saved(tmp_path / "more.keras", classes=5)
    keras.Sequential([keras.Input((12, 12, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]).save(
        tmp_path / "grey.keras"
    )
    keras.Sequential([keras.Input((12, 12, 3)), keras.layers.Conv2D(3, 1)]).save(tmp_path / "features.keras")
    cases = [
        ("junk", [], r"--evaluate .*junk\.keras: Keras cannot load it"),
        (
            "my",
            ["--input_size", "16"],
            r"my\.keras: does not take .* 16, 3\) \(see --input_size\): .* takes \(None, 12, 12",
        ),
        ("more", [], r"returns \(None, 5\), not logits for 3 classes: .*; name the data set it was trained on"),
        ("grey", [], r"it takes \(None, 12, 12, 1\)"),
        ("features", [], r"returns \(None, 12, 12, 3\), not logits for 3 classes"),
    ]
    for name, more, message in cases:
        command = parse_main(flags_for(photos, "--evaluate", str(tmp_path / f"{name}.keras"), *more))
        with pytest.raises(UserError, match=message):
            load_to_evaluate(command)


def test_a_run_with_other_classes_is_refused_in_one_line(tmp_path):
    saved(tmp_path / "best.keras", classes=10)
    run = Settings(dataset_name="digits").to_record()
    names = [f"number {digit}" for digit in range(10)]
    write_record(tmp_path / "config.json", {**run, "images": {"class_names": names}})
    with pytest.raises(UserError, match=r"best\.keras: was trained with class 1 'number 0', not '0'; give"):
        load_to_evaluate(parse_main(["--evaluate", str(tmp_path)]))


def test_a_network_with_custom_layers_is_built_by_its_function(photos, tmp_path):
    original = models.build_model(f"{ZOO}:custom_layer", 12, 3)
    original.save(tmp_path / "my.keras")
    words = flags_for(photos, "--evaluate", str(tmp_path / "my.keras"), "--input_size", "12")
    with pytest.raises(UserError, match="Keras cannot load it"):
        load_to_evaluate(parse_main(words))
    model, dataset = load_to_evaluate(parse_main([*words, "--model_name", f"{ZOO}:custom_layer"]))
    images = next(iter(dataset.test())).inputs
    np.testing.assert_allclose(model(images), original(images), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"does not fit the network of --model_name .*:branches"):
        load_to_evaluate(parse_main([*words, "--model_name", f"{ZOO}:branches"]))


def test_train_export_and_evaluate_from_the_command_line(photos, tmp_path):
    """On an image folder, with a network whose custom layers Keras cannot load without their code."""
    shutil.copy(ZOO, tmp_path / "nets.py")
    logs = tmp_path / "logs"
    train = flags_for(photos, "--model_name", f"{tmp_path / 'nets.py'}:custom_layer", "--input_size", "12")
    train += ["--train_type", "full_training", "--max_steps", "2", "--logdir", str(logs), "--run_name", "mine"]
    train_here(*train, "--export", "tflite")
    run = logs / "mine"
    exported = {"best.keras", "model.tflite", "model_dynamic.tflite", "labels.txt", "export.json"}
    assert exported <= {path.name for path in run.iterdir()}
    assert (run / "labels.txt").read_text().split() == ["ant", "bee", "cat"]

    (run / "model.tflite").unlink()
    done = command("main.py", "--evaluate", run, "--export", "tflite")
    assert done.returncode == 0, done.stderr
    assert "9 test images, 3 classes" in done.stdout and "most often taken for" in done.stdout
    written = {path.name for path in (run / "evaluation").iterdir()}
    assert {"classes.csv", "confusion.csv", "confusion.pdf", "confusion.png", "evaluation.json"} <= written
    record = json.loads((run / "evaluation" / "evaluation.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    assert record["accuracy"] == pytest.approx(summary["best_accuracy"])
    assert (run / "model.tflite").is_file()
    assert "Traceback" not in done.stderr and "deprecated" not in done.stderr
