"""The memory budget: what the process may take while it trains, what it takes already, and what fits.

    start   what the process takes before it trains
    needed  start, and what training takes
    room    the limit, or what the machine has, without start

The paper does not cover memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from math import inf

import numpy as np

from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import available_memory_mb, has_gpu, reachable_memory_mb, release_memory
from elastic_trainer.system.memory import resident_memory_mb

MEMORY_SHARE = 0.98  # of what there is, for selections: a traced step may take a little more than its depth says
NOTHING_FITS = "no batch fits; choose a smaller --input_size or network"
SPARE_FACTOR = 1.02  # of a named limit: what a process takes before it trains varies

Needed = Callable[[int, int], float]  # MB that training takes, by the size of a batch and of its parts at most


class MemoryBudget:
    """The memory of the process while it trains.

    Args:
        limit_mb: what the process may take in all, resident; None: what the machine has. As an attribute, infinity.
        start_mb: what it takes before it trains; None: what it takes at the time.

    Raises:
        UserError: a limit is given and nothing here can keep to one.
    """

    def __init__(self, limit_mb: float | None = None, start_mb: float | None = None) -> None:
        if limit_mb is not None and not _is_reported():
            raise UserError("--memory: needs a system that reports the memory of a process, and no GPU; leave it out")
        self.limit_mb = inf if limit_mb is None else limit_mb
        self._start_mb = start_mb

    @property
    def has_limit(self) -> bool:
        """Whether there is another limit than the machine's."""
        return self.limit_mb < inf

    @property
    def total_mb(self) -> float:
        """What the process may take in all; infinity where memory is not reported, or that of a GPU."""
        return min(self.limit_mb, reachable_memory_mb()) if _is_reported() else inf

    @property
    def start_mb(self) -> float | None:
        """What the process takes before it trains; None if the system does not report it."""
        return resident_memory_mb() if self._start_mb is None else self._start_mb

    @property
    def room_mb(self) -> float:
        """What training may take."""
        return self.total_mb - (self.start_mb or 0.0)

    @property
    def left_mb(self) -> float:
        """What the process may take now, beyond what it has."""
        return self.total_mb - (resident_memory_mb() or 0.0)

    def started(self) -> MemoryBudget:
        """The budget of training that starts now: the process has taken what it takes before."""
        release_memory()  # of what was traced and measured: training takes it again
        budget = MemoryBudget(start_mb=self.start_mb)
        budget.limit_mb = self.limit_mb
        return budget

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
        if self.has_limit and self.needed_mb(needed_mb) <= reachable_memory_mb():
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
    return available_memory_mb() is not None and not has_gpu()
