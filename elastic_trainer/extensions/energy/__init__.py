"""The energy of training: sensors of the machine, and records of external power meters."""

from elastic_trainer.registry import METERS, Lazy

METERS.append(Lazy("elastic_trainer.extensions.energy.meter:find_energy_meter"))
