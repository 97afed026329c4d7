"""The file of a timing table: where it is kept, and whether the one there is of this network and machine.

A table is kept in logs/profiles/<model>_<input>_<classes>_<batch>/ as table.csv (a row a tensor) and profile.json
(everything else).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.files import alone_in, reading, write_csv, write_json
from elastic_trainer.machine import environment
from elastic_trainer.networks.names import model_label
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table import TimingTable

if TYPE_CHECKING:
    from elastic_trainer.timing.table_schema import Row

# What a table depends on besides the network: keys of `machine.environment()` and their names in messages.
_ORIGIN = {
    "tensorflow": "TensorFlow",
    "machine": "machine",
    "processor": "processor",
    "cores": "cores",
    "usable_cores": "usable cores",
    "thread_settings": "thread settings",
    "system": "system",
}
# The settings of a network that a table is made for; it is of no use for others.
TABLE_SETTINGS = (
    "model_name",
    "alpha",
    "input_size",
    "num_classes",
    "batch_size",
    "optimizer",
    "mixed_precision",
    "clips_gradients",
)


def table_settings(network: NetworkSettings) -> dict[str, Any]:
    """Those settings of a network that a table is made for."""
    return {key: getattr(network, key) for key in TABLE_SETTINGS}


def table_folder(network: NetworkSettings, logdir: Path, from_trace: Path | None = None) -> Path:
    """Where the timing table of a network is kept; one made from another board's trace is kept apart."""
    label = model_label(network.model_name, network.alpha)
    name = f"{label}_{network.input_size}_{network.num_classes}_{network.batch_size}"
    name += "_clipped" if network.clips_gradients else ""
    board = f"_from_{from_trace.name.removesuffix('.pb').removesuffix('.xplane')}" if from_trace else ""
    return logdir / "profiles" / (name + board)


def save_table(table: TimingTable, folder: Path) -> None:
    """Write table.csv and profile.json into `folder`; one is never left beside the other of another table."""
    with alone_in(folder):
        _write_table(table, folder)


def _write_table(table: TimingTable, folder: Path) -> None:
    (folder / "profile.json").unlink(missing_ok=True)
    times = np.stack([table.t_dw_ms, table.t_dy_ms, table.t_fw_ms], axis=1)
    kernels = ["" if kernel < 0 else table.names[kernel] for kernel in table.kernels]
    rows = zip(table.names, table.shapes, times, kernels, table.features_mb, strict=True)
    write_csv(
        folder / "table.csv",
        ("name", "shape", "order", "t_dw_ms", "t_dy_ms", "t_fw_ms", "kernel", "features_mb"),
        (
            (name, "x".join(map(str, shape)), order, *(f"{ms:.6f}" for ms in row), kernel, f"{megabytes:.6f}")
            for order, (name, shape, row, kernel, megabytes) in enumerate(rows)
        ),
    )
    record = {
        **table.settings,
        "forward_ms": table.forward_ms,
        "preprocessing_ms": table.preprocessing_ms,
        "backward_ms": table.full_step_ms - table.forward_ms,
        "full_step_ms": table.full_step_ms,
        "gradient_pass_ms": table.gradient_pass_ms,
        "fit": asdict(table.fit),
        **table.details,
    }
    write_json(folder / "profile.json", record)


def load_table(
    folder: Path,
    wanted: dict[str, Any],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    graph: str,
    remake_command: str,
    allow_stale: bool = False,
) -> TimingTable:
    """The timing table in `folder`, checked.

    Args:
        folder: see `table_folder`.
        wanted: the settings it must have been measured with, such as `table_settings`.
        names, shapes: of `model.trainable_variables`, in their order.
        graph: the network's `graph_digest`.
        remake_command: makes the table; part of error messages.
        allow_stale: only warn of a table of another graph, or from another machine or TensorFlow.

    Raises:
        UserError: there is none, it cannot be read, or it was measured for another network or on another machine.
    """
    if not (folder / "profile.json").is_file() or not (folder / "table.csv").is_file():
        raise UserError(f"no timing table in {folder}; make it with: {remake_command}")
    advice = f"make it again: {remake_command}"
    try:
        record = read_profile(folder)
        settings = {key: record.pop(key, None) for key in wanted}
        others = [f"--{key} {was}, not {wanted[key]}" for key, was in settings.items() if was != wanted[key]]
        if others:
            raise UserError(f"{folder}: measured with {'; '.join(others)}")
        rows = _read_rows(folder / "table.csv")
        _check_tensors(rows, dict(zip(names, shapes, strict=True)), folder)
    except UserError as error:
        raise UserError(f"{error}; {advice}") from error
    table = _table_of(rows, record, settings, names)
    why = _not_of(table, graph)
    if why and not allow_stale:
        raise UserError(f"{folder}: {why}; {advice}; or use it anyway with --allow_stale_profile")
    if why:
        print(f"warning: {folder}: {why}; used anyway (--allow_stale_profile)")
    return table


