#!/usr/bin/env python
"""Add the energy that an external power meter recorded during training to a finished run.

python scripts/energy.py logs/my_run power.csv
"""

from __future__ import annotations

import contextlib
import csv
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.runs.summary import update_summary
from elastic_trainer.settings.flags import OneLineParser, existing_file, folder
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import reading

MAX_GAP_SECONDS = 60  # between two readings of the meter
MAX_SHIFT_SECONDS = 1  # of this machine's clock during the run


def add_power(run: Path, record: Path) -> str:
    """Add the energy that an external power meter recorded to the finished run in the folder `run`.

    Returns the line to print. Raises `UserError` if a file cannot be read, if the record does not cover the run, or if
    this machine's clock was set during the run; energy that is known already then stays.
    """
    summary = read_summary(run)
    shift = summary.get("clock_shift", 0.0)
    if abs(shift) > MAX_SHIFT_SECONDS:
        raise UserError(
            f"{record}: cannot be used: this machine's clock was set by {shift:+.1f} s during the run; run again"
        )
    joules = recorded_joules(record, summary["training_spans"])
    update_summary(run, energy_joules=joules, energy_meter=str(record), energy_missing=None)
    return f"energy of training: {joules:.6g} J"


def recorded_joules(record: Path, spans: Sequence[Sequence[float]]) -> float:
    """The energy within the `spans` of training, in seconds since 1970, that an external power meter recorded.

    `record` is a CSV file with a header line and two columns: time, in seconds since 1970 or in ISO 8601 (local time if
    it has no time zone), and watts. Raises `UserError` if it cannot be read, or does not cover the spans.
    """
    with reading(record), record.open(newline="", encoding="utf-8-sig") as file:
        lines = [*enumerate(csv.reader(file), 1)][1:]
        readings = sorted(_reading(number, line) for number, line in lines if line)
        times, watts = np.reshape(readings, (-1, 2)).T
        return integrate_power(times, watts, spans)


def _reading(number: int, line: Sequence[str]) -> tuple[float, float]:
    """Seconds since 1970 and watts in a line."""
    with contextlib.suppress(ValueError, IndexError):
        when, watts = _seconds(line[0].strip()), float(line[1])
        if math.isfinite(when) and 0 <= watts < math.inf:
            return when, watts
    raise ValueError(
        f"line {number} must contain a time (seconds since 1970, or 2026-01-31T12:00:00), a comma, and watts"
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def integrate_power(times: np.ndarray, watts: np.ndarray, spans: Sequence[Sequence[float]]) -> float:
    """Joules within the `spans` of training; power changes linearly between two readings. All in seconds since 1970.

    Raises `ValueError` if the readings do not cover the spans.
    """
    joules = 0.0
    for start, end in spans:
        first, last = np.searchsorted(times, start, "right") - 1, np.searchsorted(times, end)
        if first < 0 or last == len(times):
            raise ValueError("does not cover all of training; give the record made during this run")
        readings = times[first : last + 1]
        if np.diff(readings).max(initial=0.0) > MAX_GAP_SECONDS:
            raise ValueError(f"has no reading for more than {MAX_GAP_SECONDS} s of training")
        at = np.clip(readings, start, end)
        power = np.interp(at, times, watts)
        joules += float(np.diff(at) @ (power[1:] + power[:-1])) / 2
    return joules


def main() -> None:
    parser = OneLineParser(prog="energy.py", description=__doc__)
    parser.add_argument("run", type=folder, metavar="RUN", help="folder of the run")
    parser.add_argument("record", type=existing_file, metavar="FILE", help="a CSV file: a header, then time and watts")
    args = parser.parse_args()
    print(add_power(args.run, args.record))


if __name__ == "__main__":
    utils.run_cli(main)
