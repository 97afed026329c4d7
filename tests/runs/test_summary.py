"""The results of a run: a ratio of times is left out where compiling decides it."""

import numpy as np
import pytest

from elastic_trainer.runs.clocks import Clocks
from elastic_trainer.runs.history import History, SelectionInterval
from elastic_trainer.runs.summary import run_results, summary_line
from elastic_trainer.selection.select import Selection
from elastic_trainer.task import ImageClassification


def results(steps, training_seconds, budget_step_ms=50.0, rho=0.5):
    """Of a run of `steps` steps of 60 ms each, the first not measured; full training's take 100 ms."""
    selection = Selection(np.ones(2, bool), budget_step_ms=budget_step_ms, rho=rho)
    row = {"test_accuracy": 0.9, "peak_memory_mb": 100.0, "gpu_peak_memory_mb": None}
    clocks = Clocks(training=training_seconds, selection=training_seconds - 0.06 * steps)
    history = History(steps, [SelectionInterval(selection, 0, 0.0, [60.0] * (steps - 1))], [row], clocks=clocks)
    return {"rho": rho, **run_results(history, steps, ImageClassification.score)}


def test_time_over_full_includes_selecting_where_steps_take_most_of_the_time():
    summary = results(100, 8.0)
    assert summary["time_over_full"] == pytest.approx(8.0 / 10) and summary["time_over_full_missing"] is None
    assert "; 0.80× estimated full-training time; steps 0.60×" in summary_line(summary, None)


@pytest.mark.parametrize(("steps", "seconds"), [(5, 60.0), (5, 0.3), (100, 13.0)])
def test_time_over_full_of_a_run_that_mostly_compiles_is_left_out_with_the_reason(steps, seconds):
    summary = results(steps, seconds)
    assert summary["time_over_full"] is None and summary["rho_measured"] == pytest.approx(0.6)
    why = f"the run is too short: {steps - 1} steps were measured without compiling and took "
    assert summary["time_over_full_missing"].startswith(why)
    line = summary_line(summary, None)
    assert "; steps 0.60× " in line and "(asked: 0.5)" in line and why in line


def test_run_without_a_budget_has_no_time_over_full_and_does_not_mention_it():
    summary = results(100, 8.0, None, None)
    assert (summary["time_over_full"], summary["rho_measured"]) == (None, None)
    assert "time budget" in summary["time_over_full_missing"] and "full-training" not in summary_line(summary, None)


def test_line_on_a_run_of_the_first_version_lacks_what_its_summary_lacks():
    older = {key: value for key, value in results(100, 8.0).items() if "full" not in key and "planned" not in key}
    del older["elapsed_seconds"]
    assert "8 s of the 10 s allowed" in summary_line(older, 10.0)
