"""The energy of training: sensors of the machine, and records of external power meters."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.options import flag, flags_of
from elastic_trainer.registry import AFTERWARDS, CHECKS, FLAGS, METERS, Lazy


# fmt: off
@dataclass(frozen=True)
class EnergyFlags:
    """The flag of main.py that energy adds."""

    power_csv: Path | None = flag(None, "Output", Path, "FILE", is_free=True, help=(
        "record of an external power meter (time,watts), for [`energy_joules`](runs.md#energy-memory-flops). The "
        "file must exist when the run starts; it is read after training"))
# fmt: on


def check(args: argparse.Namespace, given: Collection[str]) -> None:
    """Raise `UserError` if the record `given` now cannot be read."""
    if args.power_csv is not None and "power_csv" in given:
        Lazy("elastic_trainer.extensions.energy.power_record:check_growing")(args.power_csv)


FLAGS.update(flags_of(EnergyFlags))
CHECKS.append(check)
AFTERWARDS["power_csv"] = Lazy("elastic_trainer.extensions.energy.power_record:add_power")
METERS.append(Lazy("elastic_trainer.extensions.energy.meter:find_energy_meter"))
