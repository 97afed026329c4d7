"""Meters: energy from made-up sensors and from the record of an external meter, memory, FLOPs."""

import csv
import json
import sys
import types

import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table

import train
from elastic_trainer.machine import available_memory_mb, gpu_peak_memory_mb, peak_memory_mb
from elastic_trainer.runs import energy
from elastic_trainer.runs.clocks import Clocks
from elastic_trainer.runs.power_record import add_external_energy, integrate_power, read_power
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import make_budget
from elastic_trainer.settings import Settings
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.training.step import TrainStep
from utils import UserError


def sensor_files(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


def meter_of(root):
    meter = energy.find_energy_meter(root)
    assert isinstance(meter, energy.EnergyMeter), meter
    meter._clock = clock = Clock()
    meter._last = (clock.now, meter._last[1])
    return meter, clock


def rapl_zone(root, zone, name, energy_uj, range_uj=262_143_328_850):
    folder = root / "sys" / "class" / "powercap" / f"intel-rapl:{zone}"
    sensor_files(folder, name=name, energy_uj=energy_uj, max_energy_range_uj=range_uj)
    return folder / "energy_uj"


# --- energy: sensors --------------------------------------------------------------------------------------------------


def old_jetson(root):
    """A TX2 as of JetPack 4: two INA3221, power in mW."""
    drivers = root / "sys" / "bus" / "i2c" / "drivers" / "ina3221x"
    rails = (("0-0040", ("VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_4V0_WIFI")), ("0-0041", ("VDD_IN", "VDD_SYS_CPU", "NC")))
    for device, (address, names) in enumerate(rails):
        for k, name in enumerate(names):
            folder = drivers / address / f"iio:device{device}"
            sensor_files(folder, **{f"rail_name_{k}": name, f"in_power{k}_input": 1000 * (3 * device + k + 1)})
    return drivers / "0-0041" / "iio:device1" / "in_power0_input"


def test_a_jetson_is_read_at_the_rail_of_the_whole_board(tmp_path):
    power = old_jetson(tmp_path)
    meter, clock = meter_of(tmp_path)
    assert meter.name == "INA3221 VDD_IN"
    clock.now += 2
    assert meter.joules() == pytest.approx(2 * 4)
    power.write_text("6000")
    clock.now += 1
    assert meter.joules() == pytest.approx(8 + (4 + 6) / 2)


def test_a_jetson_without_such_a_rail_is_the_sum_of_all_that_have_a_name(tmp_path):
    folder = tmp_path / "sys" / "bus" / "i2c" / "drivers" / "ina3221" / "1-0040" / "hwmon" / "hwmon3"
    for k, name in ((1, "VDD_GPU_SOC"), (2, "VDD_CPU_CV"), (3, "NC")):
        sensor_files(folder, **{f"in{k}_label": name, f"in{k}_input": 5000 * k, f"curr{k}_input": 300})
    sensor_files(folder, in7_label="sum of shunt voltages", in7_input=9)
    meter, clock = meter_of(tmp_path)
    assert meter.name == "INA3221 VDD_GPU_SOC + INA3221 VDD_CPU_CV"
    clock.now += 10
    assert meter.joules() == pytest.approx(10 * (5 * 0.3 + 10 * 0.3))


def test_processors_and_their_memory_are_added_up_and_counters_go_round(tmp_path):
    package = rapl_zone(tmp_path, "0", "package-0", 9_000_000, 10_000_000)
    rapl_zone(tmp_path, "0:0", "core", 5_000_000)  # part of the package
    dram = rapl_zone(tmp_path, "0:1", "dram", 1_000_000)
    rapl_zone(tmp_path, "1", "package-1", 0)
    meter, _ = meter_of(tmp_path)
    assert meter.name == "RAPL package-0 + RAPL dram + RAPL package-1"
    dram.write_text("1500000")
    assert meter.joules() == pytest.approx(0.5)
    package.write_text("2000000")  # 1 J up to its range, 2 J after it
    assert meter.joules() == pytest.approx(3.5)
    package.write_text("3000000")
    assert meter.joules() == pytest.approx(4.5)


def test_the_counter_of_the_whole_platform_stands_for_all(tmp_path):
    rapl_zone(tmp_path, "0", "package-0", 0)
    platform = rapl_zone(tmp_path, "1", "psys", 0)
    meter, _ = meter_of(tmp_path)
    platform.write_text("7000000")
    assert (meter.name, meter.joules()) == ("RAPL psys", pytest.approx(7))


def test_a_gpu_counts_beside_the_processor(tmp_path, monkeypatch):
    class NVMLError(Exception):
        pass

    total = {0: 5000, 1: None}

    def energy(device):
        if total[device] is None:
            raise NVMLError("Not Supported")  # before Volta
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


def test_no_sensor_and_one_that_is_closed_are_told_apart(tmp_path, monkeypatch):
    assert "no energy sensor" in str(energy.find_energy_meter(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(energy, "_has_gpu", lambda: True)  # of which RAPL would tell nothing
        assert "no energy sensor of the GPU" in str(energy.find_energy_meter(tmp_path))
    counter = rapl_zone(tmp_path, "0", "package-0", 0)
    real = type(counter).read_text

    def closed(path, **how):
        if path == counter:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **how)

    monkeypatch.setattr(type(counter), "read_text", closed)
    assert f"sudo chmod a+r {counter}" in str(energy.find_energy_meter(tmp_path))


@pytest.mark.parametrize("then", ["gone", "text"])
def test_a_sensor_that_fails_while_training_leaves_no_number(tmp_path, then):
    counter = rapl_zone(tmp_path, "0", "package-0", 0)
    meter, _ = meter_of(tmp_path)
    counter.unlink() if then == "gone" else counter.write_text("error")
    assert meter.joules() is None and "RAPL package-0: could not be read" in meter.failure
    counter.write_text("0")
    assert meter.joules() is None, "what passed in between is unknown"


def test_the_thread_sees_a_counter_go_round_that_nobody_asks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "SAMPLING_SECONDS", 0.001)
    readings = iter([4.0, 1.0, 4.0, 1.0])  # goes round at 5: 2 + 3 + 2 J
    done = []

    def read():
        value = next(readings, 1.0)
        done.append(value)
        return value

    with energy.EnergyMeter([energy.Sensor("counter", read, 5.0)]) as meter:
        while len(done) < 5:
            pass
        assert meter.joules() == pytest.approx(7)
    count = len(done)
    assert not meter._thread.is_alive() and len(done) == count


# --- energy: only while training --------------------------------------------------------------------------------------


def test_only_training_counts():
    clocks, total = Clocks(), [0.0]
    clocks.meter = lambda: total[0]
    for spent in (1, 2):
        with clocks.running("training"):
            total[0] += spent
            with clocks.running("selection"):
                total[0] += 10  # part of training
            with clocks.paused("training"):
                total[0] += 100
        with clocks.running("validation"), clocks.paused("training"):
            total[0] += 1000
    assert clocks.joules == 1 + 2 + 2 * 10
    assert len(clocks.spans) == 4 and all(begin <= end for begin, end in clocks.spans)
    again = Clocks(**json.loads(json.dumps(clocks.to_record())))
    assert again.joules == 23 and len(again.spans) == 4
    with again.running("training"):  # gone on with where there is no meter
        pass
    assert again.joules is None


def trained(folder, *, name="elastic_training"):
    model, data = make_small_model(), make_small_data()
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6)
    budget = make_budget(model, data, settings, make_table(model)) if name == "elastic_training" else None
    names = [str(k) for k in range(len(model.trainable_variables))]
    with RunLog(folder, {"train_type": name}, names) as run:
        summary = run.finish(train.train(name, model, data, settings, run, budget))
    with (folder / "metrics.csv").open(newline="") as file:
        return summary, [*csv.DictReader(file)]


