"""What a run chooses: batch size, its parts, timing table, memory of images."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_small_model
from small_images import write_noise
from small_runs import rows_of

from elastic_trainer.cli import resolve as resolving
from elastic_trainer.cli.checks import without_effect
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.cli.resolve import resolve
from elastic_trainer.datasets import images
from elastic_trainer.datasets.named import find
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.profiling.measuring import idle_training
from elastic_trainer.profiling.memory_check import TracedSteps
from elastic_trainer.profiling.profile import profile_task
from elastic_trainer.selection import budget as time_budget
from elastic_trainer.settings import rate_at
from elastic_trainer.system import memory_budget as budget
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory_budget import part_rows
from elastic_trainer.timing.table_file import save_table, table_folder
from main import train_run
from models import build

NETWORK = """
import keras

def small(shape, classes):
    inputs = keras.Input(shape)
    x = keras.layers.Conv2D(4, 3, activation="relu", name="one")(inputs)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(6, 3, activation="relu", name="two")(x))
    return keras.Model(inputs, keras.layers.Dense(classes, name="last")(x))
"""
SHORT = ["--num_epochs", "1", "--rho", "1"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A run of a small network, whose timing table has been measured."""
    place = tmp_path_factory.mktemp("place")
    (place / "network.py").write_text(NETWORK)
    photos = write_noise(place / "photos")
    words = [
        *("--dataset_name", "image_folder", "--data_dir", str(photos), "--model_name", f"{place}/network.py:small"),
        *("--input_size", "12", "--logdir", str(place / "logs"), "--save_model"),
        *("--train_type", "elastic_training_upper_part", "--run_name"),
    ]
    settings = replace(parse_training([*words, "first"]), num_classes=3, batch_size=1)
    training, folder = idle_training(build(settings, ["a", "b", "c"]), settings), table_folder(settings)
    folder.mkdir(parents=True)
    save_table(profile_task(training, folder, seconds=0.1), settings, folder)
    return words


def folder_of(words):
    return Path(words[words.index("--logdir") + 1])


def summary_of(words, name):
    return json.loads((folder_of(words) / name / "summary.json").read_text())


def without_table(words, tmp_path):
    return [*words[: words.index("--logdir")], *words[words.index("--logdir") + 2 : -1], "--logdir", str(tmp_path)]


def test_a_run_without_a_timing_table_goes_by_flops_and_its_own_steps(words, tmp_path, capsys):
    """No table is left behind. Its first steps correct the selection: before steps 10 and 30 it selects again."""
    given = [*without_table(words, tmp_path), "--rho", "0.9", "--max_steps", "64", "--num_epochs", "40"]
    train_run(parse_training([*given, "--run_name", "mine"]))
    assert "times follow from FLOPs, and from this run's steps" in capsys.readouterr().out
    assert not (tmp_path / "profiles").exists()
    rows = rows_of(tmp_path / "mine" / "selections.csv")
    assert [*dict.fromkeys(row["step"] for row in rows)] == ["0", "10", "30"]
    assert float(rows[0]["slowdown"]) != 1, "gradient passes say how fast the device is"


def test_where_there_is_no_timing_table_those_for_other_sizes_are_named(words, tmp_path, capsys):
    shutil.copytree(folder_of(words) / "profiles", tmp_path / "profiles")
    train_run(parse_training([*without_table(words, tmp_path), "--run_name", "other", "--batch_size", "2", "--plan"]))
    sizes = r"\(there is one for 12 px, 3 classes, batch \d+, clipped\): times follow from FLOPs"
    assert re.search(rf"no timing table in {tmp_path}/profiles/\S+_12_3_2\S* {sizes}", capsys.readouterr().out)


def test_a_default_rho_that_the_head_alone_exceeds_is_raised_and_a_given_one_is_refused(words, capsys, monkeypatch):
    for module in (resolving, time_budget):
        monkeypatch.setattr(module, "smallest_rho", lambda *_: 0.7341)
    few = [*words, "tight", "--max_steps", "2"]
    train_run(parse_training(few))
    assert "--rho is 0.74, not 0.5: training the head alone takes 73.4% of a full step here" in capsys.readouterr().out
    assert summary_of(words, "tight")["rho"] == 0.74
    (folder_of(words) / "tight" / "summary.json").unlink()
    train_run(parse_training([*few, "--resume"]))
    with pytest.raises(UserError, match=r"--rho 0\.5: training the head alone .*; give at least 0\.735"):
        train_run(parse_training([*few, "--rho", "0.5"]))


def test_the_closed_form_head_alone_trains_nothing_else(words):
    given = [*words, "head_alone", "--train_type", "closed_form_head", "--batch_size", "4", "--num_epochs", "3"]
    settings = parse_training(given)
    assert "--num_epochs: no effect here" in without_effect({"num_epochs": 3}, settings)[0]
    train_run(settings)
    summary = summary_of(words, "head_alone")
    assert summary["steps"] == 1 and summary["final_accuracy"] == summary["best_accuracy"]


def test_the_closed_form_head_is_the_first_best_model(words):
    settings = parse_training([*words, "still", *SHORT, "--learning_rate", "1e-9"])
    train_run(replace(settings, average_head=False))
    summary = summary_of(words, "still")
    assert summary["starts_with_head"] and summary["start_accuracy"] is not None
    model = load_model(folder_of(words) / "still" / "last.keras", "--weights")
    assert np.abs(model.trainable_variables[-1]).max() < 1e-3, "training started from the new head"


