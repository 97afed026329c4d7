"""The timing table: what each tensor of a network costs, and how that adds up to a step.

It is measured or estimated (`profiling`), and `table_file` keeps it. The time budget asks it what a selection takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory_budget import StepMemory
from elastic_trainer.timing.fit import Fit, depth_of, forward_sums, selection_sums, with_kernels

TIMES = ("preprocessing_ms", "full_step_ms", "gradient_pass_ms")  # fields that scale with the device


class StepPrediction(NamedTuple):
    """Wall time of a step by the table, and of computing missing features per step of their use, in ms."""

    step_ms: float
    caching_ms: float
    uses_features: bool  # else it computes the prefix


class ForwardCosts(NamedTuple):
    """The same of the forward pass alone, [N+1] by the depth of what trains."""

    step_ms: np.ndarray
    caching_ms: np.ndarray
    uses_features: np.ndarray


@dataclass(frozen=True)
class TimingTable:
    """What each tensor costs; arrays [N] in backward order (index 0 next to the output), times in ms.

    A mask is bool [N] over `model.trainable_variables`; `misses` as in `timing.fit`.

    Attributes:
        positions: index into `model.trainable_variables`.
        t_dw_ms, t_dy_ms, t_fw_ms, preprocessing_ms: times of operations, each with `fit.untraced_ms`, and kernels,
            features_mb: see `timing.attribution`.
        full_step_ms, gradient_pass_ms: measured wall times; the latter of all gradients without an update.
        fit: from operation times to wall time.
        memory: what steps take in memory, by depth; None: unknown.
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
    full_step_ms: float
    gradient_pass_ms: float
    fit: Fit
    memory: StepMemory | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def wall_t_dy_ms(self, misses: float = 1.0) -> np.ndarray:
        """Wall time [N] that going one tensor deeper adds to a step: to pass the error on, and forward."""
        costs = self.forward_costs(misses)
        return self.fit.t_dy_factor * self.t_dy_ms + np.diff(np.maximum.accumulate(costs.step_ms + costs.caching_ms))

    @property
    def wall_t_dw_ms(self) -> np.ndarray:
        """Wall time [N] that training each tensor adds to a step."""
        return self.fit.t_dw_factor * self.t_dw_ms

    def forward_costs(self, misses: float = 1.0) -> ForwardCosts:
        """What the forward pass costs a step in the cheaper way to each depth."""
        recomputed_ms, prefix_ms = (
            self.fit.t_fw_factor * ms for ms in forward_sums(self.t_fw_ms, self.preprocessing_ms)
        )
        copying_ms = self.fit.copying_factor * np.concatenate([[0.0], self.features_mb])
        cached_ms, caching_ms = recomputed_ms + copying_ms, misses * (prefix_ms + copying_ms)
        # Behind the last tensor is preprocessing alone, which is not cached by itself.
        is_cached = (prefix_ms > prefix_ms[-1]) & (cached_ms + caching_ms <= recomputed_ms + prefix_ms) & (misses < 1)
        step_ms = np.where(is_cached, cached_ms, recomputed_ms + prefix_ms)
        return ForwardCosts(step_ms, np.where(is_cached, caching_ms, 0.0), is_cached)

    def depth(self, mask: np.ndarray) -> int:
        """How many tensors of the backward order a step that trains `mask` reaches back to."""
        return depth_of(mask[self.positions])

    def predict(self, mask: np.ndarray, misses: float = 1.0) -> StepPrediction:
        """The step that trains `mask`, in its cheaper form."""
        t_dy_ms, t_dw_ms = selection_sums(mask[self.positions], self.t_dy_ms, self.t_dw_ms)
        backward_ms = self.fit.t_dy_factor * t_dy_ms + self.fit.t_dw_factor * t_dw_ms
        step_ms, caching_ms, is_cached = (costs[self.depth(mask)] for costs in self.forward_costs(misses))
        step_ms += self.fit.constant_ms + backward_ms
        return StepPrediction(float(step_ms), float(caching_ms), bool(is_cached))

    def predict_ms(self, mask: np.ndarray, misses: float = 1.0) -> float:
        """Wall time of that step, with caching its features."""
        prediction = self.predict(mask, misses)
        return prediction.step_ms + prediction.caching_ms

    @property
    def is_estimate(self) -> bool:
        """Whether it follows from FLOPs and bytes alone: shares of a step, in a unit that is not this device's."""
        return bool(self.details.get("is_estimate"))

    def scaled(self, factor: float) -> TimingTable:
        """The table of a device on which a step takes `factor` times as long."""
        return replace(
            self,
            **{name: factor * getattr(self, name) for name in (*TIMES, "t_dw_ms", "t_dy_ms", "t_fw_ms")},
            fit=replace(self.fit, constant_ms=factor * self.fit.constant_ms),
        )

    def in_parts(self, count: int) -> TimingTable:
        """The table of steps on `count` times as many examples, in parts like those that this one is of.

        Each part takes as long as a step, which is a little too much: the weights are updated once.
        """
        return self if count == 1 else replace(self.scaled(count), features_mb=count * self.features_mb)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise `UserError` unless `shapes`, those of `model.trainable_variables`, are the tensors of this table."""
        if len(shapes) != len(self.shapes) or self.shapes != [shapes[k] for k in self.positions]:
            raise UserError("the timing table is of another network; measure it again, as with elastic_trainer.profile")

    def with_kernels(self, mask: np.ndarray) -> np.ndarray:
        """`mask` without folded gammas whose kernel is not in it."""
        kept = mask.copy()
        kept[self.positions] = with_kernels(mask[self.positions], self.kernels)
        return kept

    def upper_parts(self, head: np.ndarray) -> Iterator[np.ndarray]:
        """Masks, one after the other: `head` and the upper part down to each tensor, the deepest last."""
        upper = head.copy()
        for position in self.positions:
            upper[position] = True
            yield self.with_kernels(upper) | head

    def digest(self) -> str:
        """Differs between tables with different times."""
        single = [self.preprocessing_ms, self.full_step_ms, self.gradient_pass_ms]
        times = np.concatenate([self.t_dy_ms, self.t_dw_ms, self.t_fw_ms, self.features_mb, single])
        return hashlib.sha256(times.tobytes() + repr(self.fit).encode()).hexdigest()[:16]


def sharpened(table: TimingTable, mask: np.ndarray, step_ms: float) -> TimingTable:
    """`table`, corrected by the measured time of steps that train `mask`, bool [N] over `model.trainable_variables`.

    All that such a step computes is scaled to `step_ms`, and all that a full step computes besides to the rest of what
    it takes. Where a step is not shorter than a full one, or computes all of it, the table says nothing that is wrong.
    """
    everything = np.ones(len(table.names), bool)
    predicted_ms, full_ms = table.predict_ms(mask), table.predict_ms(everything)
    if not predicted_ms < full_ms or not 0 < step_ms < full_ms:
        return table
    inside, outside = step_ms / predicted_ms, (full_ms - step_ms) / (full_ms - predicted_ms)
    selected, is_passed = mask[table.positions], np.arange(len(mask)) < table.depth(mask)
    return replace(
        table,
        t_dw_ms=table.t_dw_ms * np.where(selected, inside, outside),
        t_dy_ms=table.t_dy_ms * np.where(is_passed, inside, outside),
        **{name: inside * getattr(table, name) for name in ("t_fw_ms", "preprocessing_ms")},
        fit=replace(table.fit, constant_ms=inside * table.fit.constant_ms),
    )
