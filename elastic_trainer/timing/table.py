"""The timing table: what each tensor of a network costs, and how that adds up to the time of a step.

`profiler.py` makes it; the time budget asks it what a selection will take.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.memory.costs import MemoryCosts
from elastic_trainer.memory.step_memory import MemoryPeaks
from elastic_trainer.timing.fit import Fit, depth_of, selection_sums, with_kernels
from elastic_trainer.timing.forward_costs import ForwardCosts, forward_costs, forward_sums

# Median error of a fit, and share of a step that operations take by their trace but nothing by the fit, from which its
# predictions are not relied on.
MAX_ERROR, MAX_FREE = 0.15, 0.15


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
        settings: that it was measured with, such as those in `table_file.TABLE_SETTINGS`.
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
    def doubt(self) -> str | None:
        """Why predictions are not to be relied on, such as after measuring on a busy machine; None if they are."""
        error, free = (self.fit.median_error_percent or 0.0) / 100, MAX_FREE * self.full_step_ms
        if error > MAX_ERROR:
            return f"it predicts measured steps with a median error of {error:.0%}"
        parts = (
            ("passing the error on", self.fit.t_dy_factor, self.t_dy_ms),
            ("computing weight gradients", self.fit.t_dw_factor, self.t_dw_ms),
            ("the forward pass", self.fit.t_fw_factor, self.t_fw_ms),
        )
        ignored = [name for name, factor, times_ms in parts if not factor and times_ms.sum() > free]
        return f"{ignored[0]} takes no time by it" if ignored else None

    def warning(self, then: str) -> str:
        """A line on its doubt; `then` is what follows from it, in words."""
        return f"the timing table is unreliable: {self.doubt}; {then}"

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
