"""The memory budget: what the process may take while it trains, what it takes already, and what fits.

    start     what the process takes before it trains, without what is reusable
    reusable  what tracing and measuring steps took and freed; training takes it again
    needed    start, and what training takes
    room      the limit, or what the machine has, without start

The paper does not cover memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import inf

from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import available_memory_mb, has_gpu, reachable_memory_mb
from elastic_trainer.system.memory import resident_memory_mb

MAX_NAMED = 3
GUESS_FACTOR = 1.05  # of the room: the need is nearly a line over the batch
SPARE_FACTOR = 1.02  # of a named limit: what a process takes before it trains varies

Needed = Callable[[int, int], float]  # MB that training takes, by the size of a batch and of its parts at most


class MemoryBudget:
    """The memory of the process while it trains.

    Args:
        limit_mb: what the process may take in all, resident; None: what the machine has. As an attribute, infinity.
        start_mb: what it takes before it trains; None: what it takes at the time, without what is reusable.

    Raises:
        UserError: a limit is given and nothing here can keep to one.
    """

    def __init__(self, limit_mb: float | None = None, start_mb: float | None = None) -> None:
        if limit_mb is not None and not _is_reported():
            raise UserError("--memory: needs a system that reports the memory of a process, and no GPU; leave it out")
        self.limit_mb = inf if limit_mb is None else limit_mb
        self._start_mb, self._reusable_mb = start_mb, 0.0

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
        resident_mb = resident_memory_mb() if self._start_mb is None else self._start_mb
        return None if resident_mb is None else resident_mb - max(self._reusable_mb, 0.0)

    @property
    def room_mb(self) -> float:
        """What training may take."""
        return self.total_mb - (self.start_mb or 0.0)

    @property
    def left_mb(self) -> float:
        """What the process may take now, beyond what it has."""
        return self.total_mb - (resident_memory_mb() or 0.0)

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Count what this block takes as reusable."""
        before_mb = resident_memory_mb() or 0.0
        try:
            yield
        finally:
            self._reusable_mb += (resident_memory_mb() or 0.0) - before_mb

    def started(self) -> MemoryBudget:
        """The budget of training that starts now: the process has taken what it takes before."""
        budget = MemoryBudget(start_mb=self.start_mb)
        budget.limit_mb = self.limit_mb
        return budget

    def needed_mb(self, training_mb: float) -> float:
        """What the process takes in all where training takes `training_mb`."""
        return (self.start_mb or 0.0) + training_mb

    def fits(self, training_mb: float) -> bool:
        """Whether training may take `training_mb`."""
        return training_mb <= self.room_mb

    def fitting_size(self, needed: Callable[[int], float], batch_size: int) -> int | None:
        """The largest of a batch, its half, quarter, … that fits, or None.

        `needed`, MB that training on a batch takes by its size, is asked of four sizes as a rule.
        """
        room_mb, now_mb = self.room_mb, needed(batch_size)
        if now_mb <= room_mb:
            return batch_size
        halves = [batch_size >> k for k in range(1, batch_size.bit_length())]
        least_mb = needed(1) if halves else inf
        if least_mb > room_mb:
            return None
        each_mb = (now_mb - least_mb) / (batch_size - 1)
        likely = (half for half in halves if least_mb + each_mb * (half - 1) <= GUESS_FACTOR * room_mb)
        return next((half for half in likely if half == 1 or needed(half) <= room_mb), 1)

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
        """The error for `what`, in words, which takes more than there is. It names the nearest that fit.

        Args:
            needed: of `what`, on a batch and parts of another size than `batch_size` and `micro_batch`, too.
            can_split: whether a batch can be taken in (smaller) parts.
            others: flags that fit as well.
            beside: words for what a larger limit must hold, too.
        """
        rows, known = part_rows(batch_size, micro_batch), cache(needed)
        now_mb = known(batch_size, rows)
        fits = [(inf, flags) for flags in others]  # with the ratio, above 1, by which they differ from what was asked
        parts: list[tuple[str, int, Callable[[int], float]]] = [
            ("--batch_size", batch_size, lambda size: known(size, rows)),
            ("--micro_batch", rows, lambda size: known(batch_size, size)),
        ]
        for flag, size, needed_of in parts[: 1 + can_split]:
            smaller = self.fitting_size(needed_of, size)
            if smaller is not None and smaller < size:
                fits.append((size / smaller, f"{flag} {smaller}"))
        needed_mb = self.needed_mb(now_mb)
        if self.has_limit and needed_mb <= reachable_memory_mb():
            limit_mb = math.ceil(SPARE_FACTOR * needed_mb / 10) * 10
            fits.append((limit_mb / self.limit_mb, f"--memory {limit_mb}M{beside}"))
        named = ", or ".join(flags for _, flags in sorted(fits)[:MAX_NAMED])
        advice = f"what fits: {named}" if fits else "no batch fits; choose a smaller --input_size or network"
        taken = f" (limit {self.limit_mb:,.0f} MB, taken {self.start_mb or 0.0:,.0f} MB)" if self.has_limit else ""
        return UserError(
            f"memory: {what} takes about {now_mb:,.0f} MB more, and {max(self.room_mb, 0):,.0f} MB are available"
            f"{taken}; {advice}"
        )


def _is_reported() -> bool:
    """Whether the system reports the memory that training takes; not of a GPU, which has its own."""
    return available_memory_mb() is not None and not has_gpu()
