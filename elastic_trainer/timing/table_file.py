"""The file of a timing table: logs/profiles/<model>_<input>_<classes>_<batch>/ has table.csv, a row a tensor, and
profile.json, everything else.
"""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.engine.memory import StepMemory
from elastic_trainer.settings import TABLE_RECORD, Settings
from elastic_trainer.settings.network_names import model_label
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import alone_in, read_record, trusting, write_csv, write_record
from elastic_trainer.system.machine import environment
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
_NUMBERS = "t_dw_ms", "t_dy_ms", "t_fw_ms", "features_mb"
_COLUMNS = "name", "shape", "order", *_NUMBERS[:3], "kernel", "features_mb"  # of table.csv


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


def has_table(network: Settings) -> bool:
    """Whether there is a timing table of this machine and its versions for a network; its graph is not looked at."""
    path = table_folder(network) / TABLE_RECORD
    try:
        return path.is_file() and other_setup(read_record(path)) is None
    except UserError:
        return True  # damaged, as `load_table` says


def other_tables(network: Settings) -> list[str]:
    """For which sizes there are tables of the same network: `224 px, 37 classes, batch 4`."""
    label = f"{model_label(network.model_name, network.alpha)}_"
    records = network.logdir.glob(f"profiles/{label}*/{TABLE_RECORD}")
    sizes = [record.parent.name.removeprefix(label).split("_") for record in records]
    return [f"{size[0]} px, {size[1]} classes, batch {size[2]}" for size in sorted(sizes) if "from" not in size]


def save_table(table: TimingTable, network: Settings, folder: Path) -> None:
    """Write table.csv and profile.json into `folder`; one is never left beside the other of another table."""
    kernels = ["" if kernel < 0 else table.names[kernel] for kernel in table.kernels]
    shapes = ["x".join(map(str, shape)) for shape in table.shapes]
    *times, features_mb = ([f"{number:.6f}" for number in getattr(table, name)] for name in _NUMBERS)
    columns = table.names, shapes, range(len(shapes)), *times, kernels, features_mb
    record = {name: getattr(table, name) for name in TIMES}
    record |= {"backward_ms": table.full_step_ms - table.forward_ms, "fit": asdict(table.fit)}
    record["memory"] = None if table.memory is None else table.memory.to_record()
    known = {name: value for name, value in record.items() if value is not None}
    with alone_in(folder):
        (folder / TABLE_RECORD).unlink(missing_ok=True)
        write_csv(folder / "table.csv", _COLUMNS, zip(*columns, strict=True))
        write_record(folder / TABLE_RECORD, {**table_settings(network), **known, **table.details})


def load_table(network: Settings, model: keras.Model, remake_command: str) -> TimingTable:
    """The timing table of a network, whichever setup it was measured on (see `other_setup`).

    `remake_command` makes the table; it is part of error messages.

    Raises:
        UserError: there is none, it cannot be read, or it was measured for another network.
    """
    from elastic_trainer.networks.tensors import tensor_names

    folder, wanted = table_folder(network), table_settings(network)
    if not (folder / TABLE_RECORD).is_file() or not (folder / "table.csv").is_file():
        raise UserError(f"no timing table in {folder}; make it with: {remake_command}")
    try:
        record = read_record(folder / TABLE_RECORD)
        costs = record.pop("memory", None)
        settings = {key: record.pop(key, None) for key in wanted}
        others = [f"--{key} {was}, not {wanted[key]}" for key, was in settings.items() if was != wanted[key]]
        if others:
            raise UserError(f"{folder}: measured with {'; '.join(others)}")
        rows = _read_rows(folder / "table.csv")
        names, place_of = tensor_names(model), {row["name"]: place for place, row in enumerate(rows)}
        shapes = {name: tuple(each.shape) for name, each in zip(names, model.trainable_variables, strict=True)}
        if {row["name"]: row["shape"] for row in rows} != shapes:
            raise UserError(f"{folder}: not the timing table of this network, whose tensors differ")
        with trusting(folder / TABLE_RECORD):
            fit, numbers = Fit(**record.pop("fit")), {name: record.pop(name, None) for name in TIMES}
            memory = None if costs is None else StepMemory.from_record(costs)
    except UserError as error:
        raise UserError(f"{error}; make it again: {remake_command}") from error
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in _NUMBERS}
    return TimingTable(
        names=[*place_of],
        shapes=[row["shape"] for row in rows],
        positions=np.array([names.index(name) for name in place_of]),
        kernels=np.array([place_of.get(row["kernel"], -1) for row in rows]),
        **columns,
        **numbers,
        fit=fit,
        memory=memory,
        details=record,
    )


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table.csv, in backward order. Raises `UserError` if it is damaged."""
    rows: list[dict[str, Any]] = []
    with trusting(path), path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            row: dict[str, Any] = {"name": cells["name"], "kernel": cells["kernel"], "order": int(cells["order"])}
            row |= {name: float(cells[name]) for name in _NUMBERS}
            rows.append({**row, "shape": tuple(int(size) for size in cells["shape"].split("x") if size)})
    return sorted(rows, key=lambda row: row["order"])


def other_setup(profile: dict[str, Any]) -> str | None:
    """How the machine and the versions that a table's `details` record differ from those here; None: they do not.

    What it did not record is not compared.
    """
    if profile.get("environment") is None:  # such as one from a trace
        return "profiled on a different setup: no machine recorded"
    old, new = ({**place, **dict(place.get("packages") or {})} for place in (profile["environment"], environment()))
    differences = [
        f"{key.replace('_', ' ')} {_shown(old[key])}, here {_shown(new[key])}"
        for key in _ORIGIN
        if old.get(key) is not None and new.get(key) is not None and old[key] != new[key]
    ]
    return f"profiled on a different setup: {'; '.join(differences)}" if differences else None


def _shown(value: Any) -> str:
    """A recorded value in one piece of text."""
    if isinstance(value, dict):
        return " ".join(f"{name}={setting}" for name, setting in value.items()) or "unset"
    return str(value) or "unknown"