# --- sizes ------------------------------------------------------------------------------------------------------------


class ReachedError(Exception):
    """The images would be read now."""


def chosen_before_images(words, **more):
    """The settings, and the MB of images that may stay in memory, when a run of the small network reads its images."""

    def load(*chosen):
        raise ReachedError(*chosen)

    with pytest.raises(ReachedError) as reached:
        settings = replace(parse_training(words), num_classes=3)
        resolve(settings, make_small_model(), find(settings).training_count, load, **more)
    return reached.value.args


@pytest.fixture
def many_photos(tmp_path):
    """Flags of 412 training images, most of them empty files."""
    photos = write_noise(tmp_path / "photos")
    for index in range(400):
        (photos / "train" / "ant" / f"more{index}").touch()
    return ["--dataset_name", "image_folder", "--data_dir", str(photos), "--logdir", str(tmp_path / "logs")]


def test_the_batch_is_smaller_where_there_are_few_images(many_photos, tmp_path, capsys):
    few = ["--dataset_name", "image_folder", "--data_dir", str(write_noise(tmp_path / "few"))]  # 12 images
    few += ["--train_type", "full_training"]
    smaller, _ = chosen_before_images(few)
    assert (smaller.batch_size, smaller.learning_rate) == (1, rate_at(1))
    out = capsys.readouterr().out
    assert "--batch_size is 1: about 12 images are few" in out and "--learning_rate is 0.000625, in proportion" in out
    assert chosen_before_images([*few, "--batch_size", "4"])[0].batch_size == 4
    given = chosen_before_images([*few, "--learning_rate", "0.5"])[0]
    assert (given.batch_size, given.learning_rate) == (1, 0.5)
    adam = [*few, "--optimizer", "adam"]
    assert chosen_before_images(adam)[0].learning_rate == parse_training(adam).learning_rate
    many = [*many_photos, "--train_type", "full_training"]
    assert chosen_before_images(many)[0].batch_size == 32
    photos = tmp_path / "photos"
    shutil.move(photos / "train", photos / "all")
    halves = [*many, "--data_dir", str(photos / "all"), "--test_fraction", "0.5"]
    assert chosen_before_images(halves)[0].batch_size == 16, "of 412"


@pytest.mark.parametrize(
    ("more", "room_mb", "sizes"),
    [  # sizes of the batch and its parts, and the MB that images may take
        ([], 200.0, (32, 0, 20.0)),  # half of the tensors are enough
        ([], 700.0, (32, 0, 250.0)),  # a quarter of what is available is the most
        ([], 179.9, (32, 16, 74.9)),
        ([], 59.9, (32, 4, 14.9)),
        (["--train_type", "full_training"], 60.0, (32, 1, 0.0)),
        (["--train_type", "full_training", "--batch_size", "1"], 60.0, (1, 0, 10.0)),
        (["--train_type", "full_training", "--micro_batch", "8"], 129.9, (8, 8, 9.9)),
        (["--preset", "paper", "--batch_size", "32"], 359.9, (32, 0, 179.9)),
        (["--train_type", "closed_form_head"], 209.9, (32, 0, 29.9)),
        (["--train_type", "closed_form_head"], 59.9, (4, 0, 19.9)),
    ],
)
def test_a_run_chooses_exactly_what_fits(more, room_mb, sizes, many_photos, monkeypatch):
    monkeypatch.setattr(budget, "resident_memory_mb", lambda: 800.0)
    for module in (budget, images):
        monkeypatch.setattr(module, "free_memory_mb", lambda: 1000.0)
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    asked = []

    def needed_mb(self, mask, batch_size, micro_batch=None):
        asked.append((batch_size, part_rows(batch_size, micro_batch), mask[0]))
        rows = part_rows(batch_size, micro_batch)
        return (10 * rows + (40 if rows == batch_size else 50)) / (1 if mask[0] else 2)

    monkeypatch.setattr(TracedSteps, "needed_mb", needed_mb)
    given = [*many_photos, "--rho", "1"] if "--train_type" not in more else many_photos
    given = [*given, "--memory", f"{800 + room_mb}M", *more]
    chosen, images_mb = chosen_before_images(given)
    assert (chosen.batch_size, chosen.micro_batch) == sizes[:2]
    assert images_mb == pytest.approx(sizes[2])
    assert len({*asked}) <= 19


@pytest.mark.parametrize(("more", "parts"), [([], 16), (["--export", "tflite"], 16), (["--export", "board"], 0)])
def test_this_machines_memory_does_not_decide_for_a_board(more, parts, many_photos, monkeypatch):
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    monkeypatch.setattr(TracedSteps, "check", lambda *_: None)
    monkeypatch.setattr(budget, "free_memory_mb", lambda: 1e4)
    needed = {32: 2e4}
    monkeypatch.setattr(TracedSteps, "needed_mb", lambda self, mask, size, part=None: needed.get(part or size, 1.0))
    given = [*many_photos, "--train_type", "full_training", "--batch_size", "32", *more]
    assert chosen_before_images(given)[0].micro_batch == parts


def test_selections_stay_within_the_memory_there_is(many_photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    chosen_before_images([*many_photos, "--rho", "1", "--batch_size", "4"])
    assert "memory: selections stay within" in capsys.readouterr().out


def test_a_rate_follows_the_batch():
    rates = [rate_at(size) for size in (8, 16, 32, 64)]
    assert rates == pytest.approx([rates[2] / 4, rates[2] / 2, rates[2], rates[2]], rel=1e-3)
