"""Energy from simulated sensors, files as the kernel writes them, and from the record of an external power meter."""

import threading

import numpy as np
import pytest
from made_up_runs import made_up_run
from small_runs import curve, train_and_read

import train
from elastic_trainer import energy
from elastic_trainer.energy import EnergyMeter, Sensor, integrate_power
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.runs.summary import add_power, update_summary
from elastic_trainer.system.errors import UserError


def sensor_files(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def meter_of(root, monkeypatch):
    """The meter of the sensors under `root`, and a list with its time."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    meter = energy.find_energy_meter(root)
    assert meter.failure is None
    return meter, now


def rapl_zone(root, zone, name, energy_uj, range_uj=262_143_328_850):
    folder = root / "sys" / "class" / "powercap" / f"intel-rapl:{zone}"
    sensor_files(folder, name=name, energy_uj=energy_uj, max_energy_range_uj=range_uj)
    return folder / "energy_uj"


def jetson(root, *names):
    """The files of an INA3221; returns that of the current of its last rail."""
    folder = root / "sys" / "bus" / "i2c" / "drivers" / "ina3221" / "1-0040" / "hwmon" / "hwmon3"
    for k, name in enumerate(names, 1):
        sensor_files(folder, **{f"in{k}_label": name, f"in{k}_input": 5000 * k, f"curr{k}_input": 300})
    sensor_files(folder, in7_label="sum of shunt voltages", in7_input=9)
    return folder / f"curr{len(names)}_input"


def test_jetson_is_measured_at_the_rail_of_the_entire_board(tmp_path, monkeypatch):
    current = jetson(tmp_path, "VDD_CPU_GPU_CV", "VDD_IN")
    meter, now = meter_of(tmp_path, monkeypatch)
    assert meter.name == "INA3221 VDD_IN"
    now[0] += 2
    assert meter.joules() == pytest.approx(2 * 10 * 0.3)
    current.write_text("500")
    now[0] += 1
    assert meter.joules() == pytest.approx(6 + 10 * (0.3 + 0.5) / 2)


def test_rails_that_may_be_parts_of_the_whole_are_named_and_not_added_up(tmp_path):
    jetson(tmp_path, "VDD_GPU", "VDD_CPU_SOC_MSS", "NC")  # of a Jetson Thor, whose INA238 measures the whole
    failure = str(energy.find_energy_meter(tmp_path).failure)
    assert failure.startswith("power: unknown rails VDD_CPU_SOC_MSS, VDD_GPU, which may be parts")


def test_rapl_counters_of_packages_and_memory_are_added_and_may_wrap_around(tmp_path, monkeypatch):
    package = rapl_zone(tmp_path, "0", "package-0", 9_000_000, 10_000_000)
    rapl_zone(tmp_path, "0:0", "core", 5_000_000)  # part of the package
    dram = rapl_zone(tmp_path, "0:1", "dram", 1_000_000)
    rapl_zone(tmp_path, "1", "package-1", 0)
    meter, _ = meter_of(tmp_path, monkeypatch)
    assert meter.name == "RAPL package-0 + RAPL dram + RAPL package-1"
    dram.write_text("1500000")
    assert meter.joules() == pytest.approx(0.5)
    package.write_text("2000000")  # 1 J up to the end of its range, then 2 J
    assert meter.joules() == pytest.approx(3.5)
    package.write_text("3000000")
    assert meter.joules() == pytest.approx(4.5)


def test_rapl_counter_of_the_platform_replaces_all_others(tmp_path, monkeypatch):
    rapl_zone(tmp_path, "0", "package-0", 0)
    platform = rapl_zone(tmp_path, "1", "psys", 0)
    meter, _ = meter_of(tmp_path, monkeypatch)
    platform.write_text("7000000")
    assert (meter.name, meter.joules()) == ("RAPL psys", pytest.approx(7))


def test_missing_and_unreadable_sensors_give_different_reasons(tmp_path, monkeypatch):
    assert "no supported energy sensor" in str(energy.find_energy_meter(tmp_path).failure)
    with monkeypatch.context() as patched:
        patched.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU"])  # RAPL does not measure it
        assert "RAPL does not measure the GPU" in str(energy.find_energy_meter(tmp_path).failure)
    counter = rapl_zone(tmp_path, "0", "package-0", 0)
    real = type(counter).read_text

    def refusing(path, **how):
        if path == counter:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **how)

    monkeypatch.setattr(type(counter), "read_text", refusing)
    assert f"sudo chmod a+r {counter}" in str(energy.find_energy_meter(tmp_path).failure)


@pytest.mark.parametrize("failure", ["missing", "text"])
def test_sensor_that_fails_during_training_gives_no_result(tmp_path, failure, monkeypatch):
    counter = rapl_zone(tmp_path, "0", "package-0", 0)
    meter, _ = meter_of(tmp_path, monkeypatch)
    counter.unlink() if failure == "missing" else counter.write_text("error")
    assert meter.joules() is None and "RAPL package-0: could not be read" in meter.failure
    counter.write_text("0")
    assert meter.joules() is None, "the energy spent in between is unknown"


def test_sampling_thread_sees_each_wrap_around_of_a_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "SAMPLING_SECONDS", 0.001)
    readings = iter([4.0, 1.0, 4.0, 1.0])  # wraps around at 5: 2 + 3 + 2 J
    done = []

    def read():
        value = next(readings, 1.0)
        done.append(value)
        return value

    with EnergyMeter([Sensor("counter", read, 5.0)]) as meter:
        while len(done) < 5:
            pass
        assert meter.joules() == pytest.approx(7)
    count = len(done)
    assert "energy meter" not in {thread.name for thread in threading.enumerate()} and len(done) == count


def test_run_records_its_energy_after_each_epoch(tmp_path, monkeypatch):
    total = [0.0]

    def read():
        total[0] += 0.5
        return total[0]

    sensors = [Sensor("simulated", read, float("inf"))]
    monkeypatch.setattr(train, "find_energy_meter", lambda: EnergyMeter(sensors))
    summary, rows = train_and_read(tmp_path, name="full_training")
    joules = [float(row["energy_joules"]) for row in rows]
    assert joules == sorted(joules) and joules[0] > 0
    assert (summary["energy_joules"], summary["energy_meter"]) == (joules[-1], "simulated")
    assert summary["energy_missing"] is None
    assert curve(tmp_path, "meters/energy_joules") == [
        (int(row["step"]), pytest.approx(value)) for row, value in zip(rows, joules, strict=True)
    ]


# --- an external power meter ------------------------------------------------------------------------------------------


def test_run_without_a_meter_records_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "find_energy_meter", lambda: EnergyMeter([], "no sensor here"))
    summary, rows = train_and_read(tmp_path, name="full_training")
    assert summary["energy_joules"] is None and summary["energy_missing"] == "no sensor here"
    assert {row["energy_joules"] for row in rows} == {""} and curve(tmp_path, "meters/energy_joules") is None


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
