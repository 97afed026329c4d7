"""A command that leaves something open: batch size, timing table, epochs."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_images import write_noise

from elastic_trainer.cli import choices
from elastic_trainer.cli.choices import _with_sizes, with_memory
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.errors import UserError
from elastic_trainer.files import write_json
from elastic_trainer.machine import resident_memory_mb
from elastic_trainer.memory import budget
from elastic_trainer.memory.budget import MemoryBudget
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.runs.config import FREE_ON_RESUME, first_change
from elastic_trainer.runs.reader import read_config
from elastic_trainer.selection.run_time import RunTime
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


@pytest.fixture
def words(tmp_path):
    (tmp_path / "network.py").write_text(NETWORK)
    photos = write_noise(tmp_path / "photos")
    return [
        *("--dataset_name", "image_folder", "--data_dir", str(photos), "--model_name", f"{tmp_path}/network.py:small"),
        *("--input_size", "12", "--logdir", str(tmp_path / "logs"), "--run_name", "mine", "--save_model"),
        *("--train_type", "elastic_training_upper_part", "--recipe", "robust"),
    ]


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_a_run_without_a_timing_table_measures_one_and_the_next_run_finds_it(words, tmp_path, capsys, monkeypatch):
    for name in ("MAX_ERROR", "MAX_FREE"):  # it is measured on a busy machine
        monkeypatch.setattr(f"elastic_trainer.timing.table.{name}", math.inf)
    train_run(parse_training([*words, "--num_epochs", "1", "--rho", "1"]))
    [profile] = (tmp_path / "logs" / "profiles").glob("*/profile.json")
    record = json.loads(profile.read_text())
    assert (
        record["is_quick"] and record["fit"]["selections"] <= 5 and "measuring a short one" in capsys.readouterr().out
    )
    written = profile.stat().st_mtime_ns
    train_run(parse_training([*words, "--num_epochs", "1", "--rho", "1"]))
    assert profile.stat().st_mtime_ns == written
    assert "no timing table" not in capsys.readouterr().out


def test_a_deadline_chooses_the_epochs_and_is_kept_with_all_that_a_run_does(words, tmp_path):
    command = parse_training([*words, "--deadline", "120"])
    assert {"num_epochs", "batch_size"} <= command.open
    train_run(command)
    summary = summary_of(tmp_path / "logs" / "mine")
    assert summary["steps"] == summary["planned_steps"] == 600
    assert 1 < summary["elapsed_seconds"] < 120
    assert summary["elapsed_seconds"] > summary["train_seconds"] + summary["validation_seconds"]


@pytest.mark.parametrize("deadline", ["40", "46"])
def test_a_deadline_too_short_for_steps_gives_the_closed_form_head(words, deadline, tmp_path, capsys, monkeypatch):
    if deadline == "40":
        monkeypatch.setattr(choices, "TABLE_SHARE", 0.0)
    else:  # there is a table, but no time to train by it
        train_run(parse_training([*words, "--num_epochs", "1", "--rho", "1", "--run_name", "before"]))
        monkeypatch.setattr(RunTime, "of", lambda *_: RunTime(1.0, first_model=1e3))
    train_run(parse_training([*words, "--deadline", deadline]))
    run = tmp_path / "logs" / "mine"
    assert f"--deadline {deadline}s: there is no t" in capsys.readouterr().out
    summary = summary_of(run)
    assert (summary["train_type"], summary["steps"], summary["epochs"]) == ("closed_form_head", 1, 1)
    assert json.loads((run / "config.json").read_text())["train_type"] == "closed_form_head"
    assert load_model(run / "best.keras", "--weights").output_shape == (None, 3)
    resumed = parse_training([*words, "--deadline", deadline, "--resume"]).with_choices_of(read_config(run))
    assert (resumed.train_type, resumed.training.max_steps) == ("closed_form_head", 1)
    assert first_change(resumed.config, read_config(run), FREE_ON_RESUME) is None


def test_an_unreliable_timing_table_is_reported_and_measured_again_by_the_next_run(
    words, tmp_path, capsys, monkeypatch
):
    given = [*words, "--num_epochs", "1", "--rho", "1"]
    train_run(parse_training(given))
    [path] = (tmp_path / "logs" / "profiles").glob("*/profile.json")
    record = json.loads(path.read_text())
    write_json(path, {**record, "fit": {**record["fit"], "median_error_percent": 31.0}})
    measured, doubt = [], "it predicts measured steps with a median error of 31%"
    monkeypatch.setattr(choices, "_measure_table", lambda *_: measured.append("again"))  # on a machine still busy
    capsys.readouterr()

    train_run(parse_training([*given, "--run_name", "second"]))
    out = capsys.readouterr().out
    assert measured == ["again"] and f"an unreliable timing table ({doubt}) in {path.parent}: measuring" in out
    assert f"the timing table is unreliable: {doubt}; was the device busy? The next run measures again" in out
    assert summary_of(tmp_path / "logs" / "second")["table_doubt"] == doubt

    train_run(parse_training([*given, "--run_name", "second", "--resume"]))
    assert measured == ["again"], "a run that is continued keeps the table that it started with"
    assert f"the timing table is unreliable: {doubt}; this run keeps it" in capsys.readouterr().out
    train_run(parse_training([*given, "--run_name", "third", "--allow_stale_profile"]))
    assert measured == ["again"] and "this run keeps it" in capsys.readouterr().out


def test_a_deadline_without_time_to_measure_again_uses_the_unreliable_table(words, tmp_path, capsys, monkeypatch):
    train_run(parse_training([*words, "--num_epochs", "1", "--rho", "1"]))
    monkeypatch.setattr("elastic_trainer.timing.table.MAX_ERROR", -1.0)
    monkeypatch.setattr(choices, "TABLE_SHARE", 0.0)
    train_run(parse_training([*words, "--deadline", "60", "--run_name", "second"]))
    assert "there is no time to measure a timing table, so it is used" in capsys.readouterr().out
    assert summary_of(tmp_path / "logs" / "second")["steps"] > 1


def test_a_given_number_of_epochs_without_time_for_a_timing_table_is_refused(words, monkeypatch):
    monkeypatch.setattr(choices, "TABLE_SHARE", 0.0)
    with pytest.raises(UserError, match=r"--deadline 60s: .*no time to measure a timing table; first run: python prof"):
        train_run(parse_training([*words, "--deadline", "60", "--num_epochs", "2"]))


def test_the_closed_form_head_alone_trains_nothing_else(words, tmp_path):
    train_run(parse_training([*words[:-4], "--train_type", "closed_form_head", "--batch_size", "4"]))
    summary = summary_of(tmp_path / "logs" / "mine")
    assert summary["steps"] == 1 and summary["final_accuracy"] == summary["best_accuracy"]
    command = parse_training([*words[:-4], "--train_type", "closed_form_head", "--num_epochs", "3"])
    assert command.training.num_epochs == 1 and "--num_epochs: no effect here" in command.warnings[0]


def test_the_closed_form_head_is_the_first_best_model(words, tmp_path):
    command = parse_training([*words, "--num_epochs", "1", "--rho", "1", "--learning_rate", "1e-9"])
    train_run(command.choose(average_head=False))
    summary = summary_of(tmp_path / "logs" / "mine")
    assert summary["starts_with_head"] and summary["start_accuracy"] is not None
    model = load_model(tmp_path / "logs" / "mine" / "last.keras", "--weights")
    assert np.abs(model.trainable_variables[-1]).max() < 1e-3, "training started from the new head"


def test_the_batch_is_smaller_where_there_are_few_images_or_little_memory(small_model, monkeypatch, tmp_path):
    photos = write_noise(tmp_path / "photos")  # 12 training images
    given = ["--dataset_name", "image_folder", "--data_dir", str(photos)]
    command = parse_training(given)
    steps = TracedSteps(small_model, command.network)
    smaller = _with_sizes(command, steps)
    assert (command.network.batch_size, smaller.network.batch_size) == (32, 1)
    assert smaller.training.learning_rate == pytest.approx(command.training.learning_rate / 32, rel=1e-3)
    assert smaller.config["batch_size"] == 1 and smaller.config["learning_rate"] == smaller.training.learning_rate
    for more, rate in ((["--batch_size", "4"], None), (["--learning_rate", "0.5"], 0.5)):
        command = _with_sizes(parse_training([*given, *more]), steps)
        assert command.network.batch_size == (4 if rate is None else 1)
        assert rate is None or command.training.learning_rate == rate
    adam = parse_training([*given, "--optimizer", "adam"])
    assert _with_sizes(adam, steps).training.learning_rate == adam.training.learning_rate
    for index in range(400):
        (photos / "train" / "ant" / f"more{index}").touch()
    assert _with_sizes(parse_training(given), steps).network.batch_size == 32
    for path in photos.glob("t*"):
        path.rename(photos / "all") if path.name == "train" else shutil.rmtree(path)
    halves = ["--dataset_name", "image_folder", "--data_dir", str(photos / "all"), "--test_fraction", "0.5"]
    assert _with_sizes(parse_training(halves), steps).network.batch_size == 16, "of 412"
    monkeypatch.setattr(budget, "reachable_memory_mb", lambda: (resident_memory_mb() or 0.0) + 30.0)
    assert _with_sizes(parse_training(halves), steps).network.batch_size < 16


@pytest.mark.parametrize(
    ("more", "room_mb", "table_of", "sizes"),
    [  # sizes of the batch and its parts, and the MB that images may take
        ([], 360.0, None, (32, None, 0.0)),
        ([], 700.0, None, (32, None, 250.0)),  # a quarter of what is available is the most
        ([], 359.9, None, (32, 16, 159.9)),
        ([], 199.9, None, (32, 8, 79.9)),
        ([], 200.0, 32, (32, None, 20.0)),  # there is a table: half of the tensors are enough
        ([], 199.9, 8, (32, 8, 134.9)),
        ([], 59.9, None, (32, 1, 9.9)),
        ([], 49.9, None, (1, None, 0.0)),  # no part fits
        (["--batch_size", "16"], 49.9, None, (16, None, 0.0)),
        (["--micro_batch", "8"], 100.0, None, (4, 8, 20.0)),
        (["--recipe", "paper"], 209.9, None, (16, None, None)),
        (["--image_memory", "7"], 359.9, None, (32, 16, None)),
        (["--train_type", "closed_form_head"], 209.9, None, (32, None, 29.9)),
    ],
)
def test_a_robust_run_chooses_exactly_what_fits(more, room_mb, table_of, sizes, small_model, monkeypatch, tmp_path):
    photos = write_noise(tmp_path / "photos")
    for index in range(400):
        (photos / "train" / "ant" / f"more{index}").touch()
    monkeypatch.setattr(budget, "reachable_memory_mb", lambda: 1800.0)
    monkeypatch.setattr(choices.images, "available_memory_mb", lambda: 1000.0)
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    asked = []

    def needed_mb(self, mask, batch_size, micro_batch=None):
        asked.append((batch_size, part_rows(batch_size, micro_batch), mask[0]))
        rows = part_rows(batch_size, micro_batch)
        return (10 * rows + (40 if rows == batch_size else 50)) / (1 if mask[0] else 2)

    monkeypatch.setattr(TracedSteps, "needed_mb", needed_mb)
    given = ["--dataset_name", "image_folder", "--data_dir", str(photos), "--logdir", str(tmp_path / "logs")]
    command = parse_training([*given, "--memory", f"{800 + room_mb}M", *more]).with_classes(3)
    if table_of is not None:
        part = dataclasses.replace(command.network, batch_size=table_of)
        write_json(table_folder(part, tmp_path / "logs") / "profile.json", {})
    memory = MemoryBudget(command.training.memory, start_mb=800.0)
    chosen = _with_sizes(command, TracedSteps(small_model, command.network, memory))
    assert (chosen.network.batch_size, chosen.training.micro_batch) == sizes[:2]
    assert chosen.images_mb == (sizes[2] if sizes[2] is None else pytest.approx(sizes[2]))
    assert chosen.data.image_memory == command.data.image_memory, "features are not limited by it"
    assert chosen.config["micro_batch"] == sizes[1] and len({*asked}) <= 18
    resumed = parse_training([*given, *more]).with_classes(3).with_choices_of(chosen.config)
    assert "micro_batch" not in resumed.open and first_change(resumed.config, chosen.config, FREE_ON_RESUME) is None


def test_this_machines_memory_does_not_decide_for_a_board(small_model, monkeypatch, tmp_path):
    photos = ["--dataset_name", "image_folder", "--data_dir", str(write_noise(tmp_path / "photos"))]
    times = tmp_path / "times.json"
    times.write_text("{}")
    for more, chooses in (
        ([], True),
        (["--export", "tflite"], True),
        (["--export", "train_tflite"], False),
        (["--plan", "--board_times", str(times)], False),
    ):
        assert ("micro_batch" in parse_training([*photos, *more]).open) == chooses, more
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    for more, is_limited in ([], True), (["--plan", "--board_times", str(times)], False):
        command = parse_training([*photos, *more])
        steps = TracedSteps(small_model, command.network)
        with_memory(command, steps)
        assert steps.memory.has_limit == is_limited, "a board's times come without its memory"


def test_a_rate_follows_the_batch(tmp_path):
    given = ["--dataset_name", "image_folder", "--data_dir", str(Path(tmp_path))]
    rates = [parse_training([*given, "--batch_size", str(size)]).training.learning_rate for size in (8, 16, 32, 64)]
    assert rates == pytest.approx([rates[2] / 4, rates[2] / 2, rates[2], rates[2]], rel=1e-3)


def test_epochs_that_were_asked_for_do_not_fit(words):
    train_run(parse_training([*words, "--num_epochs", "1", "--rho", "1"]))
    with pytest.raises(UserError, match=r"--deadline 0\.5s: training the head alone for 12000000"):
        train_run(parse_training([*words, "--deadline", "0.5", "--num_epochs", "1000000", "--run_name", "other"]))
