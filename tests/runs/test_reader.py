"""Reading the folders of earlier runs."""

import csv
import json
import os
import re

import pytest
from made_up_runs import made_up_run

from elastic_trainer.cli.commands import parse_training
from elastic_trainer.runs.reader import latest_importance, read_config, read_run, read_summary
from elastic_trainer.system.errors import UserError


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


@pytest.mark.parametrize("content", ["", '{"version', "null", "[1]", b"\xff", "{}", '{"version": 0}'], ids=repr)
def test_a_damaged_file_of_a_run_and_one_of_another_version_is_one_line_that_names_it(content, tmp_path):
    for kind, read in (("config", read_config), ("summary", read_summary)):
        folder = made_up_run(tmp_path / kind)
        path = folder / f"{kind}.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: is damaged or of another version; delete it$"):
            read(folder)
        with pytest.raises(UserError, match=f"{folder}: contains no finished run"):
            read_run(folder)


@pytest.mark.parametrize("name", ["\U0001f400.csv", "caf\udce9.csv"], ids=["emoji", "not UTF-8"])
def test_summary_with_an_odd_name_is_read_like_any_other(name, tmp_path):
    folder = made_up_run(tmp_path / "run")
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "energy_meter": name}))
    assert read_summary(folder)["energy_meter"] == name


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
    "content",
    [
        b"",
        b"epoch,name,importance,chosen\n0,a,1,1\n0,b,2,0\n1,a,1,1\n",
        b"epoch,name,importance,chosen\n0,a,much,1\n",
        b"name,importance,chosen\na,1,1\n",
        b"\xff\xfe",
    ],
)
def test_damaged_selections_are_one_line_and_are_passed_over_where_another_run_has_some(content, tmp_path):
    whole, damaged = made_up_run(tmp_path / "whole"), made_up_run(tmp_path / "damaged")
    (damaged / "selections.csv").write_bytes(content)
    os.utime(damaged / "selections.csv", (2e9, 2e9))
    with pytest.raises(UserError, match=r"selections\.csv: is damaged or of another version; delete it"):
        read_run(damaged).selections()
    found = latest_importance(tmp_path, ["t0", "t1"])
    assert found is not None and found[1].parent == whole
    (damaged / "selections.csv").write_text("name,importance\nt0,inf\nt1,1\n")
    os.utime(damaged / "selections.csv", (2e9, 2e9))
    found = latest_importance(tmp_path, ["t0", "t1"])
    assert found is not None and found[1].parent == whole