def curve(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    if tag not in events.Tags()["tensors"]:
        return None
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]


def test_a_run_tells_its_energy_epoch_by_epoch(tmp_path, monkeypatch):
    total = [0.0]

    def read():
        total[0] += 0.5
        return total[0]

    sensors = [energy.Sensor("made up", read, float("inf"))]
    monkeypatch.setattr(train, "find_energy_meter", lambda: energy.EnergyMeter(sensors))
    summary, rows = trained(tmp_path)
    joules = [float(row["energy_joules"]) for row in rows]
    assert joules == sorted(joules) and joules[0] > 0
    assert (summary["energy_joules"], summary["energy_meter"]) == (joules[-1], "made up")
    assert summary["energy_missing"] is None
    assert curve(tmp_path, "meters/energy_joules") == [
        (int(row["step"]), pytest.approx(value)) for row, value in zip(rows, joules, strict=True)
    ]


def test_a_run_without_a_meter_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "find_energy_meter", lambda: "no sensor here")
    summary, rows = trained(tmp_path, name="full_training")
    assert summary["energy_joules"] is None and summary["energy_missing"] == "no sensor here"
    assert {row["energy_joules"] for row in rows} == {""}
    assert curve(tmp_path, "meters/energy_joules") is None


# --- energy: an external meter ----------------------------------------------------------------------------------------


