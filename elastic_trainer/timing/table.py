"""The timing table: what each tensor of a network costs, how that adds up to the time of a step, and its file.

`profiler.py` measures it; `train.py` asks it what a selection will take. A table is kept in
logs/profiles/<model>_<input>_<classes>_<batch>/ as table.csv (a row a tensor) and profile.json (everything else).
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import utils
from elastic_trainer.cli import options
from elastic_trainer.machine import environment
from elastic_trainer.timing.fit import Fit, chain_and_own
from utils import UserError

if TYPE_CHECKING:
    import argparse

# What a table depends on beside the network: keys of `environment()` and their names in messages.
_ORIGIN = {
    "tensorflow": "TensorFlow",
    "machine": "machine",
    "processor": "processor",
    "cores": "cores",
    "usable_cores": "usable cores",
    "thread_settings": "thread settings",
    "system": "system",
}
# The options that a table is made for; it is of no use for others.
TABLE_SETTINGS = (
    "model_name",
    "alpha",
    "input_size",
    "num_classes",
    "batch_size",
    "optimizer",
    "augment",
    "mixed_precision",
)


@dataclass(frozen=True)
class TimingTable:
    """What each tensor costs; arrays [N] in backward order (index 0 next to the output), times in ms.

    Attributes:
        names, shapes: of the tensors.
        positions: index into `model.trainable_variables`.
        t_dw_ms, t_dy_ms: operation times, see the module's header.
        forward_ms, full_step_ms: measured wall times.
        gradient_pass_ms: wall time of all gradients without an update; full_step_ms less what the fit gives updates.
        fit: from operation times to wall time.
        settings: the options in `TABLE_SETTINGS` that it was measured with.
        details: further measurements, kept in profile.json.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    positions: np.ndarray
    t_dw_ms: np.ndarray
    t_dy_ms: np.ndarray
    forward_ms: float
    full_step_ms: float
    gradient_pass_ms: float
    fit: Fit
    settings: dict[str, Any]
    details: dict[str, Any]

    @property
    def chain_ms(self) -> np.ndarray:
        """Wall time [N] that passing the error on past each tensor adds to a step."""
        return self.fit.chain_factor * self.t_dy_ms

    @property
    def own_ms(self) -> np.ndarray:
        """Wall time [N] that training each tensor adds to a step."""
        return self.fit.own_factor * self.t_dw_ms

    def predict_ms(self, mask: np.ndarray) -> float:
        """Wall time of a step that trains `mask`, bool [N] over `model.trainable_variables`."""
        chain, own = chain_and_own(mask[self.positions], self.t_dy_ms, self.t_dw_ms)
        return self.fit.constant_ms + self.fit.chain_factor * chain + self.fit.own_factor * own

    def digest(self) -> str:
        """Tells tables with different times apart."""
        times = np.concatenate([self.t_dy_ms, self.t_dw_ms, [self.full_step_ms, self.gradient_pass_ms]])
        return hashlib.sha256(times.tobytes() + repr(self.fit).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write table.csv and profile.json into `folder`; one is never left beside the other of an older table."""
        (folder / "profile.json").unlink(missing_ok=True)
        rows = zip(self.names, self.shapes, range(len(self.names)), self.t_dw_ms, self.t_dy_ms, strict=True)
        utils.write_csv(
            folder / "table.csv",
            ("name", "shape", "order", "t_dw_ms", "t_dy_ms"),
            ((name, "x".join(map(str, shape)), order, f"{dw:.6f}", f"{dy:.6f}") for name, shape, order, dw, dy in rows),
        )
        record = {
            **self.settings,
            "forward_ms": self.forward_ms,
            "backward_ms": self.full_step_ms - self.forward_ms,
            "full_step_ms": self.full_step_ms,
            "gradient_pass_ms": self.gradient_pass_ms,
            "fit": asdict(self.fit),
            **self.details,
        }
        utils.write_json(folder / "profile.json", record)


def table_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Those options that a table is made for."""
    return {key: getattr(args, key) for key in TABLE_SETTINGS}


def table_folder(args: argparse.Namespace) -> Path:
    """Where the timing table of these options is kept."""
    name = f"{options.model_label(args)}_{args.input_size}_{args.num_classes}_{args.batch_size}"
    trace = getattr(args, "from_trace", None)
    device = f"_from_{trace.name.removesuffix('.pb').removesuffix('.xplane')}" if trace else ""  # never this machine's
    return args.logdir / "profiles" / (name + device)


def load_table(args: argparse.Namespace, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> TimingTable:
    """The timing table for a network whose trainable tensors have these `names` and `shapes`, in their order.

    With `args.allow_stale_profile` one from another machine or TensorFlow is taken too, with a warning; not one of
    another network.

    Raises:
        UserError: there is none, it cannot be read, or it was measured for another network or elsewhere.
    """
    folder = table_folder(args)
    command = options.profiler_command(args)
    if not (folder / "profile.json").is_file() or not (folder / "table.csv").is_file():
        raise UserError(f"no timing table in {folder}; make it with: {command}")
    anew = f"make it anew: {command}"
    try:
        record = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
        settings = {key: record.pop(key) for key in TABLE_SETTINGS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: not a timing table ({error}); {anew}") from error
    others = [f"--{key} {was}, not {getattr(args, key)}" for key, was in settings.items() if was != getattr(args, key)]
    if others:
        raise UserError(f"{folder}: measured with {'; '.join(others)}; {anew}")
    try:
        with (folder / "table.csv").open(newline="", encoding="utf-8") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: int(row["order"]))
        table = TimingTable(
            names=[row["name"] for row in rows],
            shapes=[tuple(int(n) for n in row["shape"].split("x") if n) for row in rows],
            positions=np.array([list(names).index(row["name"]) for row in rows]),
            t_dw_ms=np.array([float(row["t_dw_ms"]) for row in rows]),
            t_dy_ms=np.array([float(row["t_dy_ms"]) for row in rows]),
            forward_ms=record.pop("forward_ms"),
            full_step_ms=record.pop("full_step_ms"),
            gradient_pass_ms=record.pop("gradient_pass_ms"),
            fit=Fit(**record.pop("fit")),
            settings=settings,
            details=record,
        )
        walls = [table.full_step_ms, table.gradient_pass_ms]
        known = [float(value) for value in (*walls, *asdict(table.fit).values()) if value is not None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: not the timing table of this network ({error}); {anew}") from error
    costs = np.concatenate([table.t_dw_ms, table.t_dy_ms, known])
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        raise UserError(f"{folder}: holds times that are negative or no numbers; {anew}")
    if len(rows) != len(names):
        raise UserError(f"{folder}: holds {len(rows)} of this network's {len(names)} tensors; {anew}")
    for name, shape, position in zip(table.names, table.shapes, table.positions, strict=True):
        if shape != shapes[position]:
            raise UserError(f"{folder}: holds {name} with shape {shape}, not {shapes[position]}; {anew}")
    if not getattr(args, "from_trace", None):  # a board's table is of another machine by intent
        _check_origin(table, folder, getattr(args, "allow_stale_profile", False), anew)
    return table


def _check_origin(table: TimingTable, folder: Path, allow_stale: bool, anew: str) -> None:
    """Refuse, or with `allow_stale` only warn of, a table that was not made on this machine with this TensorFlow."""
    differences = stale_since(table.details.get("environment"), environment())
    if not differences:
        return
    text = f"{folder}: made elsewhere: {'; '.join(differences)}"
    if not allow_stale:
        raise UserError(f"{text}; {anew}; or use it all the same with --allow_stale_profile")
    print(f"warning: {text}; used all the same (--allow_stale_profile)")


def stale_since(was: Any, now: dict[str, Any]) -> list[str]:
    """What differs, in words, of the places a table depends on: `environment()` when it was made, and now.

    What the older of the two did not record is not compared.
    """
    if not isinstance(was, dict):
        return ["it does not say on what machine"]
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
