"""What fits where a step does not, by the prediction: for the one line that refuses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

MAX_NAMED = 3
GUESS_FACTOR = 1.05  # of the memory there is: the need is nearly a line over the batch
SPARE_FACTOR = 1.02  # of a named limit: what a process takes before it trains varies


class Alternative(NamedTuple):
    """Something that fits; `factor` is by how much, as a ratio above 1, it differs from what was asked for."""

    factor: float
    flags: str


def named(alternatives: Iterable[Alternative | None], otherwise: str) -> str:
    """The nearest of `alternatives`, at most `MAX_NAMED`, in words; `otherwise` if there are none."""
    found = sorted(each for each in alternatives if each is not None)
    return f"what fits: {', or '.join(each.flags for each in found[:MAX_NAMED])}" if found else otherwise


def smaller_batch(needed_mb: Callable[[int], float], batch_size: int, now_mb: float, room_mb: float) -> int | None:
    """The largest half, quarter, … of a batch that fits, or None. Asks `needed_mb` of three batches as a rule.

    Args:
        needed_mb: what a step on so many examples takes.
        batch_size, now_mb: the batch that does not fit, and what its step takes.
        room_mb: what a step may take.
    """
    halves = [batch_size >> k for k in range(1, batch_size.bit_length())]
    least_mb = needed_mb(1) if halves else math.inf
    if least_mb > room_mb:
        return None
    each_mb = (now_mb - least_mb) / (batch_size - 1)
    likely = (half for half in halves if least_mb + each_mb * (half - 1) <= GUESS_FACTOR * room_mb)
    return next((half for half in likely if half == 1 or needed_mb(half) <= room_mb), 1)


def of_batch(batch_size: int, smaller: int | None, flag: str = "--batch_size") -> Alternative | None:
    """That of `smaller_batch`, or of smaller parts of a batch."""
    return None if smaller is None else Alternative(batch_size / smaller, f"{flag} {smaller}")


def of_parts(
    needed_mb: Callable[[int], float], rows: int, now_mb: float, room_mb: float, is_possible: bool
) -> Alternative | None:
    """Parts of a batch that are smaller than `rows`, if they are possible; arguments as of `smaller_batch`."""
    smaller = smaller_batch(needed_mb, rows, now_mb, room_mb) if is_possible else None
    return of_batch(rows, smaller, "--micro_batch")


def larger_limit(needed_mb: float, limit_mb: float | None, machine_mb: float, beside: str = "") -> Alternative | None:
    """A limit within which the process can take `needed_mb` in all; None without a limit, or if the machine lacks it.

    Args:
        needed_mb, limit_mb: of the whole process.
        machine_mb: what the machine has for it.
        beside: words for what is not known yet.
    """
    if limit_mb is None or math.isinf(limit_mb) or needed_mb > machine_mb:
        return None
    megabytes = math.ceil(SPARE_FACTOR * needed_mb / 10) * 10
    return Alternative(megabytes / limit_mb, f"--memory {megabytes}M{beside}")
