"""report.py: the page of all figures, from made-up runs."""

import re

import plot_bars
import plotting
import pytest
import report
from made_up_runs import made_up_run

from elastic_trainer.machine import environment
from utils import UserError


def test_page_contains_the_figures_and_a_verdict_on_each_claim(tmp_path):
    logs = tmp_path / "logs"
    made_up_run(logs / "full", scale=4.0)
    made_up_run(logs / "elastic", "elastic_training", 0.5, scale=1.0)
    plot_bars.draw(plotting.group_runs([*logs.iterdir()]), ("accuracy",), tmp_path / "figure20_quick")
    text = report.page("quick", logs, tmp_path)
    assert text.count("<img ") == 1 and "data:image/png;base64,iVBOR" in text and "http" not in text
    verdicts = dict(re.findall(r"<tr><td>([^<]*)</td><td class=\"\w+\">([^<]*)</td>", text))
    seen = ["confirmed", "confirmed", "not tested", "not confirmed", "not confirmed", "not tested", "not tested"]
    assert list(verdicts.values()) == seen
    assert verdicts["up to 3.5 times faster than full training"] == "confirmed" and "4.00× faster" in text
    assert "at most 60.0 points lost" in text and environment()["processor"] in text
    assert "Not made: 2,7,13" in text and "<summary>all 2 runs</summary>" in text
    with pytest.raises(UserError, match="holds no figure of scale full"):
        report.page("full", logs, tmp_path)
