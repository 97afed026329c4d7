"""What a run costs besides time: energy, memory, FLOPs (the paper's Figs 17, 18, 22 and 23).

Energy comes from the machine's own sensors where it has some: the INA3221 rails of a Jetson, else the RAPL counters of
an Intel or AMD processor and the NVML counters of NVIDIA GPUs, added up. Only training time counts (`history.Clocks`
asks when it starts and stops). For other machines there is `add_external_energy`: the record of an external power
meter, integrated over the moments of training that summary.json keeps.

No machine with any of these sensors was at hand: all is tested on made-up files.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import utils
from utils import UserError

SAMPLING_SECONDS = 0.1  # 35 ms and more is what these sensors themselves average over
LONGEST_GAP_SECONDS = 60  # without a reading of an external meter; longer ones are no measurement
WHOLE_BOARD = ("VDD_IN", "POM_5V_IN")  # rails of a Jetson through which all of its power goes


# --- energy -----------------------------------------------------------------------------------------------------------


class Sensor(NamedTuple):
    """One thing that can be read: power, or energy since some moment.

    Attributes:
        name: for people.
        read: gives watts, or joules where it counts energy. Raises `OSError` where it cannot.
        range_joules: a counter of energy starts anew at 0 after this much (inf: never); None: it reads watts.
    """

    name: str
    read: Callable[[], float]
    range_joules: float | None = None


class EnergyMeter:
    """Joules since it was entered as a context, by sensors that a thread reads ten times a second.

    The thread is there for power, which must be integrated, and for counters that start anew: none of those may go
    round twice between two readings.

    Args:
        sensors: what to add up.
        clock: seconds, for tests.

    Attributes:
        name: of the sensors.
        failure: why there is no result any more, or None.
    """

    def __init__(self, sensors: Sequence[Sensor], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = " + ".join(sensor.name for sensor in sensors)
        self.failure: str | None = None
        self._sensors, self._clock = sensors, clock
        self._joules, self._last = 0.0, (clock(), [sensor.read() for sensor in sensors])
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_sampling, name="energy meter", daemon=True)

    def __enter__(self) -> EnergyMeter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def joules(self) -> float | None:
        """Up to this moment; None once a sensor could not be read."""
        with self._lock:
            self._sample()
            return None if self.failure else self._joules

    def _keep_sampling(self) -> None:
        while not self._ended.wait(SAMPLING_SECONDS):
            self.joules()

    def _sample(self) -> None:
        before, old = self._last
        try:
            now, new = self._last = self._clock(), [sensor.read() for sensor in self._sensors]
        except OSError as error:
            self.failure = f"{self.name}: could not be read while training: {error.strerror or error}"
            return
        for sensor, earlier, value in zip(self._sensors, old, new, strict=True):
            if sensor.range_joules is None:
                self._joules += (earlier + value) / 2 * (now - before)
            else:
                self._joules += value - earlier if value >= earlier else value + sensor.range_joules - earlier


def find_energy_meter(root: Path = Path("/")) -> EnergyMeter | str:
    """A meter of the sensors of this machine, or why there is none.

    Args:
        root: the folder that holds sys.
    """
    try:
        board, gpus = _jetson(root), [*_nvml()]
        if not board and not gpus and _has_gpu():
            return "no energy sensor of the GPU was found (pip install nvidia-ml-py; Volta or later); give --power_csv"
        sensors = board or [*_rapl(root), *gpus]
        if sensors:
            return EnergyMeter(sensors)
    except PermissionError as error:
        return f"{error.filename} is for root alone; sudo chmod a+r {error.filename} opens it until the next start"
    except OSError as error:
        return f"{error.filename}: cannot be read: {error.strerror or error}"
    return "this machine has no energy sensor that is known here (Jetson's INA3221, RAPL, NVML); give --power_csv"


def _has_gpu() -> bool:
    """Whether TensorFlow trains on a GPU here."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _read_number(path: Path, unit: float) -> float:
    try:
        return float(path.read_text(encoding="utf-8")) * unit
    except ValueError as error:
        raise OSError(None, "holds no number", str(path)) from error


