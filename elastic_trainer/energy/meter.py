"""Energy of training, from the machine's sensors (the paper's Fig 23).

Sensors are the INA3221 rails of a Jetson, else the RAPL counters of an Intel or AMD processor and the NVML counters of
NVIDIA GPUs, added up. Only training time counts: `runs.history.Clocks` reads the meter when training starts and stops.
A machine without a sensor needs the record of an external power meter (`power_record`).

No machine with any of these sensors was available: all of this is tested on made-up files.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from elastic_trainer.system.machine import has_gpu
from elastic_trainer.system.memory import text_of

SAMPLING_SECONDS = 0.1  # these sensors average over 35 ms and more
WHOLE_BOARD = ("VDD_IN", "POM_5V_IN")  # rails of a Jetson that carry all of its power


class Sensor(NamedTuple):
    """A sensor of power, or a counter of energy."""

    name: str  # shown in summary.json
    read: Callable[[], float]  # watts, or joules if it counts energy; may raise `OSError`
    range_joules: float | None = None  # a counter wraps around to 0 after this much energy (inf: never)


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
    why = "this machine has no supported energy sensor (Jetson's INA3221, RAPL, NVML); use scripts/energy.py"
    try:
        board, gpus = _jetson(root), [*_nvml()]
        if not board and not gpus and has_gpu():
            why = "no energy sensor of the GPU was found (pip install nvidia-ml-py; Volta or later)"
        elif sensors := board or [*_rapl(root), *gpus]:
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


def _nvml() -> Iterator[Sensor]:
    """Energy counters of NVIDIA GPUs (Volta and later), through NVIDIA's own package if that is installed."""
    try:
        import pynvml  # of the package nvidia-ml-py

        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, or no driver: no such sensor
        return

    def joules(device: Any) -> float:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
        except pynvml.NVMLError as error:
            raise OSError(None, str(error), "NVML") from error

    for index, device in enumerate(devices):
        with contextlib.suppress(OSError):  # a GPU before Volta
            joules(device)
            yield Sensor(f"NVML GPU {index}", partial(joules, device), math.inf)
