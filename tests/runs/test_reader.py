"""Reading the folders of earlier runs."""

import csv

from elastic_trainer.runs.reader import latest_importance


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
