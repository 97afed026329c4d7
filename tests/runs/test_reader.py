"""Reading the folders of earlier runs."""

import csv
import json
import os
import re
from typing import Any

import pytest
from made_up_runs import made_up_run

from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import UserError
from elastic_trainer.runs.reader import latest_importance, read_config, read_run, read_summary, started_with


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
    "empty": (None, "", "is not valid JSON: Expecting value"),
    "cut short": (None, '{"model_name": "mob', "is not valid JSON: Unterminated string"),
    "null": (None, "null", "must be an object, not None"),
    "list": (None, "[1]", r"must be an object, not \[1\]"),
    "nested deeply": (None, "[" * 100_000, "is not valid JSON: maximum recursion depth exceeded"),
    "no UTF-8": (None, b"\xff", "is not valid JSON: 'utf-8' codec can't decode"),
    "command as text": ("config", {"command": "main.py"}, "command: must be a list, not 'main.py'"),
    "number in the command": ("config", {"command": ["--seed", 1]}, "command: 1: must be text, not 1"),
    "no name of a data set": ("config", {"dataset_name": "a b"}, "dataset_name: must be text that matches .* 'a b'"),
    "data set as a list": ("config", {"dataset_name": ["digits"]}, r"dataset_name: must be text .* \['digits'\]"),
    "size as text": ("config", {"input_size": "64"}, "input_size: must be a whole number from 1, not '64'"),
    "size with a fraction": ("config", {"input_size": 64.5}, "input_size: must be a whole number from 1, not 64.5"),
    "no classes": ("config", {"num_classes": 0}, "num_classes: must be a whole number from 1, not 0"),
    "width 0": ("config", {"alpha": 0}, "alpha: must be a finite number above 0, not 0"),
    "switch as a number": ("config", {"skip_broken": 1}, "skip_broken: must be true or false, not 1"),
    "images as text": ("config", {"images": "all"}, "images: must be an object, not 'all'"),
    "images without classes": ("config", {"images": {}}, "images: class_names: is missing"),
    "no name of a scheme": ("summary", {"train_type": ""}, "train_type: must be text that matches"),
    "accuracy null": (
        "summary",
        {"best_accuracy": None},
        "best_accuracy: must be a .* from 0 to 1, not None",
    ),
    "accuracy true": (
        "summary",
        {"best_accuracy": True},
        "best_accuracy: must be a .* from 0 to 1, not True",
    ),
    "accuracy above 1": (
        "summary",
        {"final_accuracy": 7},
        "final_accuracy: must be a .* from 0 to 1, not 7",
    ),
    "seconds NaN": ("summary", {"train_seconds": float("nan")}, "train_seconds: must be a finite number .*, not nan"),
    "seconds beyond float": ("summary", {"train_seconds": 10**400}, "train_seconds: must be a finite number"),
    "seconds as text": ("summary", {"train_seconds": "long"}, "train_seconds: must be a finite number above 0"),
    "spans of one number": ("summary", {"training_spans": [[1]]}, r"training_spans: 0: must be a list of 2, not \[1\]"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_of_a_run_is_one_line_that_names_the_file_and_the_field(damage, tmp_path):
    only, change, message = DAMAGED[damage]
    for kind, read in (("config", read_config), ("summary", read_summary)):
        if only not in (None, kind):
            continue
        folder = made_up_run(tmp_path / kind)
        path = folder / f"{kind}.json"
        if isinstance(change, dict):
            change = json.dumps({**json.loads(path.read_text()), **change})
        path.write_bytes(change if isinstance(change, bytes) else change.encode())
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
    with pytest.raises(UserError, match="training_spans: 0: must be a list of 2"):
        read_summary(folder)


def test_fields_that_a_run_lacks_are_left_out(tmp_path):
    folder = made_up_run(tmp_path / "old")
    assert not {"images", "command"} & set(read_config(folder))
    assert not {"time_over_full", "training_spans"} & set(read_summary(folder))


def test_flags_of_earlier_versions_that_changed_no_result_are_left_out_when_a_run_is_continued(tmp_path):
    words = ["--seed", "1", "--checkpoint_steps=5", "--allow_tensorflow_kernels", "True", "--alpha", "0.35"]
    folder = made_up_run(tmp_path / "old", command=words)
    assert started_with(folder) == ["--seed", "1", "--alpha", "0.35"]


def test_a_run_with_a_former_flag_that_changes_training_is_finished_but_not_trained_further(tmp_path):
    folder = made_up_run(tmp_path / "old", command=["--warmup", "0.2", "--seed=1"])
    assert started_with(folder) == ["--seed=1"]  # it is finished
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match=r"--resume .*old: was started with --warmup, which this version does not have"):
        parse_training(["--resume", str(folder)])


def test_resuming_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--resume .*: contains no run \(no config.json\)"):
        parse_training(["--resume", str(tmp_path)])


def test_the_model_before_training_is_no_epoch_of_a_run(tmp_path):
    folder = made_up_run(tmp_path / "run")
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    first = ["0" if name in ("epoch", "train_seconds") else "" for name in header.split(",")]
    (folder / "metrics.csv").write_text("\n".join([header, ",".join(first), *rows]))
    assert [row["epoch"] for row in read_run(folder).epochs] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least one"),
        (b"epoch,name,importance,chosen\n0,a,1,1\n0,b,2,0\n1,a,1,1\n", "as many rows for each selection"),
        (b"epoch,name,importance,chosen\n0,a\n", "chosen: must be text|importance: must be text"),
        (b"epoch,name,importance,chosen\n0,a,much,1\n", "could not convert"),
        (b"name,importance,chosen\na,1,1\n", "epoch: is missing"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_damaged_selections_are_one_line_and_are_passed_over_where_another_run_has_some(content, message, tmp_path):
    whole, damaged = made_up_run(tmp_path / "whole"), made_up_run(tmp_path / "damaged")
    (damaged / "selections.csv").write_bytes(content)
    os.utime(damaged / "selections.csv", (2e9, 2e9))
    with pytest.raises(UserError, match=f"selections.csv: .*({message})"):
        read_run(damaged).selections()
    found = latest_importance(tmp_path, ["t0", "t1"])
    assert found is not None and found[1].parent == whole
    (damaged / "selections.csv").write_text("name,importance\nt0,inf\nt1,1\n")
    os.utime(damaged / "selections.csv", (2e9, 2e9))
    found = latest_importance(tmp_path, ["t0", "t1"])
    assert found is not None and found[1].parent == whole
