"""report.py: the page of all figures, from made-up runs."""

import base64
import re

import plot
import plotting
import pytest
import report
from made_up_runs import made_up_run

from elastic_trainer.errors import UserError
from elastic_trainer.machine import environment


def test_page_contains_the_figures_and_a_verdict_on_each_claim(tmp_path):
    logs = tmp_path / "logs"
    made_up_run(logs / "full", scale=4.0)
    made_up_run(logs / "elastic", "elastic_training", 0.5, scale=1.0)
    plot.bars(plotting.group_runs([*logs.iterdir()]), plotting.Sheet(tmp_path / "figure20_quick"), "accuracy")
    text = report.page("quick", logs, tmp_path)
    assert text.count("<img ") == 1 and "data:image/png;base64,iVBOR" in text and "http" not in text
    verdicts = dict(re.findall(r"<tr><td>([^<]*)</td><td class=\"\w+\">([^<]*)</td>", text))
    seen = ["confirmed", "confirmed", "not tested", "not confirmed", "not confirmed", "not tested", "not tested"]
    assert list(verdicts.values()) == seen
    assert verdicts["up to 3.5 times faster than full training"] == "confirmed" and "4× faster" in text
    assert "at most 60 points lost" in text and environment()["processor"] in text
    assert (
        "Not made: Fig 2, Fig 7, Fig 13, Fig 15" in text
        and ", Fig 23, Table 1, Table 2." in text
        and "<summary>all 2 runs</summary>" in text
    )
    with pytest.raises(UserError, match="holds no figure of scale full"):
        report.page("full", logs, tmp_path)


def write_figure(stem, numbers="a,b\n1,2\n"):
    stem.with_name(f"{stem.name}.csv").write_text(numbers)
    stem.with_name(f"{stem.name}.png").write_bytes(b"a picture")


def test_figures_of_one_number_stand_together_and_say_what_the_paper_shows_as_the_papers(tmp_path):
    for name in ("15ad_quick", "15_ego_quick", "13_quick_subproblems", "15_quick", "13_quick", "table1_quick"):
        write_figure(tmp_path / f"figure{name}")
    text = report.page("quick", tmp_path / "logs", tmp_path)
    curves = "Accuracy and test loss over training time (in the paper: "
    assert re.findall(r"<h2 id=[^>]*>([^<]*)</h2>", text) == [
        "Fig 13: The solver: subproblems; training time and overhead over T_q",
        "Fig 13, a, subproblems: The solver: subproblems; training time and overhead over T_q",
        f"Fig 15: {curves}three data sets, TX2)",
        f"Fig 15, elastic runs alone: {curves}three data sets, TX2)",
        f"Fig 15ad: {curves}CUB-200, TX2)",
        "Table 1: Overhead of profiling, over the time of one epoch",
    ]
    assert base64.b64encode(b"a picture").decode() in text


@pytest.mark.parametrize(
    ("ending", "content"),
    [("png", None), ("png", b""), ("csv", b""), ("csv", b"\xff\xfe\x00"), ("csv", b"a" * 200_000)],
)
def test_a_figure_without_its_picture_or_its_numbers_is_named(ending, content, tmp_path):
    write_figure(tmp_path / "figure15_quick")
    path = tmp_path / f"figure15_quick.{ending}"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    message = rf"/figure15_quick\.{ending}: is missing, empty or damaged; remove figure15_quick\.csv and draw"
    with pytest.raises(UserError, match=message):
        report.page("quick", tmp_path / "logs", tmp_path)
