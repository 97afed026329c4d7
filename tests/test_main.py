"""What main.py does around training: a run keeps its images, and later steps do not cancel each other."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import zoo
from small_images import write_noise

from elastic_trainer.board.export import RECORD
from elastic_trainer.cli.commands import parse_main, parse_training
from elastic_trainer.evaluation.predictions import predict
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.system.errors import Stopped, UserError
from main import load_to_evaluate, train_run


@pytest.fixture
def photos(tmp_path):
    return write_noise(tmp_path / "photos")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photos, and beside them the run `mine` that was trained on them."""
    folder = tmp_path_factory.mktemp("place")
    train(write_noise(folder / "photos"), "--save_model")
    return folder


@pytest.fixture
def trained(place, photos):
    """The folder of the run that was trained on `photos`."""
    return Path(shutil.copytree(place / "mine", photos.parent / "mine"))


@pytest.fixture
def interrupted(trained):
    """As `trained`, but the run looks as if it had been interrupted."""
    (trained / "summary.json").unlink()
    return trained


def words_of(photos, *more):
    """Two steps of a small network on an image folder; the run's folder is `mine` beside it."""
    words = ["--dataset_name", "image_folder", "--data_dir", photos, "--model_name", f"{Path(zoo.__file__)}:branches"]
    words += ["--input_size", 12, "--batch_size", 4, "--train_type", "full_training", "--max_steps", 2]
    return [*map(str, (*words, "--logdir", photos.parent, "--run_name", "mine", *more))]


def train(photos, *more):
    train_run(parse_training(words_of(photos, *more)))
    return photos.parent / "mine"


def test_an_earlier_export_for_a_board_is_found_before_images_are_read(photos, monkeypatch):
    folder = photos.parent / "mine_board"
    folder.mkdir()
    (folder / RECORD).touch()
    monkeypatch.setattr("data.load", lambda *_: pytest.fail("images were read"))
    words = ["--dataset_name", "image_folder", "--data_dir", str(photos), "--logdir", str(photos.parent)]
    words += ["--model_name", f"{Path(zoo.__file__)}:branches", "--input_size", "12", "--run_name", "mine"]
    with pytest.raises(UserError, match=r"--export: .*mine_board has an export already; move or remove"):
        train_run(parse_training([*words, "--train_type", "full_training", "--export", "board"]))
    with pytest.raises(pytest.fail.Exception, match="images were read"):  # a plan exports nothing
        train_run(parse_training([*words, "--rho", "1", "--plan", "--export", "board"]))


def swap_two_classes(photos):
    train = photos / "train"
    for old, new in (("ant", "old"), ("bee", "ant"), ("old", "bee")):
        (train / old).rename(train / new)


def rename_a_class(photos):
    for split in ("train", "test"):
        (photos / split / "bee").rename(photos / split / "dog")


def add_a_class(photos):
    for part in ("train", "test"):
        shutil.copytree(photos / part / "ant", photos / part / "wasp")


def replace_the_test_photos(photos):
    write_noise(photos, seed=1, test=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_two_classes, r"started with other training images \(12, digest \w+; now 12, digest \w+\)"),
        (rename_a_class, "started with class 2 'bee', not 'cat'"),
        (add_a_class, "started with class 4 'no such class', not 'wasp'; use the same"),
        (replace_the_test_photos, r"started with other test images \(9, digest \w+; now 9, digest \w+\)"),
    ],
)
def test_resuming_with_other_images_is_refused(photos, interrupted, change, message):
    change(photos)
    with pytest.raises(UserError, match=f"--resume: the run in {interrupted} was {message}"):
        train(photos, "--resume")
    assert not (interrupted / "summary.json").exists()


def test_run_continues_with_a_copy_of_its_images_a_broken_one_and_in_parts_of_a_batch(photos, interrupted):
    photos = photos.rename(photos.with_name("copy"))
    (photos / "train" / "ant" / "new.png").write_bytes(b"broken")
    train(photos, "--resume", "--micro_batch", 2)
    assert read_summary(interrupted)["steps"] == 2


def edit(network, old, new):
    text = network.read_text()
    assert old in text
    network.write_text(text.replace(old, new))


@pytest.fixture
def own_networks(photos):
    """The user's file with networks, which is edited after it was trained."""
    return Path(shutil.copy(zoo.__file__, photos.with_name("nets.py")))