def read_profile(folder: Path) -> dict[str, Any]:
    """The profile.json of the timing table in `folder`. Raises `UserError` if it is damaged."""
    from elastic_trainer.timing.table_schema import Profile

    with reading(folder / "profile.json"):
        content = (folder / "profile.json").read_bytes()
        return Profile.model_validate_json(content).model_dump(exclude_unset=True)


def _read_rows(path: Path) -> list[Row]:
    """The rows of a table.csv, in backward order. Raises `UserError` if it is damaged."""
    from elastic_trainer.timing.table_schema import Rows

    with reading(path), path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        table = Rows.model_validate({f"line {reader.line_num}": row for row in reader})
    return sorted(table.root.values(), key=lambda row: row.order)


def _table_of(
    rows: Sequence[Row], record: dict[str, Any], settings: dict[str, Any], names: Sequence[str]
) -> TimingTable:
    """The table of these rows and of a profile.json that holds `record` and `settings`."""
    places = {row.name: place for place, row in enumerate(rows)}
    return TimingTable(
        names=[row.name for row in rows],
        shapes=[row.dimensions for row in rows],
        positions=np.array([list(names).index(row.name) for row in rows]),
        t_dw_ms=np.array([row.t_dw_ms for row in rows]),
        t_dy_ms=np.array([row.t_dy_ms for row in rows]),
        t_fw_ms=np.array([row.t_fw_ms for row in rows]),
        kernels=np.array([places.get(row.kernel, -1) for row in rows]),
        features_mb=np.array([row.features_mb for row in rows]),
        preprocessing_ms=record.pop("preprocessing_ms"),
        forward_ms=record.pop("forward_ms"),
        full_step_ms=record.pop("full_step_ms"),
        gradient_pass_ms=record.pop("gradient_pass_ms"),
        fit=Fit(**record.pop("fit")),
        settings=settings,
        details=record,
    )


def _check_tensors(rows: Sequence[Row], shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raise `UserError` unless the rows are those of the network whose tensors have these `shapes`, by name."""
    for row in rows:
        if row.name not in shapes:
            raise UserError(f"{folder}: not the timing table of this network, which has no tensor {row.name}")
        if row.dimensions != shapes[row.name]:
            raise UserError(f"{folder}: holds {row.name} with shape {row.dimensions}, not {shapes[row.name]}")
    if len(rows) != len(shapes):
        raise UserError(f"{folder}: holds {len(rows)} of this network's {len(shapes)} tensors")


def _not_of(table: TimingTable, graph: str) -> str | None:
    """Why a table of the same tensors is not that of a network with this `graph` here, or None if it is."""
    differences = stale_since(table.details.get("environment"), environment())
    if differences:
        return f"profiled on a different setup: {'; '.join(differences)}"
    if table.details.get("graph_digest") != graph:
        return "profiled with other operations: a layer of the network has changed, such as its stride or activation"
    return None


def stale_since(was: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """What differs, in words, between the environment a table was made in and that of now, as far as it matters.

    Args:
        was, now: `machine.environment()`. What the older of the two did not record is not compared.
    """
    if was is None:
        return ["no machine recorded"]
    places = [{**place, **dict(place.get("packages") or {})} for place in (was, now)]
    pairs = {name: [place.get(key) for place in places] for key, name in _ORIGIN.items()}
    return [
        f"{name} {_shown(old)}, here {_shown(new)}"
        for name, (old, new) in pairs.items()
        if old is not None and new is not None and old != new
    ]


def _shown(value: Any) -> str:
    """A recorded value in one piece of text."""
    if isinstance(value, dict):
        return " ".join(f"{name}={setting}" for name, setting in value.items()) or "unset"
    return str(value) or "unknown"
