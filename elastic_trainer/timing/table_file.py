"""The file of a timing table: profile.json in logs/profiles/<model>_<input>_<classes>_<batch>/.

Beside it, table.csv shows a row a tensor; nothing reads it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.settings import TABLE_RECORD, Settings
from elastic_trainer.settings.network_names import model_label
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import read_record, trusting, write_csv, write_record
from elastic_trainer.system.machine import environment
from elastic_trainer.system.memory_budget import StepMemory
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table import TIMES, TimingTable

if TYPE_CHECKING:
    import keras

# The settings of a network that a table is made for; it is invalid for others.
TABLE_SETTINGS = (
    *("model_name", "alpha", "input_size", "num_classes"),
    *("batch_size", "optimizer", "clips_gradients"),
)
# What a table depends on besides the network: keys of `machine.environment()`, and of the versions in it.
_ORIGIN = ("tensorflow", "machine", "processor", "cores", "usable_cores", "thread_settings", "system")
_ARRAYS = "t_dw_ms", "t_dy_ms", "t_fw_ms", "kernels", "features_mb"


def table_settings(network: Settings) -> dict[str, Any]:
    """Those settings of a network that a table is made for."""
    return {key: getattr(network, key) for key in TABLE_SETTINGS}


def table_folder(network: Settings, from_trace: Path | None = None) -> Path:
    """Where the timing table of a network is kept; one made from another board's trace is kept apart."""
    label = model_label(network.model_name, network.alpha)
    name = f"{label}_{network.input_size}_{network.num_classes}_{network.batch_size}"
    name += "_clipped" if network.clips_gradients else ""
    board = f"_from_{from_trace.name.removesuffix('.pb').removesuffix('.xplane')}" if from_trace else ""
    return network.logdir / "profiles" / (name + board)


def other_tables(network: Settings) -> list[str]:
    """For what there are tables of this network, as `224 px, 37 classes, batch 4, not clipped`; photos' are clipped."""
    label = f"{model_label(network.model_name, network.alpha)}_"
    records = network.logdir.glob(f"profiles/{label}*/{TABLE_RECORD}")
    sizes = [record.parent.name.removeprefix(label).split("_") for record in records]
    return [
        f"{size[0]} px, {size[1]} classes, batch {size[2]}, {'' if 'clipped' in size else 'not '}clipped"
        for size in sorted(sizes)
        if "from" not in size
    ]


def save_table(table: TimingTable, network: Settings, folder: Path) -> None:
    """Write profile.json and table.csv into `folder`."""
    arrays = {name: getattr(table, name).tolist() for name in _ARRAYS}
    record = {
        **table_settings(network),
        **{name: getattr(table, name) for name in TIMES},
        "fit": asdict(table.fit),
        "tensors": {"names": table.names, "shapes": table.shapes, **arrays},
        "memory": None if table.memory is None else table.memory.to_record(),
        **table.details,
    }
    write_record(folder / TABLE_RECORD, record)
    shapes = ["x".join(map(str, shape)) for shape in table.shapes]
    kernels = ["" if kernel < 0 else table.names[kernel] for kernel in table.kernels]
    columns = {"name": table.names, "shape": shapes, **arrays, "kernels": kernels}
    write_csv(folder / "table.csv", [*columns], zip(*columns.values(), strict=True))


def load_table(network: Settings, model: keras.Model, remake_command: str) -> TimingTable:
    """The timing table of a network, whichever setup it was measured on (see `other_setup`).

    `remake_command` makes the table; it is part of error messages.

    Raises:
        UserError: there is none, it cannot be read, or it was measured for another network.
    """
    from elastic_trainer.networks.tensors import tensor_names

    folder, wanted, ours = table_folder(network), table_settings(network), tensor_names(model)
    path = folder / TABLE_RECORD
    try:
        record = read_record(path)
        settings = {key: record.pop(key, None) for key in wanted}
        others = [f"--{key} {was}, not {wanted[key]}" for key, was in settings.items() if was != wanted[key]]
        if others:
            raise UserError(f"{folder}: measured with {'; '.join(others)}")
        with trusting(path):
            tensors, memory = record.pop("tensors"), record.pop("memory")
            names, shapes = tensors["names"], [*map(tuple, tensors["shapes"])]
            fields: dict[str, Any] = {name: np.array(tensors[name]) for name in _ARRAYS}
            fields |= {name: record.pop(name) for name in TIMES}
            fields["fit"] = Fit(**record.pop("fit"))
            fields["memory"] = None if memory is None else StepMemory.from_record(memory)
        expected = {name: tuple(each.shape) for name, each in zip(ours, model.trainable_variables, strict=True)}
        if dict(zip(names, shapes, strict=False)) != expected:
            raise UserError(f"{folder}: not the timing table of this network, whose tensors differ")
    except UserError as error:
        raise UserError(f"{error}; make it again: {remake_command}") from error
    positions = np.array([ours.index(name) for name in names])
    return TimingTable(names=names, shapes=shapes, positions=positions, details=record, **fields)


def other_setup(profile: dict[str, Any]) -> str | None:
    """How the machine and the versions of a table's `details` differ from those here; None: they do not."""
    recorded, here = profile.get("environment") or {}, environment()
    old, new = ({**each, **each.get("packages", {})} for each in (recorded, here))
    differences = [
        f"{key.replace('_', ' ')} {old.get(key)}, here {new.get(key)}"
        for key in _ORIGIN
        if old.get(key) != new.get(key)
    ]
    return f"profiled on a different setup: {'; '.join(differences)}" if differences else None
