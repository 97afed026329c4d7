"""Evaluation: the numbers against naive counting, the files, where the model and its data come from, refusals."""

import csv
import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES, SIZE, make_small_data, make_small_model
from test_cli import command, error_line

import data
import models
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.evaluation import predictions
from elastic_trainer.evaluation.class_report import (
    SHOWN_CLASSES,
    _class_table,
    all_names,
    class_results,
    confusion,
    write_report,
)
from elastic_trainer.evaluation.pictures import draw_confusion
from utils import UserError

ZOO = str(Path(zoo.__file__))


def made_up_answers(classes=4, count=60, seed=0):
    """Answers that are right two times in three; no image is of the last class, nor is any taken for it."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes - 1, count)
    predictions = np.where(rng.random(count) < 0.67, labels, rng.integers(0, classes - 1, count))
    losses = np.where(labels == predictions, 0.1, 3.0) + rng.random(count)
    wrong = sorted(np.flatnonzero(labels != predictions), key=lambda k: -losses[k])
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    mistakes = [predictions.Mistake(losses[k], int(k), labels[k], predictions[k], 0.9, image) for k in wrong[:24]]
    return predictions.Answers(labels, predictions, losses, mistakes)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_class_is_counted_as_by_hand_and_the_worst_come_first():
    answers = made_up_answers()
    names = ["ant", "bee", "cat", "dog"]
    results = class_results(answers, names)
    pairs = list(zip(answers.labels, answers.predictions, strict=True))
    for r in results[:-1]:
        right = sum(true == said == r.index for true, said in pairs)
        images, taken = (sum(pair[i] == r.index for pair in pairs) for i in (0, 1))
        assert (r.name, r.support, r.predicted) == (names[r.index], images, taken)
        np.testing.assert_allclose((r.precision, r.recall), (right / taken, right / images))
        np.testing.assert_allclose(r.f1, 2 / (1 / r.precision + 1 / r.recall))
        others = [sum(pair == (r.index, k) for pair in pairs) for k in range(4) if k != r.index]
        assert r.taken_for_count == max(others)
        assert r.taken_for is None or pairs.count((r.index, names.index(r.taken_for))) == max(others)
    assert [r.f1 for r in results[:-1]] == sorted(r.f1 for r in results[:-1])
    assert results[-1].name == "dog" and np.isnan(results[-1].f1) and results[-1].support == 0


def test_an_output_beyond_the_classes_gets_a_number_for_a_name():
    answers = made_up_answers(classes=3)
    answers.predictions[0] = 5
    assert all_names(answers, ["a", "b", "c"]) == ["a", "b", "c", "output 3", "output 4", "output 5"]
    counts = confusion(answers, ["a", "b", "c"])
    assert counts.shape == (6, 6) and counts.sum() == 60 and counts[:, 5].sum() == 1
    assert len(class_results(answers, ["a", "b", "c"])) == 3


def test_answers_are_those_of_the_model_and_the_worst_mistakes_are_kept():
    model, dataset = make_small_model(), make_small_data()
    answers = predictions.ask(model, dataset, kept_mistakes=3)
    images, labels = (np.concatenate([part.numpy() for part in parts]) for parts in zip(*dataset.test(), strict=True))
    logits = model(images, training=False).numpy().astype(np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    np.testing.assert_array_equal(answers.labels, labels)
    np.testing.assert_array_equal(answers.predictions, logits.argmax(axis=1))
    np.testing.assert_allclose(answers.losses, losses, rtol=1e-5)
    assert answers.accuracy == np.mean(labels == logits.argmax(axis=1))
    wrong = np.flatnonzero(labels != logits.argmax(axis=1))
    assert len(wrong) > 3
    worst = wrong[np.argsort(-losses[wrong])][:3]
    assert [mistake.index for mistake in answers.mistakes] == list(worst)
    for mistake in answers.mistakes:
        np.testing.assert_array_equal(mistake.image, images[mistake.index].astype(np.uint8))
        said = logits[mistake.index]
        assert (mistake.label, mistake.prediction) == (labels[mistake.index], said.argmax())
        np.testing.assert_allclose(mistake.confidence, (np.exp(said) / np.exp(said).sum()).max(), rtol=1e-5)


def test_a_model_that_returns_no_numbers_is_refused():
    model = make_small_model()
    model.layers[-1].bias.assign([np.nan] * CLASSES)
    with pytest.raises(UserError, match="not finite"):
        predictions.ask(model, make_small_data())


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_report_holds_what_it_promises(tmp_path):
    answers, names = made_up_answers(), ["ant", "bee, red", "cat", "dog"]
    text = write_report(answers, names, tmp_path / "evaluation", {"model": "m"})
    folder = tmp_path / "evaluation"
    with (folder / "classes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == set(names)
    assert [row["f1"] for row in rows][-1] == "" and rows[-1]["name"] == "dog"
    with (folder / "confusion.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0][1:] == names and [row[0] for row in table[1:]] == names
    counts = np.array([row[1:] for row in table[1:]], int)
    assert counts[1, 2] == np.sum((answers.labels == 1) & (answers.predictions == 2))
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["accuracy"] == pytest.approx(np.trace(counts) / 60)
    assert record["loss"] == pytest.approx(answers.losses.mean())
    assert record["mistakes"] == 60 - np.trace(counts)
    assert record["classes_without_test_images"] == 1 and record["model"] == "m"
    assert record["macro_f1"] == pytest.approx(np.mean([float(row["f1"]) for row in rows[:3]]))
    for picture in ("confusion.png", "confusion.pdf", "mistakes.png"):
        assert (folder / picture).stat().st_size > 1000
    lines = text.splitlines()
    assert f"accuracy {record['accuracy']:.1%}" in lines[0]
    assert lines[3].startswith(rows[0]["name"])

    right = predictions.Answers(answers.labels, answers.labels, answers.losses, [])
    write_report(right, names, folder, {})
    assert not (folder / "mistakes.png").exists(), "no mistakes of an evaluation before"


def test_a_long_table_is_cut_and_says_so():
    answers = made_up_answers(classes=40, count=400)
    results = class_results(answers, [f"kind {k}" for k in range(40)])
    lines = _class_table(results)
    assert len(lines) == 2 + SHOWN_CLASSES + 1
    assert lines[-1] == "… and 20 better classes in classes.csv"


@pytest.mark.parametrize(("classes", "named", "counted"), [(2, True, True), (37, True, False), (200, False, False)])
def test_a_confusion_matrix_has_names_and_counts_where_they_fit(classes, named, counted):
    answers = made_up_answers(classes=classes + 1, count=20 * classes)
    names = [f"kind {k}" for k in range(classes)]
    figure = draw_confusion(confusion(answers, names), names)
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert (labels == names) == named
    assert bool(axes.texts) == counted
    listed = [text.get_text() for other in figure.axes[1:] for text in other.texts]
    assert any("most frequent mistakes" in text for text in listed) != named


# --- where it comes from ----------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """An image folder of three classes of noise, 12×12."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 3)):
        for name in ("ant", "bee", "cat"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for k in range(count):
                encoded = tf.io.encode_png(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
                tf.io.write_file(str(tmp_path / "photos" / split / name / f"{k}.png"), encoded)
    return tmp_path / "photos"


def flags_for(photos, *more):
    return ["--dataset_name", "image_folder", "--data_dir", str(photos), "--batch_size", "4", *more]


def saved(path, size=12, classes=3, last=None):
    inputs = keras.Input((size, size, 3))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(inputs))
    x = keras.layers.Dense(classes, name="last")(x)
    keras.Model(inputs, last(x) if last else x).save(path)
    return path


def test_the_options_of_the_run_are_taken_unless_others_are_given(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.keras").touch()
    (run / "last.keras").touch()
    config = {"model_name": "resnet50", "dataset_name": "image_folder", "data_dir": "photos", "input_size": 96}
    config |= {"num_classes": 200, "batch_size": 8, "augment": "none", "rho": 0.5}
    (run / "config.json").write_text(json.dumps(config))
    args = parse_main(["--evaluate", str(run)])
    assert (args.evaluate, args.folder) == (run / "best.keras", run)
    assert (args.dataset_name, args.data_dir, args.input_size) == ("image_folder", Path("photos"), 96)
    assert (args.num_classes, args.batch_size, args.augment, args.model_name) == (200, 8, "none", None)
    args = parse_main(["--evaluate", str(run / "last.keras"), "--data_dir", "more", "--batch_size", "2"])
    assert (args.folder, args.data_dir, args.batch_size, args.input_size) == (run / "last", Path("more"), 2, 96)
    args = parse_main(["--evaluate", str(run), "--dataset_name", "digits"])
    assert (args.dataset_name, args.data_dir, args.num_classes) == ("digits", None, None)
    (run / "config.json").unlink()
    args = parse_main(["--evaluate", str(run / "best.keras"), "--logdir", "here"])
    assert (args.folder, args.dataset_name, args.input_size) == (Path("here/evaluated_best"), "digits", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluate", "no/such"], "--evaluate no/such: must be the folder of a run or a file that ends in .keras"),
        (["--evaluate", "no/such.keras"], "--evaluate no/such.keras: there is no such file"),
        (["--evaluate", "{}"], "holds no best.keras; a run keeps it with --save_model or --export"),
        (["--evaluate", "{}/my.keras", "--rho", "0.5"], "--rho: does not go with --evaluate"),
        (["--evaluate", "{}/my.keras", "--model_name", "vit"], "--model_name vit: --evaluate takes the network from"),
        (["--evaluate", "{}/damaged/my.keras"], "config.json cannot be read"),
        (["--export", "onnx"], "--export: 'onnx' is not one of tflite"),
        (["--export", "tflite", "--save_model", "False"], "--export tflite: needs the best model; leave out"),
    ],
)
def test_bad_options_are_named(arguments, message, tmp_path):
    (tmp_path / "damaged").mkdir()
    for path in (tmp_path / "my.keras", tmp_path / "damaged" / "my.keras"):
        path.touch()
    (tmp_path / "damaged" / "config.json").write_text("{")
    with pytest.raises(UserError) as caught:
        parse_main([argument.format(tmp_path) for argument in arguments])
    assert message in str(caught.value)


def test_a_file_that_suits_is_loaded_with_its_own_size_and_without_its_softmax(photos, tmp_path):
    path = saved(tmp_path / "my.keras", last=keras.layers.Softmax())
    args = parse_main(flags_for(photos, "--evaluate", str(path)))
    model, dataset = predictions.load(args)
    assert (dataset.input_size, dataset.class_names) == (12, ("ant", "bee", "cat"))
    images = next(iter(dataset.test()))[0]
    probabilities = keras.models.load_model(path)(images)
    np.testing.assert_allclose(tf.nn.softmax(model(images)), probabilities, atol=1e-6)
    assert np.abs(model(images).numpy().sum(axis=1) - 1).max() > 1e-3


def test_what_does_not_fit_is_refused_in_one_line(photos, tmp_path):
    (tmp_path / "junk.keras").write_text("no model")
    saved(tmp_path / "my.keras")
    saved(tmp_path / "more.keras", classes=5)
    saved(tmp_path / "fewer.keras", classes=2)
    keras.Sequential([keras.Input((12, 12, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]).save(
        tmp_path / "grey.keras"
    )
    keras.Sequential([keras.Input((12, 12, 3)), keras.layers.Conv2D(3, 1)]).save(tmp_path / "features.keras")
    cases = [
        ("junk", [], r"--evaluate .*junk\.keras: Keras cannot load it"),
        ("my", ["--input_size", "16"], r"--input_size 16: .*my\.keras takes images of 12 pixels"),
        ("more", [], r"--dataset_name image_folder: .* tells 5 classes apart, image_folder has 3; .*--num_classes 5"),
        ("fewer", [], r"--dataset_name image_folder: .* tells 2 classes apart, image_folder has 3"),
        ("more", ["--num_classes", "4"], r"--num_classes 4: .* tells 5 classes apart"),
        ("grey", [], r"takes \(None, 12, 12, 1\), not RGB images"),
        ("features", [], r"returns \(None, 12, 12, 3\), not a number for each class"),
    ]
    for name, more, message in cases:
        args = parse_main(flags_for(photos, "--evaluate", str(tmp_path / f"{name}.keras"), *more))
        with pytest.raises(UserError, match=message):
            predictions.load(args)
    args = parse_main(flags_for(photos, "--evaluate", str(tmp_path / "more.keras"), "--num_classes", "5"))
    assert predictions.load(args)[0].output_shape == (None, 5)


def test_a_network_with_layers_of_its_own_is_made_by_its_function(photos, tmp_path):
    original = models.build_model(f"{ZOO}:custom_layer", 12, 3, augment="flip")
    original.save(tmp_path / "my.keras")
    words = flags_for(photos, "--evaluate", str(tmp_path / "my.keras"), "--input_size", "12")
    with pytest.raises(UserError, match="Keras cannot load it"):
        predictions.load(parse_main(words))
    model, dataset = predictions.load(parse_main([*words, "--model_name", f"{ZOO}:custom_layer"]))
    images = next(iter(dataset.test()))[0]
    np.testing.assert_allclose(model(images), original(images), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"does not fit the network of --model_name .*:branches"):
        predictions.load(parse_main([*words, "--model_name", f"{ZOO}:branches"]))


def test_train_export_then_evaluate_as_a_user_does(photos, tmp_path):
    """The whole way on an image folder, with a network whose layers Keras could not load without its code."""
    shutil.copy(ZOO, tmp_path / "nets.py")
    logs = tmp_path / "logs"
    train = flags_for(photos, "--model_name", f"{tmp_path / 'nets.py'}:custom_layer", "--input_size", "12")
    train += ["--train_type", "full_training", "--max_steps", "2", "--logdir", str(logs), "--run_name", "mine"]
    done = command("main.py", *train, "--export", "tflite")
    assert done.returncode == 0, done.stderr
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

    assert "--rho: does not go with --evaluate" in error_line("main.py", "--evaluate", run, "--rho", "0.5")


def test_the_last_batch_counts_for_as_many_images_as_it_has(photos):
    dataset = data.load("image_folder", 12, 4, data_dir=photos)
    assert dataset.test_count % BATCH
    model = keras.Sequential([keras.Input((12, 12, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
    answers = predictions.ask(model, dataset)
    assert len(answers.labels) == 9
