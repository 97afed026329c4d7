"""Energy of training, from the machine's sensors (the paper's Fig 23).

Sensors are the INA3221 rails of a Jetson, else the RAPL counters of an Intel or AMD processor. Only training time
counts: `runs.history.Clocks` reads the meter when training starts and stops. A machine without a sensor needs the
record of an external power meter (`add_power`).

No machine with any of these sensors was available: all of this is tested on made-up files.
"""

from __future__ import annotations

import contextlib
import csv
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.runs.reader import read_summary
from elastic_trainer.runs.summary import update_summary
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import reading
from elastic_trainer.system.machine import has_gpu
from elastic_trainer.system.memory import text_of

SAMPLING_SECONDS = 0.1  # these sensors average over 35 ms and more
MAX_GAP_SECONDS = 60  # between two readings of an external meter
MAX_WATTS = 1_000_000  # far above any machine; much more would overflow
WHOLE_BOARD = ("VDD_IN", "POM_5V_IN")  # rails of a Jetson that carry all of its power


class Sensor(NamedTuple):
    """A sensor of power, or a counter of energy."""

    name: str  # shown in summary.json
    read: Callable[[], float]  # watts, or joules if it counts energy; may raise `OSError`
    range_joules: float | None = None  # a counter wraps around to 0 after this much energy