def test_a_network_in_its_file_is_evaluated_as_it_was_trained_also_without_its_source(photos, own_networks):
    run = train(photos, "--model_name", f"{own_networks}:branches", "--save_model")
    expected = load_to_evaluate(parse_main(["--evaluate", str(run)]))[0]
    edit(own_networks, "1 / 127.5", "1 / 255")
    images = np.random.default_rng(0).uniform(0, 255, (4, 12, 12, 3))
    for remove in (False, True):
        if remove:
            own_networks.unlink()
        found = load_to_evaluate(parse_main(["--evaluate", str(run)]))[0]
        np.testing.assert_array_equal(found(images), expected(images))


def test_evaluating_on_other_classes_is_refused_and_on_other_photos_is_not(photos, trained):
    replace_the_test_photos(photos)
    words = ["--evaluate", str(trained), "--data_dir", str(photos)]
    assert load_to_evaluate(parse_main(words))[1].test_count == 9

    def check_refused(name):
        message = rf"--data_dir .*/test: class '{name}' is not among ant, bee, cat"
        with pytest.raises(UserError, match=message):
            load_to_evaluate(parse_main(words))

    more = shutil.copytree(photos / "test" / "ant", photos / "test" / "wasp")
    check_refused("wasp")
    shutil.rmtree(more)
    rename_a_class(photos)
    check_refused("dog")


def test_ctrl_c_in_the_export_leaves_a_finished_run_whose_resume_exports(photos, capsys, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with (
        monkeypatch.context() as patched,
        pytest.raises(Stopped, match=r"stopped in the export; .*best\.keras") as stop,
    ):
        patched.setattr("elastic_trainer.evaluation.export.export_tflite", stopped)
        train(photos, "--export", "tflite")
    run = photos.parent / "mine"
    assert stop.value.number == 2 and str(stop.value).endswith(f"to export it: python main.py --resume {run}")
    assert capsys.readouterr().out.splitlines()[-3].startswith("accuracy ")
    assert not (run / "model.tflite").exists()
    train(photos, "--export", "tflite", "--resume")
    assert f"{run} is finished: accuracy " in capsys.readouterr().out
    assert {"model.tflite", "export.json"} <= {path.name for path in run.iterdir()}
    train(photos, "--export", "tflite", "--resume")
    assert "TensorFlow Lite" not in capsys.readouterr().out


@pytest.mark.parametrize("saves", [True, False])
def test_with_a_validation_folder_the_test_folder_tests_the_best_model_once_at_the_end(photos, saves, capsys):
    write_noise(photos, seed=2, valid=2)
    export = ["--export", "tflite"] if saves else []
    run = train(photos, "--save_model", saves, "--max_steps", 6, "--learning_rate", 0.5, *export)
    printed = capsys.readouterr().out
    assert (
        f"{photos}/test is reported once at the end" in printed
        and ": 12 training, 6 validation and 9 test images, 3" in printed
    )
    summary = read_summary(run)
    tested = "best.keras" if saves else "the last weights"
    assert (summary["test_images"], summary["tested"]) == (9, tested)
    assert f"test accuracy of {tested}: {summary['test_accuracy']:.1%} on 9 images not used to choose it\n" in printed
    if not saves:
        return
    exported = json.loads((run / "export.json").read_text())
    assert exported["test_images"] == 9 and exported["keras"]["accuracy"] == pytest.approx(summary["test_accuracy"])
    model, images = load_to_evaluate(parse_main(["--evaluate", str(run)]))
    assert images.test_count == 9 and f"tested in {photos}/test: 9 images" in capsys.readouterr().out
    predictions = predict(model, images)
    assert predictions.accuracy == pytest.approx(summary["test_accuracy"])
    assert predictions.losses.mean() == pytest.approx(summary["test_loss"], rel=1e-3)


def test_a_run_whose_test_folder_has_training_images_alone_ends_with_a_warning(photos, capsys):
    (photos / "test").rename(photos / "val")
    shutil.copytree(photos / "train", photos / "test")
    run = train(photos, "--save_model", False, "--max_steps", 2)
    assert re.search("warning: not tested: the run in .*: was trained on all 12 test images", capsys.readouterr().out)
    assert "test_accuracy" not in read_summary(run)


def test_evaluating_photos_in_class_folders_tests_those_that_the_run_did_not_train_on(photos):
    """Without other photos, these are the run's own test images; new ones are tested, too."""
    together = photos.with_name("together")
    for name in ("ant", "bee", "cat"):
        shutil.copytree(photos / "train" / name, together / name)
    run = train(together, "--save_model", "--test_fraction", 0.4)
    own = load_to_evaluate(parse_main(["--evaluate", str(run)]))[1]
    config = json.loads((run / "config.json").read_text())
    assert own.record()["test_images"] == config["images"]["test_images"]
    words = ["--evaluate", str(run), "--data_dir", str(photos / "test")]
    assert load_to_evaluate(parse_main(words))[1].test_count == 9
