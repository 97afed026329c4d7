"""What a run chooses: batch size, its parts, timing table, memory of images, epochs."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_small_model, make_table
from small_images import write_noise

from elastic_trainer.cli import resolve as resolving
from elastic_trainer.cli.checks import without_effect
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.cli.resolve import resolve
from elastic_trainer.datasets import images
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.engine import memory as budget
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.selection import budget as time_budget
from elastic_trainer.settings import rate_at
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_json, write_record
from elastic_trainer.system.machine import environment
from elastic_trainer.timing.memory_check import TracedSteps
from elastic_trainer.timing.table_file import table_folder
from main import train_run

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
    """A run of a small network whose timing table has been measured, by an earlier run called `first`."""
    place = tmp_path_factory.mktemp("place")
    (place / "network.py").write_text(NETWORK)
    photos = write_noise(place / "photos")
    words = [
        *("--dataset_name", "image_folder", "--data_dir", str(photos), "--model_name", f"{place}/network.py:small"),
        *("--input_size", "12", "--logdir", str(place / "logs"), "--save_model"),
        *("--train_type", "elastic_training_upper_part", "--run_name"),
    ]
    train_run(parse_training([*words, "first", *SHORT]))
    return words


def folder_of(words):
    return Path(words[words.index("--logdir") + 1])


def summary_of(words, name):
    return json.loads((folder_of(words) / name / "summary.json").read_text())


def without_table(words, tmp_path):
    return [*words[: words.index("--logdir")], *words[words.index("--logdir") + 2 : -1], "--logdir", str(tmp_path)]


@pytest.fixture
def table_file(words):
    """The file of the measured table, as it was after the test."""
    [path] = (folder_of(words) / "profiles").glob("*/profile.json")
    content = path.read_text()
    yield path
    path.write_text(content)


@pytest.fixture
def trusted(monkeypatch):
    """No table is doubted: they are measured on a busy machine."""
    for name in ("MAX_ERROR", "MAX_FREE"):
        monkeypatch.setattr(f"elastic_trainer.timing.table.{name}", math.inf)


def test_a_run_without_a_timing_table_measures_one_and_the_next_run_finds_it(words, table_file, trusted, capsys):
    record = json.loads(table_file.read_text())
    assert record["is_quick"] and record["fit"]["selections"] <= 5
    written = table_file.stat().st_mtime_ns
    train_run(parse_training([*words, "next", *SHORT]))
    assert table_file.stat().st_mtime_ns == written and "no timing table" not in capsys.readouterr().out


def test_where_there_is_no_timing_table_those_for_other_sizes_are_named(words, tmp_path, capsys):
    shutil.copytree(folder_of(words) / "profiles", tmp_path / "profiles")
    train_run(parse_training([*without_table(words, tmp_path), "--run_name", "other", "--batch_size", "2", "--plan"]))
    sizes = r"\(there is one for 12 px, 3 classes, batch \d+\): measuring a short one"
    assert re.search(rf"no timing table in {tmp_path}/profiles/\S+_12_3_2\S* {sizes}", capsys.readouterr().out)


def test_a_deadline_chooses_the_epochs_and_is_kept_with_all_that_a_run_does(words, capsys):
    settings = parse_training([*words, "hurried", "--deadline", "120"])
    assert (settings.num_epochs, settings.batch_size) == (None, None)
    train_run(settings)
    [epochs] = re.findall(r"^--deadline 2m: (?:about )?(\d+) epochs, ", capsys.readouterr().out, re.MULTILINE)
    config = json.loads((folder_of(words) / "hurried" / "config.json").read_text())
    summary = summary_of(words, "hurried")
    assert config["num_epochs"] == int(epochs) > 1
    assert summary["steps"] == summary["planned_steps"] == 600
    assert 1 < summary["elapsed_seconds"] < 120
    assert summary["elapsed_seconds"] > summary["train_seconds"] + summary["validation_seconds"]


@pytest.mark.parametrize("has_table", [True, False])
def test_a_deadline_too_short_for_steps_gives_the_closed_form_head(words, has_table, tmp_path, capsys):
    """There is a table, but no time to train by it; or not even for measuring one."""
    given = [*(words[:-1] if has_table else without_table(words, tmp_path)), "--run_name", "head", "--deadline", "0.5"]
    train_run(parse_training(given))
    run = folder_of(given) / "head"
    assert "--deadline 0.5s: there is no t" in capsys.readouterr().out
    summary = summary_of(given, "head")
    assert (summary["train_type"], summary["steps"], summary["epochs"]) == ("closed_form_head", 1, 1)
    assert json.loads((run / "config.json").read_text())["train_type"] == "closed_form_head"
    assert load_model(run / "best.keras", "--weights").output_shape == (None, 3)
    resumed = parse_training([*given, "--resume"])
    assert (resumed.train_type, resumed.max_steps) == ("closed_form_head", 1)


def test_an_unreliable_timing_table_is_reported_and_measured_again_by_the_next_run(
    words, table_file, capsys, monkeypatch
):
    record = json.loads(table_file.read_text())
    write_json(table_file, {**record, "fit": {**record["fit"], "median_error_percent": 31.0}})
    measured, doubt = [], "it predicts measured steps with a median error of 31%"
    monkeypatch.setattr(resolving, "profile_task", lambda *_, **__: measured.append("again"))  # on a machine still busy
    monkeypatch.setattr(resolving, "save_table", lambda *_: None)

    train_run(parse_training([*words, "second", *SHORT]))
    out = capsys.readouterr().out
    assert measured == ["again"] and f"an unreliable timing table ({doubt}) in {table_file.parent}: measuring" in out
    assert f"the timing table is unreliable: {doubt}; the next run measures again" in out
    assert summary_of(words, "second")["table_doubt"] == doubt

    train_run(parse_training([*words, "second", "--resume", *SHORT]))
    assert measured == ["again"], "a run that is continued keeps the table that it started with"
    assert f"the timing table is unreliable: {doubt}; this run keeps it" in capsys.readouterr().out
    train_run(parse_training([*words, "third", "--deterministic", *SHORT]))
    assert measured == ["again"] and "this run keeps it" in capsys.readouterr().out
    monkeypatch.setattr(resolving, "TABLE_SHARE", 0.0)
    train_run(parse_training([*words, "fourth", "--deadline", "60", "--num_epochs", "1"]))
    assert "there is no time to measure a timing table, so it is used" in capsys.readouterr().out
    assert measured == ["again"] and summary_of(words, "fourth")["steps"] > 1


def test_a_given_number_of_epochs_that_a_deadline_does_not_allow_is_refused(words, tmp_path):
    given = ["--deadline", "0.5", "--num_epochs", "1000000"]
    with pytest.raises(UserError, match=r"--deadline 0\.5s: training the head alone for 12000000"):
        train_run(parse_training([*words, "other", *given]))
    with pytest.raises(
        UserError, match=r"--deadline 0.5s: .*no time to measure a timing table; first run: python prof"
    ):
        train_run(parse_training([*without_table(words, tmp_path), *given]))


def test_a_default_rho_that_the_head_alone_exceeds_is_raised_and_a_given_one_is_refused(words, capsys, monkeypatch):
    for module in (resolving, time_budget):
        monkeypatch.setattr(module, "smallest_rho", lambda *_: 0.7341)
    few = [*words, "tight", "--max_steps", "2"]
    train_run(parse_training(few))
    assert "--rho is 0.74, not 0.5: training the head alone takes 73.4% of a full step here" in capsys.readouterr().out
    assert summary_of(words, "tight")["rho"] == 0.74
    train_run(parse_training([*few, "--resume"]))
    with pytest.raises(UserError, match=r"--rho 0\.5: training the head alone .*; give at least 0\.735"):
        train_run(parse_training([*few, "--rho", "0.5"]))


def test_the_closed_form_head_alone_trains_nothing_else(words):
    given = [*words, "head_alone", "--train_type", "closed_form_head", "--batch_size", "4", "--num_epochs", "3"]
    settings = parse_training(given)
    assert settings.num_epochs == 1
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
        resolve(replace(parse_training(words), num_classes=3), make_small_model(), load, **more)
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
    ("more", "room_mb", "table_of", "sizes"),
    [  # sizes of the batch and its parts, and the MB that images may take
        ([], 360.0, None, (32, 0, 0.0)),
        ([], 700.0, None, (32, 0, 250.0)),  # a quarter of what is available is the most
        ([], 359.9, None, (32, 16, 159.9)),
        ([], 199.9, None, (32, 8, 79.9)),
        ([], 200.0, 32, (32, 0, 20.0)),  # there is a table: half of the tensors are enough
        ([], 199.9, 8, (32, 8, 134.9)),
        ([], 59.9, None, (32, 1, 9.9)),
        (["--train_type", "full_training"], 60.0, None, (32, 1, 0.0)),
        (["--train_type", "full_training", "--batch_size", "1"], 60.0, None, (1, 0, 10.0)),
        (["--train_type", "full_training", "--micro_batch", "8"], 129.9, None, (8, 8, 9.9)),
        (["--preset", "paper", "--batch_size", "32"], 359.9, 32, (32, 0, 179.9)),
        (["--train_type", "closed_form_head"], 209.9, None, (32, 0, 29.9)),
        (["--train_type", "closed_form_head"], 59.9, None, (4, 0, 19.9)),
    ],
)
def test_a_run_chooses_exactly_what_fits(more, room_mb, table_of, sizes, many_photos, monkeypatch, tmp_path):
    monkeypatch.setattr(budget, "reachable_memory_mb", lambda: 1800.0)
    monkeypatch.setattr(budget, "resident_memory_mb", lambda: 800.0)
    monkeypatch.setattr(images, "available_memory_mb", lambda: 1000.0)
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    monkeypatch.setattr(resolving, "profile_task", lambda *_, **__: None)
    monkeypatch.setattr(resolving, "save_table", lambda *_: None)
    monkeypatch.setattr(resolving, "load_table", lambda *_: make_table(make_small_model()))
    asked = []

    def needed_mb(self, mask, batch_size, micro_batch=None):
        asked.append((batch_size, part_rows(batch_size, micro_batch), mask[0]))
        rows = part_rows(batch_size, micro_batch)
        return (10 * rows + (40 if rows == batch_size else 50)) / (1 if mask[0] else 2)

    monkeypatch.setattr(TracedSteps, "needed_mb", needed_mb)
    given = [*many_photos, "--rho", "1"] if "--train_type" not in more else many_photos
    given = [*given, "--memory", f"{800 + room_mb}M", *more]
    if table_of is not None:
        settings = replace(parse_training(given), num_classes=3, batch_size=table_of)
        write_record(table_folder(settings) / "profile.json", {"environment": environment()})
    chosen, images_mb = chosen_before_images(given)
    assert (chosen.batch_size, chosen.micro_batch) == sizes[:2]
    assert images_mb == pytest.approx(sizes[2])
    assert len({*asked}) <= 19


@pytest.mark.parametrize(("more", "parts"), [([], 16), (["--export", "tflite"], 16), (["--export", "train_tflite"], 0)])
def test_this_machines_memory_does_not_decide_for_a_board(more, parts, many_photos, monkeypatch):
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    monkeypatch.setattr(TracedSteps, "check", lambda *_: None)
    monkeypatch.setattr(budget, "reachable_memory_mb", lambda: (budget.resident_memory_mb() or 0.0) + 1e4)
    needed = {32: 2e4}
    monkeypatch.setattr(TracedSteps, "needed_mb", lambda self, mask, size, part=None: needed.get(part or size, 1.0))
    given = [*many_photos, "--train_type", "full_training", "--batch_size", "32", *more]
    assert chosen_before_images(given)[0].micro_batch == parts


@pytest.mark.parametrize("is_for_board", [False, True])
def test_selections_stay_within_the_memory_there_is_unless_a_board_trains(
    is_for_board, many_photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    monkeypatch.setattr(resolving, "profile_task", lambda *_, **__: None)
    monkeypatch.setattr(resolving, "save_table", lambda *_: None)
    monkeypatch.setattr(resolving, "load_table", lambda *_: make_table(make_small_model()))
    retimed = {"retimed": lambda table, batch_size: table} if is_for_board else {}
    chosen_before_images([*many_photos, "--rho", "1", "--batch_size", "4"], **retimed)
    assert ("memory: selections stay within" in capsys.readouterr().out) != is_for_board, "its memory is not known"


def test_a_rate_follows_the_batch():
    rates = [rate_at(size) for size in (8, 16, 32, 64)]
    assert rates == pytest.approx([rates[2] / 4, rates[2] / 2, rates[2], rates[2]], rel=1e-3)