class EnergyMeter:
    """Adds up joules. In its context a thread reads the sensors ten times a second.

    Power must be integrated, and a counter must not wrap around twice between two readings; both need the thread.
    `failure` is why the energy is not known, or None.
    """

    def __init__(
        self, sensors: Sequence[Sensor], failure: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.failure = " + ".join(sensor.name for sensor in sensors), failure
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
        """Energy since the meter was made; None once a sensor could not be read."""
        with self._lock:
            self._sample()
            return None if self.failure else self._joules

    def report(self, joules: float | None) -> dict[str, Any]:
        """Fields of summary.json: the meter, and why the energy of training, `joules`, is not known if it is None."""
        why = self.failure or "part of the run was trained without an energy meter"
        return {"energy_meter": self.name or None, "energy_missing": why if joules is None else None}

    def _keep_sampling(self) -> None:
        while not self._ended.wait(SAMPLING_SECONDS):
            self.joules()

    def _sample(self) -> None:
        before, old = self._last
        try:
            now, new = self._last = self._clock(), [sensor.read() for sensor in self._sensors]
        except OSError as error:
            self.failure = f"{self.name}: could not be read during training: {error.strerror or error}"
            return
        for sensor, earlier, value in zip(self._sensors, old, new, strict=True):
            if sensor.range_joules is None:
                self._joules += (earlier + value) / 2 * (now - before)
            else:
                self._joules += value - earlier if value >= earlier else value + sensor.range_joules - earlier


def find_energy_meter(root: Path = Path("/")) -> EnergyMeter:
    """The meter of this machine's sensors, of which `root` contains sys; `failure` says why there are none."""
    why = "this machine has no supported energy sensor (Jetson's INA3221, RAPL); use scripts/energy.py"
    try:
        board = _jetson(root)
        if not board and has_gpu():
            why = "RAPL does not measure the GPU; use an external meter, and scripts/energy.py"
        elif sensors := board or _rapl(root):
            return EnergyMeter(sensors)
    except PermissionError as error:
        why = f"{error.filename}: only root can read it; run sudo chmod a+r {error.filename} after each boot"
    except OSError as error:
        why = f"{error.filename}: cannot be read: {error.strerror or error}"
    return EnergyMeter([], why)


def _read_number(path: Path, unit: float) -> float:
    try:
        return float(path.read_text(encoding="utf-8")) * unit
    except ValueError as error:
        raise OSError(None, "contains no number", str(path)) from error


def _product(volts: Path, amperes: Path) -> float:
    """Watts, from files in mV and mA."""
    return _read_number(volts, 1e-3) * _read_number(amperes, 1e-3)


def _jetson(root: Path) -> list[Sensor]:
    """The rails of all INA3221: the rail of the entire board if there is one, else all that have a name."""
    drivers = root / "sys" / "bus" / "i2c" / "drivers"
    rails: dict[str, Sensor] = {}
    for label in sorted(drivers.glob("ina3221x/*/iio:device*/rail_name_*")):  # JetPack 4
        power = label.with_name(f"in_power{label.name.rpartition('_')[2]}_input")
        name = label.read_text(encoding="utf-8").strip()
        rails[name] = Sensor(f"INA3221 {name}", partial(_read_number, power, 1e-3))
    for label in sorted(drivers.glob("ina3221/*/hwmon/hwmon*/in[1-3]_label")):  # JetPack 5 and later
        volts, amperes = (label.with_name(f"{kind}{label.name[2]}_input") for kind in ("in", "curr"))
        name = label.read_text(encoding="utf-8").strip()
        if volts.exists() and amperes.exists():
            rails[name] = Sensor(f"INA3221 {name}", partial(_product, volts, amperes))
    rails = {name: rail for name, rail in rails.items() if name not in ("", "NC")}
    whole = [rails[name] for name in WHOLE_BOARD if name in rails]
    return whole[:1] or [*rails.values()]


def _rapl(root: Path) -> list[Sensor]:
    """The counter of the entire platform if there is one, else those of the processors and their memory."""
    zones = [*(root / "sys" / "class" / "powercap").glob("intel-rapl:*")]  # so called on AMD as well
    named = {zone: text_of(zone / "name").strip() for zone in sorted(zones)}
    platform = [zone for zone, name in named.items() if name == "psys"]
    chosen = platform or [zone for zone, name in named.items() if name.startswith("package") or name == "dram"]
    return [
        Sensor(
            f"RAPL {named[zone]}",
            partial(_read_number, zone / "energy_uj", 1e-6),
            _read_number(zone / "max_energy_range_uj", 1e-6),
        )
        for zone in chosen
    ]


# --- an external power meter ------------------------------------------------------------------------------------------


def add_power(folder: Path, record: Path) -> str:
    """Add the energy that an external power meter recorded during training to the finished run in `folder`.

    `record` is a CSV file with a header line and two columns: time, in seconds since 1970 or in ISO 8601 (local time if
    it has no time zone), and watts. summary.json is rewritten. Returns the line to print. Raises `UserError` if a file
    cannot be read, or if the record does not cover the run; energy that is known already then stays.
    """
    times, watts = read_power(record)
    try:
        joules = integrate_power(times, watts, read_summary(folder)["training_spans"])
    except ValueError as error:
        raise UserError(f"{record}: {error}; give the record made during this run") from error
    update_summary(folder, energy_joules=joules, energy_meter=str(record), energy_missing=None)
    return f"energy of training: {joules:.6g} J"


def read_power(record: Path) -> tuple[np.ndarray, np.ndarray]:
    """Times (s since 1970) and watts in an external meter's CSV file, see `add_power`, in order of time."""
    readings = []
    with reading(record), record.open(newline="", encoding="utf-8-sig") as file:
        for number, line in enumerate(csv.reader(file), 1):
            if number > 1 and line:
                readings.append(_reading(number, line))
        if len(readings) < 2:
            raise ValueError("needs at least two readings; give a header line, then time and watts in each line")
    times, watts = np.array(sorted(readings)).T
    return times, watts


def _reading(number: int, line: Sequence[str]) -> tuple[float, float]:
    """Seconds since 1970 and watts in a line."""
    when = watts = math.nan
    with contextlib.suppress(ValueError, IndexError):
        watts = float(line[1])
        when = datetime.fromisoformat(line[0].strip().replace("Z", "+00:00")).timestamp()
    with contextlib.suppress(ValueError):
        when = float(line[0])
    if not (math.isfinite(when) and 0 <= watts <= MAX_WATTS):
        raise ValueError(
            f"line {number} must contain a time (seconds since 1970, or 2026-01-31T12:00:00), a comma, and watts from "
            f"0 to {MAX_WATTS:,}"
        )
    return when, watts


def integrate_power(times: np.ndarray, watts: np.ndarray, spans: Sequence[Sequence[float]]) -> float:
    """Joules within the `spans` of training; power changes linearly between two readings. All in seconds since 1970.

    Raises `ValueError` if the readings do not cover the spans.
    """
    starts, ends = np.array(spans, float).T
    if starts.min() < times[0] or ends.max() > times[-1]:
        raise ValueError("does not cover all of training")
    for start, end in zip(starts, ends, strict=True):
        around = times[max(np.searchsorted(times, start, "right") - 1, 0) : np.searchsorted(times, end) + 1]
        if np.diff(around).max(initial=0) > MAX_GAP_SECONDS:
            raise ValueError(f"has no reading for more than {MAX_GAP_SECONDS} s of training")
    every = np.unique(np.concatenate([times, starts, ends]))
    power = np.interp(every, times, watts)
    energy = np.concatenate([[0], np.cumsum((power[1:] + power[:-1]) / 2 * np.diff(every))])
    return float((np.interp(ends, every, energy) - np.interp(starts, every, energy)).sum())