def write_power(path, readings, form=str):
    path.write_text("time,watts\n" + "".join(f"{form(when)},{watts}\n" for when, watts in readings))
    return path


def test_an_external_meter_is_integrated_over_training_alone():
    times, watts = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.0, 10.0, 10.0, 0.0])
    spans = [(5.0, 10.0), (15.0, 25.0)]
    # 5 to 10 s at 5 to 10 W; 15 to 20 s at 10 W; 20 to 25 s at 10 to 5 W
    whole = [37.5, 37.5 + 50 + 37.5]
    assert integrate_power(times, watts, spans, [5.0, 15.0]) == pytest.approx(whole)
    assert integrate_power(times, watts, spans, [2.0, 7.0, 15.0]) == pytest.approx([12.0, 57.5, whole[1]])
    naive = np.linspace(0, 30, 300_001)
    power = np.interp(naive, times, watts) * ((naive > 5) & (naive < 10) | (naive > 15) & (naive < 25))
    assert whole[1] == pytest.approx(power.sum() * 1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([6, 10, 40], "does not cover"),
        ([0, 10, 24], "does not cover"),
        ([0, 12, 100, 200], "no reading for more than 60 s"),
    ],
)
def test_a_record_with_holes_is_no_measurement(times, why):
    with pytest.raises(ValueError, match=why):
        integrate_power(np.array(times, float), np.ones(len(times)), [(5.0, 10.0), (15.0, 25.0)], [15.0])


def test_an_external_record_enters_summary_table_and_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "find_energy_meter", lambda: "no sensor here")
    summary, _ = trained(tmp_path / "run")
    begin, end = summary["training_spans"][0][0], summary["training_spans"][-1][1]
    record = write_power(tmp_path / "power.csv", [(begin - 1, 5.0), (begin + (end - begin) / 2, 5.0), (end + 1, 5.0)])
    joules = add_external_energy(tmp_path / "run", record)
    spent = sum(end - begin for begin, end in summary["training_spans"])
    assert joules == pytest.approx(5 * spent, rel=1e-6)
    assert joules == pytest.approx(5 * summary["train_seconds"], rel=0.05)
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert after == {**summary, "energy_joules": joules, "energy_meter": str(record), "energy_missing": None}
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert float(rows[-1]["energy_joules"]) == joules
    assert [step for step, _ in curve(tmp_path / "run", "meters/energy_joules")] == [int(row["step"]) for row in rows]
    short = write_power(tmp_path / "short.csv", [(begin + 1e-3, 5.0), (end, 5.0)])
    assert add_external_energy(tmp_path / "run", short) == joules, "what was measured before stays"


def test_times_may_be_seconds_or_dates(tmp_path):
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
def test_a_record_that_is_none_is_refused(tmp_path, text, why):
    path = tmp_path / "power.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf"--power_csv .*power.csv: {why}"):
        read_power(path)


# --- FLOPs and memory of a run ----------------------------------------------------------------------------------------