def _jetson(root: Path) -> list[Sensor]:
    """The rails of all INA3221: that of the whole board alone where there is one, else all that have a name."""
    drivers = root / "sys" / "bus" / "i2c" / "drivers"
    rails: dict[str, Sensor] = {}
    for label in sorted(drivers.glob("ina3221x/*/iio:device*/rail_name_*")):  # JetPack 4
        power = label.with_name(f"in_power{label.name.rpartition('_')[2]}_input")
        name = label.read_text(encoding="utf-8").strip()
        rails[name] = Sensor(f"INA3221 {name}", lambda power=power: _read_number(power, 1e-3))  # type: ignore[misc]
    for label in sorted(drivers.glob("ina3221/*/hwmon/hwmon*/in[1-3]_label")):  # JetPack 5 and later
        volts, amperes = (label.with_name(f"{kind}{label.name[2]}_input") for kind in ("in", "curr"))
        name = label.read_text(encoding="utf-8").strip()

        def watts(volts: Path = volts, amperes: Path = amperes) -> float:
            return _read_number(volts, 1e-3) * _read_number(amperes, 1e-3)

        if volts.exists() and amperes.exists():
            rails[name] = Sensor(f"INA3221 {name}", watts)
    rails = {name: rail for name, rail in rails.items() if name not in ("", "NC")}
    whole = [rails[name] for name in WHOLE_BOARD if name in rails]
    return whole[:1] or [*rails.values()]


def _rapl(root: Path) -> list[Sensor]:
    """The counter of the whole platform where there is one, else those of processors and of their memory."""
    zones = [*(root / "sys" / "class" / "powercap").glob("intel-rapl:*")]  # so called on AMD as well
    named = {zone: utils.text_of(zone / "name").strip() for zone in sorted(zones)}
    platform = [zone for zone, name in named.items() if name == "psys"]
    chosen = platform or [zone for zone, name in named.items() if name.startswith("package") or name == "dram"]
    return [
        Sensor(
            f"RAPL {named[zone]}",
            lambda zone=zone: _read_number(zone / "energy_uj", 1e-6),  # type: ignore[misc]
            _read_number(zone / "max_energy_range_uj", 1e-6),
        )
        for zone in chosen
    ]


def _nvml() -> Iterator[Sensor]:
    """Energy counters of NVIDIA GPUs (Volta and later), through NVIDIA's own package if that is installed."""
    try:
        import pynvml  # of the package nvidia-ml-py

        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, or no driver: no such sensor
        return
    for index, device in enumerate(devices):

        def joules(device: Any = device) -> float:
            try:
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
            except pynvml.NVMLError as error:
                raise OSError(None, str(error), "NVML") from error

        try:
            joules()
        except OSError:
            continue
        yield Sensor(f"NVML GPU {index}", joules, math.inf)


def add_external_energy(folder: Path, record: Path) -> float | None:
    """Put into the finished run in `folder` what an external power meter recorded while it trained.

    summary.json and metrics.csv are written anew, and TensorBoard gets the curve.

    Args:
        folder: of the run.
        record: a CSV file with a line of names and two columns: time, as seconds since 1970 or as ISO 8601 (local where
            it names no zone), and watts.

    Returns:
        Joules, or None where the record does not cover the run; then `energy_missing` of the summary says why.

    Raises:
        UserError: the record cannot be read.
    """
    import tensorflow as tf

    times, watts = read_power(record)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    seconds = [float(row["train_seconds"]) for row in rows]
    try:
        joules = integrate_power(times, watts, summary["training_spans"], seconds)
    except ValueError as error:
        summary["energy_missing"] = f"{record}: {error}"
    else:
        summary.update(energy_joules=joules[-1], energy_meter=str(record), energy_missing=None)
        writer = tf.summary.create_file_writer(str(folder), filename_suffix=".energy")
        with writer.as_default():
            for row, value in zip(rows, joules, strict=True):
                row["energy_joules"] = str(value)
                tf.summary.scalar("meters/energy_joules", value, int(row["step"]))
        writer.close()
        utils.write_csv(folder / "metrics.csv", [*rows[0]], [list(row.values()) for row in rows])
    utils.write_json(folder / "summary.json", summary)
    return summary["energy_joules"]


