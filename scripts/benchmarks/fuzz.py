#!/usr/bin/env python
"""Try made-up command lines, damaged files, solver inputs and networks for as long as you say: does all hold?

    python scripts/benchmarks/fuzz.py --minutes 60 > fuzz.json

The properties are those of `tests/properties*.py`, which `tests/test_properties.py` tries for seconds. They take turns,
each time with another seed. The record says how many examples each had, and what failed, with its input.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import common
from common import Setting
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import properties_of_command_lines  # noqa: F401  # enters its properties
import properties_of_files  # noqa: F401  # enters its properties
import properties_of_training  # noqa: F401  # enters its properties
from properties import EXAMPLES, PROPERTIES, SLOW, attempt, shown

from elastic_trainer.system.errors import UserError

SLOW_EXAMPLES, QUICK_EXAMPLES = 4, 100  # of a turn
MOST_FAILURES = 5  # recorded of each property


def one_turn(name: str, seed: int) -> str | None:
    """Try a property on some examples; returns what failed, with the smallest input that Hypothesis finds."""
    try:
        attempt(name, SLOW_EXAMPLES if name in SLOW else QUICK_EXAMPLES, seed)
    except Exception as error:
        return shown(error)
    return None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Turns until the time is over; each property has at least one."""
    names = [name for name in PROPERTIES if any(word in name for word in args.only.split(","))]
    if not names:
        raise UserError(f"--only {args.only}: is in no name of {', '.join(PROPERTIES)}")
    failures: dict[str, list[str]] = {name: [] for name in names}
    seconds: dict[str, float] = dict.fromkeys(names, 0.0)
    EXAMPLES.clear()
    start, turn = time.monotonic(), 0
    with tqdm(total=round(60 * args.minutes), unit="s", desc="trying") as bar:
        while turn < len(names) or time.monotonic() - start < 60 * args.minutes:
            name = names[turn] if turn < len(names) else min(names, key=lambda one: seconds[one])
            before = time.monotonic()
            failure = one_turn(name, args.seed + turn)
            if failure is not None and len(failures[name]) < MOST_FAILURES:
                failures[name].append(failure)
                tqdm.write(f"{name}: {failure}", file=sys.stderr)
            seconds[name] += time.monotonic() - before
            turn += 1
            bar.update(round(time.monotonic() - start) - bar.n)
    return {
        "minutes": round((time.monotonic() - start) / 60, 1),
        "examples": sum(EXAMPLES[name] for name in names),
        "failed": sum(map(bool, failures.values())),
        "properties": {
            name: {"examples": EXAMPLES[name], "seconds": round(seconds[name]), "failures": failures[name]}
            for name in names
        },
    }


SETTINGS = {
    "minutes": Setting(60.0, 1.0, "how long"),
    "seed": Setting(0, 0, "of the first turn"),
    "only": Setting("", "", "words, separated by commas: properties whose name contains one"),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
