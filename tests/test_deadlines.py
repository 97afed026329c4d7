"""`main.py --deadline` ends in time, export included, on a device that is four times slower than this one."""

import json
import subprocess
import sys

import numpy as np
from command_line import ROOT
from PIL import Image
from small_images import write_noise

import main
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.cli.resolve import TABLE_SHARE
from elastic_trainer.networks import tflite

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
    assert float(done.stdout.rsplit("ended after ", 1)[1]) < 120
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["best_accuracy"] is not None
    assert (tmp_path / "mine" / "model_dynamic.tflite").is_file()
    [table] = tmp_path.glob("profiles/*/profile.json")
    assert 0 < json.loads(table.read_text())["profiling_seconds"] < TABLE_SHARE * 120


def test_the_export_is_tried_before_a_deadline_is_divided(tmp_path, capsys, monkeypatch):
    """What one conversion takes on this device decides what is kept for the export; here it leaves none for steps."""
    (tmp_path / "network.py").write_text(NETWORK)
    photos = write_noise(tmp_path / "photos")
    words = ["--dataset_name", "image_folder", "--data_dir", str(photos), "--export", "tflite", "--input_size", "12"]
    words += ["--model_name", f"{tmp_path}/network.py:wide"]
    words += ["--train_type", "elastic_training_upper_part", "--logdir", str(tmp_path), "--run_name", "mine"]
    monkeypatch.setattr(tflite, "conversion_seconds", lambda model: 50.0)
    main.train_run(parse_training([*words, "--deadline", "140"]))
    assert "--deadline 2m 20s: there is no time for training steps" in capsys.readouterr().out
    assert (tmp_path / "mine" / "model.tflite").is_file()
