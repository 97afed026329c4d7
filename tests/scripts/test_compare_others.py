"""What people would use instead, in numbers, and one of its runs."""

import csv
import subprocess
import sys

import compare_others
import keras
import numpy as np
from command_line import ROOT
from PIL import Image

from elastic_trainer.networks import candidates


def test_what_others_reach_is_the_best_so_far_at_each_time(tmp_path):
    path = tmp_path / "others_x.csv"
    best, small = "efficientnetlite0", "mobilenetv2"
    rows = [("pytorch_full", small, 300, seed, "20:0.5 50:0.4 200:0.8", "") for seed in (0, 1)]
    rows.append(("pytorch_full", best, 600, 0, "20:0.7 500:0.9", ""))
    times = (30, 60, 120, 300, 600)
    rows += [("main.py --deadline", "chosen", one, 0, f"{one - 1}:{0.3 + one / 1e3}", "") for one in times]
    rows.append(("lda", small, 300, 0, "70:0.6", ""))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("method", "network", "seconds", "seed", "curve", "commit"), *rows])
    lines = compare_others.others_table(tmp_path).splitlines()
    assert lines[2:] == [
        "| PyTorch's tutorial, all layers | MobileNetV2 0.35 | 50.0 · 50.0 · 50.0 · 80.0 · – |",
        "| scikit-learn, linear discriminant analysis | MobileNetV2 0.35 | – · – · 60.0 · 60.0 · 60.0 |",
        "| PyTorch's tutorial, all layers | EfficientNet-Lite0 | 70.0 · 70.0 · 70.0 · 70.0 · 90.0 |",
        "| **`main.py --deadline`** | as it chooses | 33.0 · 36.0 · 42.0 · 60.0 · 90.0 |",
    ]


def test_one_of_the_others_runs_on_the_photos_of_the_study(tmp_path):
    """A row a run, which is not repeated; the network and its weights are those of main.py."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 3)):
        for name in ("a", "b"):
            folder = tmp_path / "root" / "dogs" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                photo = rng.integers(0, 128, (40, 40, 3), np.uint8) + 100 * (name == "b")
                Image.fromarray(photo.astype(np.uint8)).save(folder / f"{index}.png")
    weights = tmp_path / "random.weights.h5"
    keras.applications.MobileNetV2((160, 160, 3), 0.35, include_top=False, weights=None).save_weights(weights)
    words = [
        "--data",
        "dogs",
        "--data_root",
        tmp_path / "root",
        "--weights_file",
        weights,
        "--logdir",
        tmp_path / "logs",
    ]
    words += ["--results", tmp_path, "--only", "lda_*"]
    command = [sys.executable, ROOT / "scripts/study/compare_others.py", *words]
    for _ in range(2):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    kept = tmp_path / "logs" / "keras" / "models"
    assert {path.name for path in kept.iterdir()} >= {candidates.weights_file(size) for size in (128, 160, 224)}
    rows = [*csv.DictReader((tmp_path / "others_dogs.csv").open())]
    assert {row["network"] for row in rows} == {"mobilenetv2", "efficientnetlite0"} and len(rows) == 2
    for row in rows:
        seconds, accuracy = map(float, row["curve"].split(":"))
        assert row["method"] == "lda" and seconds > 1 and 0 <= accuracy <= 1 and "lda_" not in done.stdout
