"""`main.py --deadline` ends by the clock, export included, also on a device that is four times slower than this one."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from command_line import ROOT
from PIL import Image
from small_images import write_noise
from small_runs import rows_of

import main
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.engine.optimizers import WarmupCosine, make_optimizer, pass_time
from elastic_trainer.networks import tflite
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.runs.deadline import LATEST, MARGIN, SHARE, Deadline
from elastic_trainer.runs.engine import Engine
from elastic_trainer.runs.history import Clocks, History
from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import Stopped, UserError

# By this clock everything takes four times as long.
SLOW_DEVICE = """
import runpy, sys, time
from elastic_trainer.system import machine
clock, since_start = time.perf_counter, machine.seconds_since_start
time.perf_counter = lambda: 4 * clock()
machine.seconds_since_start = lambda: 4 * since_start()
sys.argv = sys.argv[1:]
main = runpy.run_path(sys.argv[0])
main["main"]()
print("ended after", machine.seconds_since_start())
"""
# Steps take about 60 ms, and 600 of them longer than the deadline; tracing and converting it take little.
NETWORK = """
import keras

def wide(shape, classes):
    inputs = keras.Input(shape)
    x = keras.layers.Conv2D(32, 3, activation="relu")(inputs)
    x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(64, 3, activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(classes)(x))
