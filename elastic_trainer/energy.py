"""Energy of training, from the machine's sensors (the paper's Fig 23).

Sensors are the INA3221 rail of a Jetson that carries all of its power, else the RAPL counters of an Intel or AMD
processor. Only training time counts: `runs.history.Clocks` reads the meter when training starts and stops. A machine
without a sensor needs the record of an external power meter (`scripts/energy.py`).

No machine with any of these sensors was available: all of this is tested on made-up files.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from elastic_trainer.system.machine import has_gpu
from elastic_trainer.system.memory import text_of

SAMPLING_SECONDS = 0.1  # these sensors average over 35 ms and more
WHOLE_BOARD = "VDD_IN"  # the rail of a Jetson that carries all of its power


class Sensor(NamedTuple):
    """A sensor of power, or a counter of energy."""

    name: str  # shown in summary.json
    read: Callable[[], float]  # watts, or joules if it counts energy; may raise `OSError` or `ValueError`
    range_joules: float | None = None  # a counter wraps around to 0 after this much energy


class EnergyMeter:
    """Adds up joules. In its context a thread reads the sensors ten times a second.

    Power must be integrated, and a counter must not wrap around twice between two readings; both need the thread.
    `failure` is why the energy is not known, or None.
    """

    def __init__(self, sensors: Sequence[Sensor], failure: str | None = None) -> None:
        self.name, self.failure = " + ".join(sensor.name for sensor in sensors), failure
        self._sensors, self._joules, self._last = sensors, 0.0, (time.monotonic(), [one.read() for one in sensors])
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_sampling, name="energy meter", daemon=True)

    def __enter__(self) -> EnergyMeter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _keep_sampling(self) -> None:
        while not self._ended.wait(SAMPLING_SECONDS):
            self.joules()

    def joules(self) -> float | None:
        """Energy since the meter was made; None once a sensor could not be read."""
        with self._lock:
            before, old = self._last
            try:
                now, new = self._last = time.monotonic(), [sensor.read() for sensor in self._sensors]
            except (OSError, ValueError) as error:
                self.failure = f"{self.name}: could not be read during training: {error}"
                return None
            for sensor, earlier, value in zip(self._sensors, old, new, strict=True):
                if sensor.range_joules is None:
                    self._joules += (earlier + value) / 2 * (now - before)
                else:
                    self._joules += (value - earlier) % sensor.range_joules
            return None if self.failure else self._joules

    def report(self, joules: float | None) -> dict[str, Any]:
        """Fields of summary.json: the meter, and why the energy of training, `joules`, is not known if it is None."""
        why = self.failure or "part of the run was trained without an energy meter"
        return {"energy_meter": self.name or None, "energy_missing": why if joules is None else None}


def find_energy_meter(root: Path = Path("/")) -> EnergyMeter:
    """The meter of this machine's sensors, of which `root` contains sys; `failure` says why there are none."""
    external = "use an external meter, and scripts/energy.py"
    try:
        rails = _rails(root)
        if rails and WHOLE_BOARD not in rails:
            why = f"power: unknown rails {', '.join(sorted(rails))}, which may be parts of the whole; {external}"
        elif not rails and has_gpu():
            why = f"RAPL does not measure the GPU; {external}"
        elif sensors := [rails[WHOLE_BOARD]] if rails else _rapl(root):
            return EnergyMeter(sensors)
        else:
            why = f"this machine has no supported energy sensor (Jetson's INA3221, RAPL); {external}"
    except PermissionError as error:
        why = f"{error.filename}: only root can read it; run sudo chmod a+r {error.filename} after each boot"
    except (OSError, ValueError) as error:
        why = f"the energy sensor cannot be read: {error}"
    return EnergyMeter([], why)


def _product(unit: float, *paths: Path) -> float:
    """Of the numbers in these files and the unit."""
    return math.prod((float(path.read_text(encoding="utf-8")) for path in paths), start=unit)


def _rails(root: Path) -> dict[str, Sensor]:
    """The rails of a Jetson (JetPack 5 and later) that have a name."""
    rails = {}
    for label in (root / "sys" / "bus" / "i2c" / "drivers").glob("ina3221/*/hwmon/hwmon*/in[1-3]_label"):
        name = label.read_text(encoding="utf-8").strip()
        paths = (label.with_name(f"{kind}{label.name[2]}_input") for kind in ("in", "curr"))  # mV and mA
        if name not in ("", "NC"):
            rails[name] = Sensor(f"INA3221 {name}", partial(_product, 1e-6, *paths))
    return rails


def _rapl(root: Path) -> list[Sensor]:
    """The counter of the entire platform if there is one, else those of the processors and their memory."""
    zones = sorted((root / "sys" / "class" / "powercap").glob("intel-rapl:*"))  # so called on AMD as well
    named = {zone: text_of(zone / "name").strip() for zone in zones}
    whole = [zone for zone, name in named.items() if name == "psys"]
    parts = [zone for zone, name in named.items() if name.startswith("package") or name == "dram"]
    read, most = partial(_product, 1e-6), "max_energy_range_uj"
    return [
        Sensor(f"RAPL {named[zone]}", partial(read, zone / "energy_uj"), read(zone / most)) for zone in whole or parts
    ]
