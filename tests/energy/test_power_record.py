"""Energy from the record of an external power meter."""

import shutil
from unittest.mock import patch

import numpy as np
import pytest
from made_up_runs import made_up_run
from small_runs import curve, rows_of, train_and_read

import train
from elastic_trainer.energy.meter import EnergyMeter
from elastic_trainer.energy.power_record import (
    add_power,
    integrate_power,
    read_power,
)
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.system.errors import UserError


def write_power(path, readings):
    path.write_text("time,watts\n" + "".join(f"{when},{watts}\n" for when, watts in readings))
    return path


def test_power_is_integrated_only_over_training():
    times, watts = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.0, 10.0, 10.0, 0.0])
    spans = [(5.0, 10.0), (15.0, 25.0)]
    # 5 to 10 s at 5 to 10 W; 15 to 20 s at 10 W; 20 to 25 s at 10 to 5 W
    expected = [37.5, 37.5 + 50 + 37.5]
    assert integrate_power(times, watts, spans, [5.0, 15.0]) == pytest.approx(expected)
    assert integrate_power(times, watts, spans, [2.0, 7.0, 15.0]) == pytest.approx([12.0, 57.5, expected[1]])
    naive = np.linspace(0, 30, 300_001)
    power = np.interp(naive, times, watts) * ((naive > 5) & (naive < 10) | (naive > 15) & (naive < 25))
    assert expected[1] == pytest.approx(power.sum() * 1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([6, 10, 40], "does not cover"),
        ([0, 10, 24], "does not cover"),
        ([0, 12, 100, 200], "no reading for more than 60 s"),
    ],
)
def test_power_record_with_gaps_is_refused(times, why):
    with pytest.raises(ValueError, match=why):
        integrate_power(np.array(times, float), np.ones(len(times)), [(5.0, 10.0), (15.0, 25.0)], [15.0])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run without an energy meter."""
    folder = tmp_path_factory.mktemp("trained")
    with patch.object(train, "METERS", [lambda: EnergyMeter([], "no sensor here")]):
        train_and_read(folder, name="full_training")
    return folder


@pytest.fixture
def run_without_sensor(trained, tmp_path):
    """A copy of that folder, and the start and end of its training in seconds since 1970."""
    folder = shutil.copytree(trained, tmp_path / "run")
    spans = read_summary(folder)["training_spans"]
    return folder, spans[0][0], spans[-1][1]


def test_run_without_a_meter_records_the_reason(trained):
    summary = read_summary(trained)
    assert summary["energy_joules"] is None and summary["energy_missing"] == "no sensor here"
    assert {row["energy_joules"] for row in rows_of(trained / "metrics.csv")} == {""}
    assert curve(trained, "meters/energy_joules") is None


def test_power_record_updates_summary_table_and_curve_and_a_second_one_replaces_it(run_without_sensor):
    folder, start, end = run_without_sensor
    summary = read_summary(folder)
    spent = sum(end - start for start, end in summary["training_spans"])
    for watts in (7.0, 5.0):
        readings = [(start - 1, watts), (start + (end - start) / 2, watts), (end + 1, watts)]
        record = write_power(folder / "power.csv", readings)
        assert add_power(folder, record).startswith("energy of training: ")
        joules = read_summary(folder)["energy_joules"]
        assert joules == pytest.approx(watts * spent, rel=1e-6)
    assert joules == pytest.approx(5 * summary["train_seconds"], rel=0.05)
    known = {"energy_joules": joules, "energy_meter": str(record), "energy_missing": None}
    assert read_summary(folder) == {**summary, **known}
    rows = rows_of(folder / "metrics.csv")
    assert float(rows[-1]["energy_joules"]) == joules
    points = curve(folder, "meters/energy_joules")
    assert [step for step, _ in points] == [int(row["step"]) for row in rows]
    assert points[-1][1] == pytest.approx(joules) and len([*folder.glob("events.out.*.energy")]) == 1


@pytest.mark.parametrize(
    ("table", "why"),
    [(None, "cannot be read"), ("epoch,step\n", "is damaged"), ("epoch,step\n1,9\n", "is damaged")],
)
def test_damaged_table_of_the_run_is_named_and_the_summary_stays(table, why, tmp_path):
    folder = made_up_run(tmp_path / "run")
    before = (folder / "summary.json").read_bytes()
    (folder / "metrics.csv").unlink()
    if table is not None:
        (folder / "metrics.csv").write_text(table)
    with pytest.raises(UserError, match=rf"metrics\.csv: {why}"):
        add_power(folder, write_power(tmp_path / "power.csv", [(0, 5.0), (1, 5.0)]))
    assert (folder / "summary.json").read_bytes() == before


def test_record_that_does_not_cover_the_run_is_refused_and_known_energy_stays(run_without_sensor):
    folder, start, end = run_without_sensor
    short = write_power(folder / "short.csv", [(start + 1e-3, 5.0), (end, 5.0)])
    with pytest.raises(UserError, match=r".*short.csv: does not cover all of training; give"):
        add_power(folder, short)
    summary = read_summary(folder)
    assert summary["energy_joules"] is None and "short.csv: does not cover" in summary["energy_missing"]

    add_power(folder, write_power(folder / "power.csv", [(start - 1, 5.0), (end + 1, 5.0)]))
    joules = read_summary(folder)["energy_joules"]
    with pytest.raises(UserError, match="does not cover all of training"):
        add_power(folder, short)
    summary = read_summary(folder)
    assert (summary["energy_joules"], summary["energy_missing"]) == (joules, None)
    assert summary["energy_meter"].endswith("/power.csv")


def test_power_record_times_are_seconds_or_dates(tmp_path):
    record = write_power(tmp_path / "power.csv", [(1_000_000_000, 4.0), (1_000_000_001.5, 5.0)])
    times, watts = read_power(record)
    assert times.tolist() == [1e9, 1e9 + 1.5] and watts.tolist() == [4, 5]
    dated = [("2001-09-09T01:46:41.5+00:00", 5.0), ("2001-09-09T01:46:40Z", 4.0)]
    assert read_power(write_power(tmp_path / "dated.csv", dated))[0].tolist() == times.tolist()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("time,watts\n1,2\nyesterday,3\n", "line 3 must contain a time"),
        ("time,watts\n1\n", "line 2 must contain a time"),
        ("time,watts\n1,2\n", "needs at least two readings"),
        ("time,watts\n1,2\n2,nan\n", r"line 3 must contain a time .* and watts from 0 to 1,000,000"),
        ("time,watts\n1,2\n2,inf\n", "line 3 must contain a time"),
        ("time,watts\n1,2\n2,-1\n", "line 3 must contain a time"),
        ("time,watts\n1,2\n2,1e300\n", "line 3 must contain a time"),
        ("time,watts\nnan,2\n2,1\n", "line 2 must contain a time"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_power_record_is_refused(tmp_path, text, why):
    path = tmp_path / "power.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf".*power.csv: {why}"):
        read_power(path)