def test_flops_are_those_of_the_steps_that_ran(tmp_path, monkeypatch):
    counted, real = [], train.count_flops

    def count(graph):
        counted.append(real(graph))
        return counted[-1]

    monkeypatch.setattr(train, "count_flops", count)
    full, rows = trained(tmp_path / "full", name="full_training")
    [step] = [sum(one.values()) for one in counted]
    assert step > 0 and full["train_flops"] == step * full["steps"]
    assert [float(row["train_flops"]) for row in rows] == [step * 6, step * 12, step * 18]
    counted.clear()
    elastic, rows = trained(tmp_path / "elastic")
    with (tmp_path / "elastic" / "selections.csv").open(newline="") as file:
        masks: dict[int, list[bool]] = {}
        for row in csv.DictReader(file):
            masks.setdefault(int(row["step"]), []).append(row["chosen"] == "1")
    assert len(masks) == 3, "over two re-selections"
    expected = 0.0
    for mask in masks.values():
        model = make_small_model()
        optimizer = train.make_optimizer("sgd", 0.05, 5e-4, 18)
        optimizer.build(model.trainable_variables)
        one_step = TrainStep(model, optimizer, 4, np.array(mask))
        expected += 6 * sum(count_flops(one_step.graph).values())
    assert elastic["train_flops"] == pytest.approx(expected)
    assert elastic["train_flops"] < full["train_flops"]
    assert curve(tmp_path / "elastic", "meters/train_flops")[-1] == (18, pytest.approx(expected, rel=1e-6))


def test_a_run_tells_its_peak_memory(tmp_path):
    summary, rows = trained(tmp_path, name="full_training")
    peaks = [float(row["peak_memory_mb"]) for row in rows]
    assert summary["peak_memory_mb"] == max(peaks)
    assert 50 < peaks[0] <= (peak_memory_mb() or 0)
    assert summary["gpu_peak_memory_mb"] is None
    assert curve(tmp_path, "meters/peak_memory_mb")[-1][1] == pytest.approx(peaks[-1])


def test_a_gpu_tells_what_its_allocator_held(monkeypatch):
    import tensorflow as tf

    gpus = [types.SimpleNamespace(name=f"/device:GPU:{k}") for k in range(2)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus if kind == "GPU" else [])
    held = {gpu.name: {"current": 1, "peak": 3_000_000 * (k + 1)} for k, gpu in enumerate(gpus)}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", held.__getitem__)
    assert gpu_peak_memory_mb() == 9.0


@pytest.fixture
def system(tmp_path):
    """A made-up proc and sys: 1,000 MB available, 100 MB of swap, no control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal:  4000000 kB\nMemFree:  5 kB\nMemAvailable:  1000000 kB\nSwapFree:  100000 kB\nHugePages_Total: 0\n"
    )
    return tmp_path


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_available_memory_is_what_the_system_calls_available_with_swap(system):
    assert available_memory_mb(system) == pytest.approx(1024 + 102.4)


def test_available_memory_heeds_each_control_group_around_the_process(system):
    unlimited = available_memory_mb(system)
    (system / "proc" / "self" / "cgroup").write_text("0::/box/run\n")
    base = system / "sys" / "fs" / "cgroup"
    group(base / "box" / "run", memory__max="max", memory__current=300_000_000)
    assert available_memory_mb(system) == unlimited
    group(base / "box", memory__max=500_000_000, memory__current=400_000_000)
    assert available_memory_mb(system) == pytest.approx(100 + 102.4)
    group(base / "box", memory__stat="anon 7\ninactive_file 40000000\nactive_file 10000000\nslab 9")
    assert available_memory_mb(system) == pytest.approx(150 + 102.4)
    group(base / "box" / "run", memory__max=10_000_000_000)
    assert available_memory_mb(system) == pytest.approx(150 + 102.4)
    group(base / "box", memory__max=100)
    assert available_memory_mb(system) == 0
    group(base / "box", memory__max=900_000_000_000)
    assert available_memory_mb(system) == unlimited
    group(base, memory__max=500_000_000, memory__current=450_000_000)  # a container sees its group as the top
    assert available_memory_mb(system) == pytest.approx(50 + 102.4)


def test_available_memory_heeds_control_groups_of_the_first_version(system):
    (system / "proc" / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/box/run\n0::/\n")
    group(
        system / "sys" / "fs" / "cgroup" / "memory" / "box",
        memory__limit_in_bytes=300_000_000,
        memory__usage_in_bytes=200_000_000,
        memory__stat="cache 1\ntotal_inactive_file 5000000\ntotal_active_file 1000000",
    )
    assert available_memory_mb(system) == pytest.approx(106 + 102.4)


def test_available_memory_is_unknown_where_the_system_does_not_tell(tmp_path):
    assert available_memory_mb(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 4000 kB\n")  # before Linux 3.14
    assert available_memory_mb(tmp_path) is None