"""


def test_a_deadline_is_kept_on_a_slow_device_with_its_export(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("test", 20)):
        for name in ("ant", "bee"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    (tmp_path / "network.py").write_text(NETWORK)
    words = ["--dataset_name", "image_folder", "--data_dir", tmp_path / "photos", "--export", "tflite"]
    words += ["--model_name", f"{tmp_path}/network.py:wide", "--input_size", "48", "--batch_size", "16"]
    words += ["--train_type", "elastic_training_upper_part"]
    words += ["--deadline", "2m", "--logdir", tmp_path, "--run_name", "mine"]
    words = [sys.executable, "-c", SLOW_DEVICE, ROOT / "main.py", *words]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert 90 < float(done.stdout.rsplit("ended after ", 1)[1]) < 122
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["best_accuracy"] is not None and summary["steps"] > 100
    assert (tmp_path / "mine" / "model_dynamic.tflite").is_file()
    rates = [float(row["learning_rate"]) for row in rows_of(tmp_path / "mine" / "metrics.csv") if row["learning_rate"]]
    assert rates[-1] < 0.05 * max(rates), "it follows the clock, and ends at 0"


@pytest.fixture
def words(tmp_path):
    (tmp_path / "network.py").write_text(NETWORK)
    photos = write_noise(tmp_path / "photos")
    return [
        *("--dataset_name", "image_folder", "--data_dir", str(photos), "--input_size", "12", "--save_model"),
        *("--model_name", f"{tmp_path}/network.py:wide", "--train_type", "elastic_training_upper_part"),
        *("--logdir", str(tmp_path), "--run_name", "mine"),
    ]


def test_the_export_is_tried_before_training_and_its_time_is_kept(tmp_path, words, capsys, monkeypatch):
    """What converting takes on this device decides what is kept for the export; here it leaves none for steps."""
    monkeypatch.setattr(tflite, "conversion_seconds", lambda model: 100.0)
    main.train_run(parse_training([*words, "--export", "tflite", "--deadline", "140"]))
    assert "there was no time for a training step" in capsys.readouterr().out
    assert (tmp_path / "mine" / "model.tflite").is_file()
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["selection_seconds"] > 0, "it selects before its first model"


def test_a_deadline_too_short_for_steps_leaves_the_closed_form_head(tmp_path, words, capsys):
    main.train_run(parse_training([*words, "--deadline", "0.5"]))
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["starts_with_head"]) == (0, 0, True)
    assert summary["best_accuracy"] == summary["final_accuracy"] == summary["start_accuracy"]
    assert summary["selection_seconds"] == 0, "late, the first model comes first"
    assert load_model(tmp_path / "mine" / "best.keras", "--weights").output_shape == (None, 3)
    assert "0.5s allowed" in capsys.readouterr().out
    main.train_run(parse_training(["--resume", str(tmp_path / "mine")]))


def test_a_signal_ends_the_pass_for_the_first_model(words, monkeypatch):
    def check(self):
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(StopSignals, "check", check)
    monkeypatch.setattr(Trainer, "evaluate", None)  # which comes after that pass
    with pytest.raises(Stopped, match="stopped after step 0; continue with"):
        main.train_run(parse_training([*words, "--deadline", "30"]))


def test_the_time_for_averaging_is_measured_where_no_model_is_saved_too(tmp_path, words):
    words.remove("--save_model")
    main.train_run(parse_training([*words, "--deadline", "8"]))
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["first_model_seconds"] > 0.01
    assert not summary["starts_with_head"] and not (tmp_path / "mine" / "best.keras").exists()


@pytest.mark.parametrize("fitting", [4, 0])
def test_fewer_images_test_after_training_where_time_is_short(fitting, tmp_path, words, capsys, monkeypatch):
    write_noise(tmp_path / "photos", seed=2, valid=2)  # so that test/ is read after training
    monkeypatch.setattr(Deadline, "fitting_tests", lambda self: fitting)
    main.train_run(parse_training([*words, "--deadline", "8"]))
    summary, printed = json.loads((tmp_path / "mine" / "summary.json").read_text()), capsys.readouterr().out
    assert f"tested on {fitting} of 9 images: time is short; python main.py --evaluate {tmp_path}/mine" in printed
    assert summary.get("test_images") == (fitting or None)


def test_a_run_with_a_deadline_and_rho_keeps_both_and_selects_once(tmp_path, words, capsys):
    """Neither computes the other: the clock ends the run, and steps take what was asked."""
    main.train_run(parse_training([*words, "--deadline", "12", "--rho", "0.9"]))
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["steps"] > 30 and summary["rho"] == 0.9
    assert summary["wall_seconds"] < 12
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["interval"] is None and config["deadline"] == 12


# --- the clock --------------------------------------------------------------------------------------------------------


def images(**values):
    """Examples that are counted alone."""
    counts = {"train_count": 30, "test_count": 10, "tested_later": 0}
    return SimpleNamespace(**{**counts, "reading_seconds": 0.0, "export_seconds": 0.0, **values})


def history_after(seconds, **values):
    history = History(clocks=Clocks(elapsed=seconds))
    for name, value in values.items():
        setattr(history, name, value)
    return history


class SmallEngine(SimpleNamespace):
    """What a deadline asks of an engine."""

    averages_later = Engine.averages_later


def deadline_of(history, data, averages=False, missing=1.0, tests_are_made=False, has_limit=False) -> Deadline:
    """After 100 seconds; `missing` is the share of features that are, of the training images."""
    features, evaluation = SimpleNamespace(missing_share=missing), SimpleNamespace(has_features=tests_are_made)
    training, settings = SimpleNamespace(features=features, evaluation=evaluation), Settings(average_head=averages)
    training.memory = SimpleNamespace(has_limit=has_limit)
    engine: Any = SmallEngine(history=history, data=data, training=training, settings=settings)
    return Deadline(100.0, engine)


def test_steps_end_before_the_deadline_by_what_was_measured_last():
    """The longest of the latest validations, and of the test images the features that are missing; averaging as the
    first model, of the features those that are missing, until it was done; a test as long for each image as fitting
    that model, or as a validation."""
    values: dict[str, Any] = {"validation_seconds": [9.0, 2.0, 1.0, 1.5], "first_model_seconds": 3.0}
    values |= {"first_feature_seconds": 2.0, "test_feature_seconds": 4.0}
    assert len(values["validation_seconds"]) > LATEST
    tested = images(tested_later=20, reading_seconds=0.1, export_seconds=2.0)
    for averages, data, fits, missing, are_made, after in (
        (True, tested, True, 1.0, False, 2 + 4 + 3 + 20 * 0.1),
        (True, tested, True, 1.0, True, 2 + 3 + 20 * 0.1),
        (True, tested, True, 0.25, True, 2 + 1.5 + 20 * 0.1),
        (True, tested, False, 0.0, True, 2 + 1 + 20 * 0.6),
        (False, images(), True, 0.0, True, 2.0),
    ):
        kept = data.export_seconds + 0.1 * data.tested_later
        history = history_after(50.0, starts_with_head=fits, **values)
        deadline = deadline_of(history, data, averages, missing, are_made)
        assert deadline.end == pytest.approx(100 * (1 - SHARE) - kept - MARGIN * after)
        assert not deadline.is_over() and deadline.is_over(later=deadline.end - 50)
    limited = deadline_of(history_after(50.0, **values), images(), True, 0.0, True, has_limit=True)
    assert limited.end == pytest.approx(99 - MARGIN * (2 + 4 + 3)), "averaging drops all features"
    averaged = history_after(50.0, **values, average_head_seconds=3.0)
    assert deadline_of(averaged, images(), True, tests_are_made=True).end == pytest.approx(99 - MARGIN * 2)


def test_as_many_images_test_as_there_is_time_for():
    data = images(tested_later=100, reading_seconds=0.1, export_seconds=10.0)
    for now, fitting in ((50.0, 100), (69.0, 100), (80.9, 45), (90.0, 0), (120.0, 0)):
        history = history_after(now, starts_with_head=True, first_model_seconds=3.0)
        assert deadline_of(history, data).fitting_tests() == fitting


def test_the_share_of_the_time_counts_from_the_first_step():
    assert deadline_of(history_after(50.0), images()).share == 0
    for elapsed, share in ((20.0, 0.0), (59.5, 0.5), (99.0, 1.0), (120.0, 1.0)):
        history = history_after(elapsed, first_step_seconds=20.0)
        assert deadline_of(history, images()).share == pytest.approx(share, abs=1e-3)


def test_the_learning_rate_follows_the_larger_share_of_steps_and_of_time():
    steps, warmup = 1000, 0.1
    plain, clock = WarmupCosine(0.1, steps, warmup), WarmupCosine(0.1, steps, warmup)
    for share in (0.05, 0.1, 0.3, 0.7, 1.0):
        clock.passed.assign(share)
        assert float(clock(0)) == pytest.approx(float(plain(share * steps)), abs=1.1e-3), "few steps, by the clock"
        assert float(clock(steps)) == pytest.approx(0, abs=1e-6), "all steps"
    optimizer = make_optimizer("sgd", 0.1, 0.0, steps)
    pass_time(optimizer, 1.7)
    assert float(optimizer.learning_rate) == pytest.approx(0, abs=1e-6)
    pass_time(keras.optimizers.SGD(0.1), 0.5)  # a schedule of the user's own stays


def test_a_deadline_of_a_board_is_refused(words):
    with pytest.raises(UserError, match="--deadline: cannot be combined"):
        parse_training([*words, "--deadline", "5m", "--export", "board"])
