"""Reading the folders of earlier runs."""

import csv
import json
import re
from typing import Any

import pytest
from made_up_runs import made_up_run

from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import UserError
from elastic_trainer.runs.reader import latest_importance, read_config, read_run, read_summary


def test_latest_importance_comes_from_the_run_of_the_same_network(tmp_path):
    assert latest_importance(tmp_path, ["a", "b"]) is None
    for run, rows in (
        ("elastic", [("a", 0.1), ("b", 0.2), ("a", 0.5), ("b", 1.0)]),
        ("other", [("c", 1.0), ("d", 1.0)]),
    ):
        (tmp_path / run).mkdir()
        with (tmp_path / run / "selections.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("name", "importance"), *rows])
    found = latest_importance(tmp_path, ["a", "b"])
    assert found is not None
    importance, source = found
    assert importance.tolist() == [0.5, 1.0] and source.parent.name == "elastic"


DAMAGED: dict[str, tuple[str | None, Any, str]] = {
    "empty": (None, "", "Invalid JSON: EOF"),
    "null": (None, "null", "Input should be an object"),
    "list": (None, "[1]", "Input should be an object"),
    "nested deeply": (None, "[" * 100_000, "Invalid JSON: recursion limit exceeded"),
    "command as text": ("config", {"command": "main.py"}, "command: Input should be a valid array, not 'main.py'"),
    "number in the command": (
        "config",
        {"command": ["--seed", 1]},
        "command: 1: Input should be a valid string, not 1",
    ),
    "no name of a data set": ("config", {"dataset_name": "a b"}, "dataset_name: String should match pattern .* 'a b'"),
    "data set as a list": ("config", {"dataset_name": ["digits"]}, "dataset_name: Input should be a valid string"),
    "size as text": ("config", {"input_size": "64"}, "input_size: Input should be a valid integer, not '64'"),
    "no classes": ("config", {"num_classes": 0}, "num_classes: Input should be greater than 0, not 0"),
    "images as text": ("config", {"images": "all"}, "images: Input should be an object, not 'all'"),
    "no name of a scheme": ("summary", {"train_type": ""}, "train_type: String should match pattern"),
    "accuracy null": ("summary", {"best_accuracy": None}, "best_accuracy: Input should be a valid number, not None"),
    "accuracy above 1": ("summary", {"final_accuracy": 7}, "final_accuracy: Input should be less than or equal to 1"),
    "seconds NaN": ("summary", {"train_seconds": float("nan")}, "train_seconds: Input should be a finite number"),
    "seconds as text": ("summary", {"train_seconds": "long"}, "train_seconds: Input should be a valid number"),
    "spans of one number": ("summary", {"training_spans": [[1]]}, "training_spans: 0: 1: Field required"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_of_a_run_is_one_line_that_names_the_file_and_the_field(damage, tmp_path):
    only, change, message = DAMAGED[damage]
    for kind, read in (("config", read_config), ("summary", read_summary)):
        if only not in (None, kind):
            continue
        folder = made_up_run(tmp_path / kind)
        path = folder / f"{kind}.json"
        path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(UserError) as caught:
            read(folder)
        assert "\n" not in str(caught.value)
        assert re.match(f"{re.escape(str(path))}: {message}.*; repair the file, or train again", str(caught.value))
        with pytest.raises(UserError, match=f"{folder}: contains no finished run"):
            read_run(folder)


@pytest.mark.parametrize("name", ["\U0001f400.csv", "caf\udce9.csv"], ids=["emoji", "not UTF-8"])
def test_summary_with_an_odd_name_is_read_and_checked_like_any_other(name, tmp_path):
    folder = made_up_run(tmp_path / "run")
    path = folder / "summary.json"
    summary = {**json.loads(path.read_text()), "training_spans": [[1.0, 2.0]], "energy_meter": name}
    path.write_text(json.dumps(summary))
    assert [[*span] for span in read_summary(folder)["training_spans"]] == [[1.0, 2.0]]
    assert read_summary(folder)["energy_meter"] == name
    path.write_text(json.dumps({**summary, "training_spans": [[1.0]]}))
    with pytest.raises(UserError, match="training_spans: 0: 1: Field required"):
        read_summary(folder)


def test_fields_that_a_run_lacks_are_left_out(tmp_path):
    folder = made_up_run(tmp_path / "old")
    assert not {"images", "command"} & set(read_config(folder))
    assert not {"time_over_full", "training_spans"} & set(read_summary(folder))


def test_resuming_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--resume .*: contains no run \(no config.json\)"):
        parse_training(["--resume", str(tmp_path)])


def test_the_model_before_training_is_no_epoch_of_a_run(tmp_path):
    folder = made_up_run(tmp_path / "run")
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    first = ["0" if name in ("epoch", "train_seconds") else "" for name in header.split(",")]
    (folder / "metrics.csv").write_text("\n".join([header, ",".join(first), *rows]))
    assert [row["epoch"] for row in read_run(folder).epochs] == ["1", "2", "3", "4"]
