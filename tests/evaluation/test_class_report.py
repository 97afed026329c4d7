"""The class report: its numbers compared with naive counting, its files, and the confusion matrix."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import SIZE
from matplotlib import cbook

from elastic_trainer.evaluation.class_report import (
    SHOWN_CLASSES,
    class_results,
    confusion,
    write_report,
)
from elastic_trainer.evaluation.pictures import draw_confusion
from elastic_trainer.evaluation.predictions import Predictions


def made_up_predictions(classes=4, count=60, seed=0):
    """Predictions, two thirds of them correct. The last class has no images and is never predicted."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes - 1, count)
    predicted = np.where(rng.random(count) < 0.67, labels, rng.integers(0, classes - 1, count))
    losses = np.where(labels == predicted, 0.1, 3.0) + rng.random(count)
    wrong = sorted(np.flatnonzero(labels != predicted), key=lambda k: -losses[k])
    worst = {int(k): np.zeros((SIZE, SIZE, 3), np.uint8) for k in wrong[:24]}
    return Predictions(labels, predicted, losses, np.full(count, 0.9), worst)


def test_class_results_equal_naive_counting_and_start_with_the_lowest_f1():
    predictions = made_up_predictions()
    names = ["ant", "bee", "cat", "dog"]
    results = class_results(confusion(predictions, 4), names)
    pairs = list(zip(predictions.labels, predictions.predicted, strict=True))
    for r in results[:-1]:
        right = sum(true == predicted == r.number for true, predicted in pairs)
        images, taken = (sum(pair[i] == r.number for pair in pairs) for i in (0, 1))
        assert (r.name, r.support, r.predicted) == (names[r.number], images, taken)
        assert (r.precision, r.recall) == (right / taken, right / images)
        assert r.f1 == pytest.approx(2 / (taken / right + images / right))
        others = [sum(pair == (r.number, k) for pair in pairs) for k in range(4) if k != r.number]
        assert r.taken_for_count == max(others)
        assert r.taken_for is None or pairs.count((r.number, names.index(r.taken_for))) == max(others)
    scores = [r.f1 for r in results if r.f1 is not None]
    assert scores == sorted(scores) and len(scores) == len(results) - 1
    assert results[-1].name == "dog" and results[-1].f1 is None and results[-1].support == 0


def test_the_report_writes_all_files_with_consistent_numbers(tmp_path):
    predictions, names = made_up_predictions(), ["ant", "bee, red", "cat", "dog"]
    text = write_report(predictions, names, tmp_path / "evaluation", {"model": "m"})
    folder = tmp_path / "evaluation"
    with (folder / "classes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == set(names)
    assert [row["f1"] for row in rows][-1] == "" and rows[-1]["name"] == "dog"
    with (folder / "confusion.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0][1:] == names and [row[0] for row in table[1:]] == names
    counts = np.array([row[1:] for row in table[1:]], int)
    assert counts[1, 2] == np.sum((predictions.labels == 1) & (predictions.predicted == 2))
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["accuracy"] == pytest.approx(np.trace(counts) / 60)
    assert record["loss"] == pytest.approx(predictions.losses.mean())
    assert record["mistakes"] == 60 - np.trace(counts)
    assert record["classes_without_test_images"] == 1 and record["model"] == "m"
    assert record["macro_f1"] == pytest.approx(np.mean([float(row["f1"]) for row in rows[:3]]))
    for picture in ("confusion.png", "confusion.pdf", "mistakes.png"):
        assert (folder / picture).stat().st_size > 1000
    lines = text.splitlines()
    assert f"accuracy {record['accuracy']:.1%}" in lines[0]
    assert lines[3].startswith(rows[0]["name"])

    right = replace(predictions, predicted=predictions.labels, worst={})
    write_report(right, names, folder, {})
    assert not (folder / "mistakes.png").exists(), "pictures of an earlier evaluation are removed"


NAMES_WITH_DOLLARS = ["cost $5 or $6", "$\\frac{$", "a\\$b$", "$"]


def test_dollars_in_class_names_are_drawn_as_they_are(tmp_path):
    predictions, names = made_up_predictions(), NAMES_WITH_DOLLARS
    write_report(predictions, names, tmp_path, {})
    assert (tmp_path / "confusion.png").is_file() and (tmp_path / "mistakes.png").is_file()
    axes = draw_confusion(confusion(predictions, len(names)), names).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert not any(map(cbook.is_math_text, labels))
    assert [label.replace("\\$", "$") for label in labels] == names


def test_a_table_of_40_classes_shows_20_and_mentions_the_rest(tmp_path):
    predictions = made_up_predictions(classes=40, count=400)
    lines = write_report(predictions, [f"kind {k}" for k in range(40)], tmp_path, {}).splitlines()
    assert len(lines) == 1 + 2 + SHOWN_CLASSES + 1 + 1
    assert lines[-2] == "… and 20 better classes in classes.csv"


@pytest.mark.parametrize(("classes", "counted"), [(2, True), (37, False), (200, False)])
def test_the_confusion_matrix_shows_names_and_counts_if_they_fit(classes, counted):
    predictions = made_up_predictions(classes=classes + 1, count=20 * classes)
    names = [f"kind {k}" for k in range(classes)]
    axes = draw_confusion(confusion(predictions, classes), names).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert bool(axes.texts) == axes.get_title().startswith("number of each true class") == counted
