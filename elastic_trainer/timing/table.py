"""The timing table: what each tensor of a network costs, how that adds up to the time of a step, and its file.

`profiler.py` makes it; the time budget asks it what a selection will take. A table is kept in
logs/profiles/<model>_<input>_<classes>_<batch>/ as table.csv (a row a tensor) and profile.json (everything else).
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.files import read_json, reading, write_csv, write_json
from elastic_trainer.machine import environment
from elastic_trainer.memory.costs import MemoryCosts
from elastic_trainer.memory.step_memory import MemoryPeaks
from elastic_trainer.networks.names import model_label
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing.fit import Fit, depth_of, selection_sums, with_kernels
from elastic_trainer.timing.forward_costs import ForwardCosts, forward_costs, forward_sums

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


class StepPrediction(NamedTuple):
    """Wall time of a step by the table, in ms.

    Attributes:
        step_ms: of the step itself.
        making_ms: of computing the features that it runs on, as far as they are missing, per step of their use.
        uses_features: whether it runs on cached features; else it computes the prefix.
    """

    step_ms: float
    making_ms: float
    uses_features: bool


@dataclass(frozen=True)
class TimingTable:
    """What each tensor costs; arrays [N] in backward order (index 0 next to the output), times in ms.

    Attributes:
        names, shapes: of the tensors.
        positions: index into `model.trainable_variables`.
        t_dw_ms, t_dy_ms, t_fw_ms: operation times, see `timing.attribution`, each operation with `fit.untraced_ms`;
            preprocessing_ms as well.
        kernels, features_mb: see `timing.attribution`.
        forward_ms, full_step_ms: measured wall times.
        gradient_pass_ms: measured wall time of all gradients without an update.
        fit: from operation times to wall time.
        settings: that it was measured with, such as those in `TABLE_SETTINGS`.
        details: further measurements, kept in profile.json.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    positions: np.ndarray
    t_dw_ms: np.ndarray
    t_dy_ms: np.ndarray
    t_fw_ms: np.ndarray
    kernels: np.ndarray
    features_mb: np.ndarray
    preprocessing_ms: float
    forward_ms: float
    full_step_ms: float
    gradient_pass_ms: float
    fit: Fit
    settings: dict[str, Any]
    details: dict[str, Any]

    def wall_t_dy_ms(self, misses: float = 1.0) -> np.ndarray:
        """Wall time [N] that going one tensor deeper adds to a step: to pass the error on, and forward."""
        costs = self.forward_costs(misses)
        return self.fit.t_dy_factor * self.t_dy_ms + np.diff(np.maximum.accumulate(costs.step_ms + costs.making_ms))

    @property
    def wall_t_dw_ms(self) -> np.ndarray:
        """Wall time [N] that training each tensor adds to a step."""
        return self.fit.t_dw_factor * self.t_dw_ms

    @property
    def compiling_ms(self) -> float | None:
        """Mean wall time of compiling a step, and that from features, first calls included; None: not measured."""
        return self.details.get("compiling_ms")

    @property
    def plain_over_full(self) -> float:
        """A step of Keras' own `fit` over a full step here, which folds batch norm; 1 where it was not measured."""
        return (self.details.get("plain_step_ms") or self.full_step_ms) / self.full_step_ms

    @property
    def _tensors_mb(self) -> np.ndarray:
        """MB [N] of the tensors in float32."""
        return np.array([4e-6 * prod(shape) for shape in self.shapes])

    def tensors_mb(self, mask: np.ndarray) -> float:
        """MB of `mask`'s tensors in float32; the sums of their gradients over parts of a batch take as much."""
        return float(self._tensors_mb[mask[self.positions]].sum())

    @cached_property
    def memory(self) -> MemoryCosts | None:
        """What the tensors cost in memory, at the batch size of the table; None in tables of earlier versions."""
        record = self.details.get("memory")
        return None if record is None else MemoryCosts.from_record(record)

    @property
    def peaks(self) -> MemoryPeaks | None:
        """What was measured of the memory of steps; None in tables that no process was started for."""
        record = self.details.get("memory_peaks")
        return None if record is None else MemoryPeaks(**record)

    def predict_mb(self, mask: np.ndarray, kept_batches: float = 0.0) -> float:
        """MB that training `mask`, bool [N] over `model.trainable_variables`, takes (`memory.costs`).

        Args:
            mask: what trains.
            kept_batches: of so many batches features are kept; 0 if the steps do not start from features.

        Raises:
            UserError: the table does not know.
        """
        if self.memory is None:
            raise UserError("--memory: the timing table does not contain what tensors cost in memory; profile again")
        features_mb = 0.0
        if kept_batches:
            features_mb = kept_batches * float(self.features_mb[self.depth(mask) - 1]) + self.memory.two_parts_mb
        return self.memory.predict(mask[self.positions]) + features_mb

    def parts_mb(self, mask: np.ndarray) -> tuple[float, float]:
        """Of `predict_mb`: what training `mask` takes whatever the batch, and what the examples of a batch take."""
        assert self.memory is not None, "the table does not contain what tensors cost in memory"
        whatever_mb = self.memory.whatever_mb(mask[self.positions])
        return whatever_mb, max(self.predict_mb(mask) - whatever_mb, 0.0)

    def in_parts(self, count: int) -> TimingTable:
        """The table of steps on `count` times as many examples, in parts like those that this one is of.

        Each part takes as long as a step, which is a little too much: the weights are updated once. Sums of gradients
        take memory.
        """
        if count == 1:
            return self
        names = ("t_dw_ms", "t_dy_ms", "t_fw_ms", "features_mb", "preprocessing_ms", "forward_ms")
        scaled = {name: count * getattr(self, name) for name in (*names, "full_step_ms", "gradient_pass_ms")}
        details = {**self.details}
        if self.memory is not None:
            details["memory"] = self.memory._replace(own_mb=self.memory.own_mb + self._tensors_mb).to_record()
        if "plain_step_ms" in details:
            details["plain_step_ms"] *= count
        fit = replace(self.fit, constant_ms=count * self.fit.constant_ms)
        return replace(self, **scaled, fit=fit, details=details)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise `UserError` unless `shapes`, those of `model.trainable_variables`, are the tensors of this table."""
        in_order = [shapes[k] for k in self.positions if k < len(shapes)]
        if len(shapes) != len(self.shapes) or [*map(tuple, self.shapes)] != in_order:
            raise UserError("the timing table is of another network; measure it again, as with elastic_trainer.profile")

    def with_kernels(self, mask: np.ndarray) -> np.ndarray:
        """Bool [N] `mask` over `model.trainable_variables`, without folded gammas whose kernel is not in it."""
        kept = mask.copy()
        kept[self.positions] = with_kernels(mask[self.positions], self.kernels)
        return kept

    def upper_parts(self, head: np.ndarray) -> Iterator[np.ndarray]:
        """Bool [N] as `head`, one after the other: it and the upper part down to each tensor, the deepest last."""
        upper = head.copy()
        for position in self.positions:
            upper[position] = True
            yield self.with_kernels(upper) | head

    def forward_costs(self, misses: float = 1.0) -> ForwardCosts:
        """What the forward pass costs a step, by the depth of its selection; `misses` as in `timing.forward_costs`."""
        recomputed_ms, prefix_ms = forward_sums(self.t_fw_ms, self.preprocessing_ms)
        features_mb = np.concatenate([[0.0], self.features_mb])
        return forward_costs(
            self.fit.t_fw_factor * recomputed_ms,
            self.fit.t_fw_factor * prefix_ms,
            self.fit.reading_factor * features_mb,
            self.fit.writing_factor * features_mb,
            misses,
        )

    def depth(self, mask: np.ndarray) -> int:
        """How many tensors of the backward order a step that trains `mask` (as for `predict`) reaches back to."""
        return depth_of(mask[self.positions])

    def predict(self, mask: np.ndarray, misses: float = 1.0) -> StepPrediction:
        """The step that trains `mask`, bool [N] over `model.trainable_variables`, in its cheaper form."""
        t_dy_ms, t_dw_ms = selection_sums(mask[self.positions], self.t_dy_ms, self.t_dw_ms)
        backward_ms = self.fit.t_dy_factor * t_dy_ms + self.fit.t_dw_factor * t_dw_ms
        step_ms, making_ms, is_cached = (costs[self.depth(mask)] for costs in self.forward_costs(misses))
        step_ms += self.fit.constant_ms + backward_ms
        return StepPrediction(float(step_ms), float(making_ms), bool(is_cached))

    def predict_ms(self, mask: np.ndarray, misses: float = 1.0) -> float:
        """Wall time of that step, with what making its features costs."""
        prediction = self.predict(mask, misses)
        return prediction.step_ms + prediction.making_ms

    def digest(self) -> str:
        """Differs between tables with different times."""
        single = [self.preprocessing_ms, self.full_step_ms, self.gradient_pass_ms]
        times = np.concatenate([self.t_dy_ms, self.t_dw_ms, self.t_fw_ms, self.features_mb, single])
        return hashlib.sha256(times.tobytes() + repr(self.fit).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write table.csv and profile.json into `folder`; one is never left beside the other of an older table."""
        (folder / "profile.json").unlink(missing_ok=True)
        times = np.stack([self.t_dw_ms, self.t_dy_ms, self.t_fw_ms], axis=1)
        kernels = ["" if kernel < 0 else self.names[kernel] for kernel in self.kernels]
        rows = zip(self.names, self.shapes, times, kernels, self.features_mb, strict=True)
        write_csv(
            folder / "table.csv",
            ("name", "shape", "order", "t_dw_ms", "t_dy_ms", "t_fw_ms", "kernel", "features_mb"),
            (
                (name, "x".join(map(str, shape)), order, *(f"{ms:.6f}" for ms in row), kernel, f"{megabytes:.6f}")
                for order, (name, shape, row, kernel, megabytes) in enumerate(rows)
            ),
        )
        record = {
            **self.settings,
            "forward_ms": self.forward_ms,
            "preprocessing_ms": self.preprocessing_ms,
            "backward_ms": self.full_step_ms - self.forward_ms,
            "full_step_ms": self.full_step_ms,
            "gradient_pass_ms": self.gradient_pass_ms,
            "fit": asdict(self.fit),
            **self.details,
        }
        write_json(folder / "profile.json", record)


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

    return read_json(folder / "profile.json", Profile)


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