def read_power(record: Path) -> tuple[np.ndarray, np.ndarray]:
    """Times (s since 1970) and watts of an external meter's CSV file, see `add_external_energy`, in order of time.

    Raises:
        UserError: there is no such file, or a line of it is not of that form.
    """
    readings = []
    try:
        with record.open(newline="", encoding="utf-8-sig") as file:
            for number, line in enumerate(csv.reader(file), 1):
                if number == 1 or not line:
                    continue
                try:
                    readings.append((_seconds_since_1970(line[0]), float(line[1])))
                except (ValueError, IndexError):
                    raise UserError(
                        f"--power_csv {record}: line {number} is not a time (seconds since 1970, or as "
                        "2026-01-31T12:00:00) and watts, separated by a comma"
                    ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--power_csv {record}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(readings) < 2:
        raise UserError(
            f"--power_csv {record}: holds no two readings; give a line of names, then time and watts a line"
        )
    times, watts = np.array(sorted(readings)).T
    return times, watts


def _seconds_since_1970(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()


def integrate_power(
    times: np.ndarray, watts: np.ndarray, spans: Sequence[Sequence[float]], train_seconds: Sequence[float]
) -> list[float]:
    """Joules spent in training time up to each of `train_seconds`.

    Args:
        times, watts: [n] readings in order of time; between two of them power changes linearly.
        spans: begin and end of each stretch of training, in the same time.
        train_seconds: ascending seconds of training; the last is taken as the end of the last span.

    Raises:
        ValueError: the readings do not cover all spans.
    """
    begins, ends = np.array(spans, float).T
    if begins.min() < times[0] or ends.max() > times[-1]:
        raise ValueError("does not cover all of the training")
    for begin, end in zip(begins, ends, strict=True):
        around = times[max(np.searchsorted(times, begin, "right") - 1, 0) : np.searchsorted(times, end) + 1]
        if np.diff(around).max(initial=0) > LONGEST_GAP_SECONDS:
            raise ValueError(f"has no reading for more than {LONGEST_GAP_SECONDS} s of the training")
    done = np.concatenate([[0], np.cumsum(ends - begins)])
    wanted = np.clip([*train_seconds[:-1], done[-1]], 0, done[-1])
    index = np.clip(np.searchsorted(done, wanted, "left") - 1, 0, len(begins) - 1)
    moments = begins[index] + (wanted - done[index])
    every = np.unique(np.concatenate([times, begins, ends, moments]))
    power = np.interp(every, times, watts)
    energy = np.concatenate([[0], np.cumsum((power[1:] + power[:-1]) / 2 * np.diff(every))])
    at_begin, at_end, at_moment = (np.interp(when, every, energy) for when in (begins, ends, moments))
    before = np.concatenate([[0], np.cumsum(at_end - at_begin)])
    return [float(joules) for joules in before[index] + at_moment - at_begin[index]]


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_memory_mb() -> float | None:
    """Largest resident memory of this process so far in MB, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def gpu_peak_memory_mb() -> float | None:
    """Most that TensorFlow's allocators held on all GPUs so far in MB, or None without a GPU."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    return sum(tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus) / 1e6 if gpus else None


def available_memory_mb(root: Path = Path("/")) -> float | None:
    """Memory in MB that this process can still get, swap included, or None where the system does not tell.

    That is what Linux calls available, or what the control groups that hold this process (of a container, a service)
    leave below their limits, if that is less. What a group keeps of files counts as free: it is dropped when needed.

    Args:
        root: the folder that holds proc and sys.
    """
    system = _numbers_in(root / "proc" / "meminfo")  # in KiB
    if "MemAvailable:" not in system:
        return None
    swap = 1024 * system.get("SwapFree:", 0)
    room = 1024 * system["MemAvailable:"] + swap
    for group in _memory_groups(root):
        for limit, usage, kept in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            largest, used = _whole_number_in(group / limit), _whole_number_in(group / usage)
            if largest is not None and used is not None:
                counts = _numbers_in(group / "memory.stat")
                room = min(room, largest - used + sum(counts.get(name, 0) for name in kept) + swap)
    return max(room, 0) / 1e6


def _memory_groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that bound this process's memory, each with those around it."""
    base = root / "sys" / "fs" / "cgroup"
    for line in utils.text_of(root / "proc" / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            top = base if number == "0" else base / "memory"
            parts = [part for part in path.split("/") if part not in ("", "..")]
            # A container may see its own group as the top one, whatever the path says.
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _numbers_in(path: Path) -> dict[str, int]:
    """The lines `name number …` of a file of the kernel's."""
    lines = [line.split() for line in utils.text_of(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _whole_number_in(path: Path) -> int | None:
    """The one number in a file of the kernel's; None if it is not there or says `max`."""
    text = utils.text_of(path).strip()
    return int(text) if text.isdigit() else None
