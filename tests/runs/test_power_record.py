"""Energy from the record of an external power meter."""

import csv
import json

import numpy as np
import pytest
from small_runs import curve, train_and_read

import train
from elastic_trainer.runs.power_record import add_external_energy, integrate_power, read_power
from utils import UserError


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


def test_power_record_updates_summary_table_and_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "find_energy_meter", lambda: "no sensor here")
    summary, _ = train_and_read(tmp_path / "run")
    start, end = summary["training_spans"][0][0], summary["training_spans"][-1][1]
    record = write_power(tmp_path / "power.csv", [(start - 1, 5.0), (start + (end - start) / 2, 5.0), (end + 1, 5.0)])
    joules = add_external_energy(tmp_path / "run", record)
    spent = sum(end - start for start, end in summary["training_spans"])
    assert joules == pytest.approx(5 * spent, rel=1e-6)
    assert joules == pytest.approx(5 * summary["train_seconds"], rel=0.05)
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert after == {**summary, "energy_joules": joules, "energy_meter": str(record), "energy_missing": None}
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert float(rows[-1]["energy_joules"]) == joules
    assert [step for step, _ in curve(tmp_path / "run", "meters/energy_joules")] == [int(row["step"]) for row in rows]
    short = write_power(tmp_path / "short.csv", [(start + 1e-3, 5.0), (end, 5.0)])
    assert add_external_energy(tmp_path / "run", short) == joules, "the energy measured before is kept"


def test_power_record_times_are_seconds_or_dates(tmp_path):
    record = write_power(tmp_path / "power.csv", [(1_000_000_000, 4.0), (1_000_000_001.5, 5.0)])
    times, watts = read_power(record)
    assert times.tolist() == [1e9, 1e9 + 1.5] and watts.tolist() == [4, 5]
    dated = [("2001-09-09T01:46:41.5+00:00", 5.0), ("2001-09-09T01:46:40+00:00", 4.0)]
    assert read_power(write_power(tmp_path / "dated.csv", dated))[0].tolist() == times.tolist()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("time,watts\n1,2\nyesterday,3\n", "line 3 is not a time"),
        ("time,watts\n1\n", "line 2 is not a time"),
        ("time,watts\n1,2\n", "holds no two readings"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_power_record_is_refused(tmp_path, text, why):
    path = tmp_path / "power.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf"--power_csv .*power.csv: {why}"):
        read_power(path)
