"""What must hold for any input: properties that Hypothesis tries, in a short test and in `scripts/benchmarks/fuzz.py`.

Each is a function that Hypothesis calls with made-up input; `PROPERTIES` has them by name. Files are made once, then
changed (cut, bits flipped, parts swapped, fields replaced) and read as the commands read them: the answer is one line,
or what was read is what was there, or at least finite and of its kind.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

import utils

PROPERTIES: dict[str, Callable[[], Any]] = {}  # each makes a function that Hypothesis calls
SLOW: set[str] = set()  # those that take seconds for an example
EXAMPLES: Counter[str] = Counter()  # tried so far, by property


def property_of(*strategies: Any, is_slow: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a function of inputs from these strategies into `PROPERTIES`, and into `SLOW` if it is."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__

        @functools.wraps(function)
        def counted(*args: Any, **inputs: Any) -> None:
            EXAMPLES[name] += 1
            function(*args, **inputs)

        PROPERTIES[name] = lambda: hypothesis.given(*strategies)(counted)
        if is_slow:
            SLOW.add(name)
        return function

    return enter


def attempt(name: str, examples: int, seed: int | None = None) -> None:
    """Try a property on so many examples, the same ones each time without a seed; raises what fails."""
    phases = [Phase.generate] if name in SLOW else [Phase.generate, Phase.shrink]
    settings = hypothesis.settings(
        max_examples=examples,
        phases=phases,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=[*HealthCheck],
    )
    function = settings(PROPERTIES[name]())
    (function if seed is None else hypothesis.seed(seed)(function))()


def shown(error: BaseException) -> str:
    """An error of a property, with the input that Hypothesis found."""
    notes = "; ".join(getattr(error, "__notes__", []))
    return " ".join(f"{type(error).__name__}: {error} {notes}".split())[:1500]


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """What the block prints is dropped; an error must be one that a command reports in a line."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        except Exception as error:
            if utils._message(error) is None:
                raise


@functools.cache
def workplace() -> Path:
    """A folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="properties")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def fresh(name: str) -> Path:
    """A path that no file had: Keras keeps one open after it failed to load it."""
    return workplace() / f"{next(_count)}{name}"


_count = itertools.count()


# --- damage -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """A change of a file's bytes: cut, bits flipped, parts swapped, repeated, zeroed or inserted."""

    kind: str
    shares: list[float]  # places, from 0 to below 1
    bit: int
    more: bytes

    def __call__(self, content: bytes) -> bytes:
        changed = bytearray(content)
        first, middle, last = sorted(int(share * len(content)) for share in self.shares)
        if self.kind == "cut":
            return bytes(changed[:first])
        if self.kind == "swap":
            return bytes(changed[:first] + changed[middle:last] + changed[first:middle] + changed[last:])
        if self.kind == "repeat":
            return bytes(changed[:last] + changed[first:])
        if self.kind == "flip":
            for place in (first, middle, last):
                changed[place] ^= 1 << self.bit
        elif self.kind == "zero":
            changed[first:last] = bytes(last - first)
        else:
            changed[first:first] = self.more
        return bytes(changed)


_SHARES = st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3)
DAMAGES = st.builds(
    Damage,
    st.sampled_from(["cut", "flip", "swap", "repeat", "zero", "insert"]),
    _SHARES,
    st.integers(0, 7),
    st.binary(min_size=1, max_size=8),
)
