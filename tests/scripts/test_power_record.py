"""The record of an external power meter, added to a finished run."""

import runpy

import numpy as np
import pytest
from command_line import ROOT
from made_up_runs import made_up_run

from elastic_trainer.runs.reader import read_summary
from elastic_trainer.runs.summary import update_summary
from elastic_trainer.system.errors import UserError

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "energy.py"))
add_power, integrate_power = SCRIPT["add_power"], SCRIPT["integrate_power"]


def write_power(path, readings):
    path.write_text("time,watts\n" + "".join(f"{when},{watts}\n" for when, watts in readings))
    return path


SPANS = [(5.0, 10.0), (15.0, 25.0)]


def test_power_is_integrated_only_over_training():
    times, watts = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.0, 10.0, 10.0, 0.0])
    # 5 to 10 s at 5 to 10 W; 15 to 20 s at 10 W; 20 to 25 s at 10 to 5 W
    assert integrate_power(times, watts, SPANS) == pytest.approx(37.5 + 50 + 37.5)
    naive = np.linspace(0, 30, 300_001)
    power = np.interp(naive, times, watts) * ((naive > 5) & (naive < 10) | (naive > 15) & (naive < 25))
    assert integrate_power(times, watts, SPANS) == pytest.approx(power.sum() * 1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([], "does not cover"),
        ([6, 10, 40], "does not cover"),
        ([0, 10, 24], "does not cover"),
        ([0, 12, 100, 200], "no reading for more than 60 s"),
    ],
)
def test_power_record_with_gaps_is_refused(times, why):
    with pytest.raises(ValueError, match=why):
        integrate_power(np.array(times, float), np.ones(len(times)), SPANS)


def test_a_power_record_updates_the_summary_and_one_that_does_not_cover_the_run_changes_nothing(tmp_path):
    folder = made_up_run(tmp_path / "run")
    update_summary(folder, training_spans=SPANS, energy_joules=None, energy_missing="no sensor here")
    before = read_summary(folder)
    short = write_power(tmp_path / "short.csv", [(6, 5.0), (40, 5.0)])
    for watts in (7.0, 5.0):
        with pytest.raises(UserError, match=r".*short.csv: does not cover all of training; give"):
            add_power(folder, short)
        record = write_power(tmp_path / "power.csv", [(4, watts), (30, watts)])
        assert add_power(folder, record) == f"energy of training: {15 * watts:g} J"
        known = {"energy_joules": 15 * watts, "energy_meter": str(record), "energy_missing": None}
        assert read_summary(folder) == {**before, **known}


def test_power_record_times_are_seconds_or_dates_in_any_order(tmp_path):
    folder, start = made_up_run(tmp_path / "run"), 1_000_000_000.0
    update_summary(folder, training_spans=[[start, start + 1.5]])
    dated = [("2001-09-09T01:46:41.500+00:00", 5.0), ("2001-09-09T01:46:40Z", 4.0)]
    for readings in ([(start, 4.0), (start + 1.5, 5.0)], dated):
        assert add_power(folder, write_power(tmp_path / "power.csv", readings)) == "energy of training: 6.75 J"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("time,watts\n1,2\nyesterday,3\n", "line 3 must contain a time"),
        ("time,watts\n1\n", "line 2 must contain a time"),
        ("time,watts\n1,2\n2,nan\n", r"line 3 must contain a time .* and watts"),
        ("time,watts\n1,2\n2,-1\n", "line 3 must contain a time"),
        ("time,watts\nnan,2\n2,1\n", "line 2 must contain a time"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_power_record_is_refused(tmp_path, text, why):
    path = tmp_path / "power.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf".*power.csv: {why}"):
        add_power(made_up_run(tmp_path / "run"), path)


def test_a_record_of_a_run_during_which_the_clock_was_set_is_refused(tmp_path):
    folder = made_up_run(tmp_path / "run")
    update_summary(folder, training_spans=SPANS, clock_shift=-1.5)
    with pytest.raises(UserError, match=r"power.csv: .*clock was set by -1.5 s during the run"):
        add_power(folder, write_power(tmp_path / "power.csv", [(4, 5.0), (30, 5.0)]))
