"""Energy from simulated sensors: files as the kernel writes them, and a made-up NVML."""

import sys
import threading
import types
from functools import partial
from unittest.mock import patch

import pytest
from small_runs import curve, train_and_read

import train
from elastic_trainer.energy import meter as energy
from elastic_trainer.energy.meter import EnergyMeter, Sensor


def sensor_files(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def meter_of(root):
    """The meter of the sensors under `root`, and its clock."""
    clock = Clock()
    with patch.object(energy, "EnergyMeter", partial(EnergyMeter, clock=clock)):
        meter = energy.find_energy_meter(root)
    assert meter.failure is None
    return meter, clock


def rapl_zone(root, zone, name, energy_uj, range_uj=262_143_328_850):
    folder = root / "sys" / "class" / "powercap" / f"intel-rapl:{zone}"
    sensor_files(folder, name=name, energy_uj=energy_uj, max_energy_range_uj=range_uj)
    return folder / "energy_uj"


def old_jetson(root):
    """The files of a TX2 with JetPack 4: two INA3221 sensors, power in mW. Returns the file of VDD_IN."""
    drivers = root / "sys" / "bus" / "i2c" / "drivers" / "ina3221x"
    rails = (("0-0040", ("VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_4V0_WIFI")), ("0-0041", ("VDD_IN", "VDD_SYS_CPU", "NC")))
    for device, (address, names) in enumerate(rails):
        for k, name in enumerate(names):
            folder = drivers / address / f"iio:device{device}"
            sensor_files(folder, **{f"rail_name_{k}": name, f"in_power{k}_input": 1000 * (3 * device + k + 1)})
    return drivers / "0-0041" / "iio:device1" / "in_power0_input"


def test_jetson_is_measured_at_the_rail_of_the_entire_board(tmp_path):
    power = old_jetson(tmp_path)
    meter, clock = meter_of(tmp_path)
    assert meter.name == "INA3221 VDD_IN"
    clock.now += 2
    assert meter.joules() == pytest.approx(2 * 4)
    power.write_text("6000")
    clock.now += 1
    assert meter.joules() == pytest.approx(8 + (4 + 6) / 2)


def test_jetson_without_a_board_rail_is_the_sum_of_its_named_rails(tmp_path):
    folder = tmp_path / "sys" / "bus" / "i2c" / "drivers" / "ina3221" / "1-0040" / "hwmon" / "hwmon3"
    for k, name in ((1, "VDD_GPU_SOC"), (2, "VDD_CPU_CV"), (3, "NC")):
        sensor_files(folder, **{f"in{k}_label": name, f"in{k}_input": 5000 * k, f"curr{k}_input": 300})
    sensor_files(folder, in7_label="sum of shunt voltages", in7_input=9)
    meter, clock = meter_of(tmp_path)
    assert meter.name == "INA3221 VDD_GPU_SOC + INA3221 VDD_CPU_CV"
    clock.now += 10
    assert meter.joules() == pytest.approx(10 * (5 * 0.3 + 10 * 0.3))


def test_rapl_counters_of_packages_and_memory_are_added_and_may_wrap_around(tmp_path):
    package = rapl_zone(tmp_path, "0", "package-0", 9_000_000, 10_000_000)
    rapl_zone(tmp_path, "0:0", "core", 5_000_000)  # part of the package
    dram = rapl_zone(tmp_path, "0:1", "dram", 1_000_000)
    rapl_zone(tmp_path, "1", "package-1", 0)
    meter, _ = meter_of(tmp_path)
    assert meter.name == "RAPL package-0 + RAPL dram + RAPL package-1"
    dram.write_text("1500000")
    assert meter.joules() == pytest.approx(0.5)
    package.write_text("2000000")  # 1 J up to the end of its range, then 2 J
    assert meter.joules() == pytest.approx(3.5)
    package.write_text("3000000")
    assert meter.joules() == pytest.approx(4.5)


def test_rapl_counter_of_the_platform_replaces_all_others(tmp_path):
    rapl_zone(tmp_path, "0", "package-0", 0)
    platform = rapl_zone(tmp_path, "1", "psys", 0)
    meter, _ = meter_of(tmp_path)
    platform.write_text("7000000")
    assert (meter.name, meter.joules()) == ("RAPL psys", pytest.approx(7))


def test_gpu_energy_is_added_to_that_of_the_processor(tmp_path, monkeypatch):
    class NVMLError(Exception):
        pass

    total = {0: 5000, 1: None}

    def energy(device):
        if total[device] is None:
            raise NVMLError("Not Supported")  # GPUs before Volta
        return total[device]

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    package = rapl_zone(tmp_path, "0", "package-0", 0)
    meter, _ = meter_of(tmp_path)
    total[0] = 8000
    package.write_text("1000000")
    assert (meter.name, meter.joules()) == ("RAPL package-0 + NVML GPU 0", pytest.approx(3 + 1))


def test_missing_and_unreadable_sensors_give_different_reasons(tmp_path, monkeypatch):
    assert "no supported energy sensor" in str(energy.find_energy_meter(tmp_path).failure)
    with monkeypatch.context() as patched:
        patched.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU"])  # RAPL does not measure it
        assert "no energy sensor of the GPU" in str(energy.find_energy_meter(tmp_path).failure)
    counter = rapl_zone(tmp_path, "0", "package-0", 0)
    real = type(counter).read_text

    def refusing(path, **how):
        if path == counter:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **how)

    monkeypatch.setattr(type(counter), "read_text", refusing)
    assert f"sudo chmod a+r {counter}" in str(energy.find_energy_meter(tmp_path).failure)


@pytest.mark.parametrize("failure", ["missing", "text"])
def test_sensor_that_fails_during_training_gives_no_result(tmp_path, failure):
    counter = rapl_zone(tmp_path, "0", "package-0", 0)
    meter, _ = meter_of(tmp_path)
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
    monkeypatch.setattr(train, "METERS", [lambda: EnergyMeter(sensors)])
    summary, rows = train_and_read(tmp_path, name="full_training")
    joules = [float(row["energy_joules"]) for row in rows]
    assert joules == sorted(joules) and joules[0] > 0
    assert (summary["energy_joules"], summary["energy_meter"]) == (joules[-1], "simulated")
    assert summary["energy_missing"] is None
    assert curve(tmp_path, "meters/energy_joules") == [
        (int(row["step"]), pytest.approx(value)) for row, value in zip(rows, joules, strict=True)
    ]
