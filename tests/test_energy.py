"""Energy from simulated sensors, and files as the kernel writes them."""

import threading

import pytest
from small_runs import curve, train_and_read

import train
from elastic_trainer import energy
from elastic_trainer.energy import EnergyMeter, Sensor


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
