"""What training may take of the memory of this process, and how a batch is divided to stay within it.

The paper does not cover memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import has_gpu, release_memory
from elastic_trainer.system.memory import free_memory_mb, resident_memory_mb

MEMORY_SHARE = 0.98  # of what there is, for selections: a traced step may take a little more than its depth says
NOTHING_FITS = "no batch fits; choose a smaller --input_size or network"
SPARE_FACTOR = 1.02  # of a named limit: what a process takes before it trains varies

Needed = Callable[[int, int], float]  # MB that training takes, by the size of a batch and of its parts at most


def part_rows(batch_size: int, micro_batch: int | None) -> int:
    """Examples of each part of a batch: the largest divisor of its size that is at most `micro_batch`; None: all."""
    return next(rows for rows in range(min(micro_batch or batch_size, batch_size), 0, -1) if batch_size % rows == 0)


class StepMemory(NamedTuple):
    """MB that training takes beyond what the process has before; entry k - 1 of arrays [N] is of depth k.

    Attributes:
        rows: examples of the step that was traced.
        fixed_mb: with any batch.
        by_rows_mb: what those examples take.
        sums_mb: sums of gradients and the operations that add them up, where a batch is taken in parts.
    """

    rows: int
    fixed_mb: np.ndarray
    by_rows_mb: np.ndarray
    sums_mb: np.ndarray

    def needed_mb(self, batch_size: int, micro_batch: int | None = None) -> np.ndarray:
        """MB [N] of training on batches of this size, in parts of at most `micro_batch` examples."""
        rows = part_rows(batch_size, micro_batch)
        return self.fixed_mb + self.by_rows_mb * rows / self.rows + self.sums_mb * (rows < batch_size)

    def to_record(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return {name: np.asarray(value).tolist() for name, value in self._asdict().items()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StepMemory:
        """What `to_record` returned."""
        return cls(record["rows"], *(np.array(record[name]) for name in cls._fields[1:]))


class MemoryBudget:
    """The memory of the process while it trains: what it takes before, and the room that a limit leaves.

    Args:
        limit_mb: what the process may take in all, resident; None: what the machine has. As an attribute, infinity.

    Raises:
        UserError: a limit is given and nothing here can keep to one.
    """

    def __init__(self, limit_mb: float | None = None) -> None:
        if limit_mb is not None and not _is_reported():
            raise UserError("--memory: needs a system that reports the memory of a process, and no GPU; leave it out")
        self.limit_mb = inf if limit_mb is None else limit_mb
        self._start_mb: float | None = None

    @property
    def has_limit(self) -> bool:
        """Whether there is another limit than the machine's."""
        return self.limit_mb < inf

    @property
    def total_mb(self) -> float:
        """What the process may take in all; infinity where memory is not reported, or that of a GPU."""
        return min(self.limit_mb, _reachable_mb()) if _is_reported() else inf

    @property
    def start_mb(self) -> float | None:
        """What the process takes before it trains, or now until `start`; None if the system does not report it."""
        return resident_memory_mb() if self._start_mb is None else self._start_mb

    @property
    def room_mb(self) -> float:
        """What training may take."""
        return self.total_mb - (self.start_mb or 0.0)

    @property
    def left_mb(self) -> float:
        """What the process may take now, beyond what it has."""
        return self.total_mb - (resident_memory_mb() or 0.0)

    def start(self) -> None:
        """Training starts now: the process has taken what it takes before."""
        release_memory()  # of what was traced and measured: training takes it again
        self._start_mb = resident_memory_mb()

    def needed_mb(self, training_mb: float) -> float:
        """What the process takes in all where training takes `training_mb`."""
        return (self.start_mb or 0.0) + training_mb

    def fits(self, training_mb: float) -> bool:
        """Whether training may take `training_mb`."""
        return training_mb <= self.room_mb

    def deepest(self, needed_mb: np.ndarray) -> int:
        """How many of the depths fit whose training takes `needed_mb` [N], ascending, with a little to spare."""
        return int((needed_mb <= MEMORY_SHARE * self.total_mb - (self.start_mb or 0.0)).sum())

    def fitting_size(self, needed: Callable[[int], float], batch_size: int) -> int | None:
        """The largest of a batch, its half, quarter, … that fits, or None; `needed` is MB by its size."""
        sizes = [batch_size >> k for k in range(batch_size.bit_length())]
        return next((size for size in sizes if self.fits(needed(size))), None)

    def refuse(
        self,
        what: str,
        needed: Needed,
        batch_size: int,
        micro_batch: int | None = None,
        can_split: bool = False,
        others: Iterable[str] = (),
        beside: str = "",
    ) -> UserError:
        """The error for `what`, in words, which takes more than there is. It names what fits.

        Args:
            needed: of `what`, by the size of a batch and of its parts.
            can_split: whether a batch can be taken in (smaller) parts.
            others: flags that fit as well.
            beside: words for what a larger limit must hold, too.
        """
        rows = part_rows(batch_size, micro_batch)
        needed_mb, fits = needed(batch_size, rows), list[str]()
        part = self.fitting_size(lambda size: needed(batch_size, size), rows) if can_split else None
        fits += [f"--micro_batch {part}"] if part else []
        size = self.fitting_size(lambda size: needed(size, rows), batch_size)
        fits += [f"--batch_size {size}"] if size else []
        if self.has_limit and self.needed_mb(needed_mb) <= _reachable_mb():
            fits.append(f"--memory {math.ceil(SPARE_FACTOR * self.needed_mb(needed_mb) / 10) * 10}M{beside}")
        fits += others
        advice = f"what fits: {', or '.join(fits)}" if fits else NOTHING_FITS
        taken = f" (limit {self.limit_mb:,.0f} MB, taken {self.start_mb or 0.0:,.0f} MB)" if self.has_limit else ""
        return UserError(
            f"memory: {what} takes about {needed_mb:,.0f} MB more, and {max(self.room_mb, 0):,.0f} MB are available"
            f"{taken}; {advice}"
        )


def _is_reported() -> bool:
    """Whether the system reports the memory that training takes; not of a GPU, which has its own."""
    return free_memory_mb() is not None and not has_gpu()


def _reachable_mb() -> float:
    """What this process has and can still take."""
    return (resident_memory_mb() or 0.0) + (free_memory_mb() or 0.0)
