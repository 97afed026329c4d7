"""Energy of a finished run from the record of an external power meter."""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from elastic_trainer.runs.reader import METRICS, read_epochs, read_summary
from elastic_trainer.runs.summary import update_summary
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import trusting, write_csv, writing

MAX_GAP_SECONDS = 60  # between two readings
MAX_WATTS = 1_000_000  # far above any machine; much more would overflow
_SUFFIX = ".energy"  # the events file with the curve ends with it


def add_power(folder: Path, record: Path) -> str:
    """Add the energy that an external power meter recorded during training to the finished run in `folder`.

    `record` is a CSV file with a header line and two columns: time, in seconds since 1970 or in ISO 8601 (local time if
    it has no time zone), and watts. summary.json and metrics.csv are rewritten, and TensorBoard gets the curve. Returns
    the line to print. Raises `UserError` if a file cannot be read, or if the record does not cover the run. Energy that
    is already known then stays. Else, if the record does not cover the run, `energy_missing` says so.
    """
    times, watts = read_power(record)
    summary, rows = read_summary(folder), read_epochs(folder)
    with trusting(folder / METRICS):
        steps, seconds = [int(row["step"]) for row in rows], [float(row["train_seconds"]) for row in rows]
    try:
        joules = integrate_power(times, watts, summary["training_spans"], seconds)
    except ValueError as error:
        if summary.get("energy_joules") is None:
            update_summary(folder, energy_missing=f"{record}: {error}")
        raise UserError(f"{record}: {error}; give the record made during this run") from error
    for row, value in zip(rows, joules, strict=True):
        row["energy_joules"] = str(value)
    _write_curve(folder, steps, joules)
    write_csv(folder / METRICS, [*rows[0]], [list(row.values()) for row in rows])
    update_summary(folder, energy_joules=joules[-1], energy_meter=str(record), energy_missing=None)
    return f"energy of training: {joules[-1]:.6g} J"


def _write_curve(folder: Path, steps: Sequence[int], joules: Sequence[float]) -> None:
    """Write TensorBoard's curve of energy to an events file, which replaces those of earlier records."""
    import tensorflow as tf

    earlier = [*folder.glob(f"events.out.*{_SUFFIX}")]
    writer = tf.summary.create_file_writer(str(folder), filename_suffix=_SUFFIX)
    with writer.as_default():
        for step, value in zip(steps, joules, strict=True):
            tf.summary.scalar("meters/energy_joules", value, step)
    writer.close()
    with writing(folder):
        for path in earlier:
            path.unlink()


def read_power(record: Path) -> tuple[np.ndarray, np.ndarray]:
    """Times (s since 1970) and watts in an external meter's CSV file, see `add_power`, in order of time."""
    readings = [_reading(record, number, line) for number, line in _lines(record)]
    if len(readings) < 2:
        raise UserError(f"{record}: needs at least two readings; give a header line, then time and watts in each line")
    times, watts = np.array(sorted(readings)).T
    return times, watts


def _lines(record: Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV file with their numbers, without the header and empty lines."""
    try:
        with record.open(newline="", encoding="utf-8-sig") as file:
            return [(number, line) for number, line in enumerate(csv.reader(file), 1) if number > 1 and line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{record}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _date(text: str) -> datetime:
    """As `fromisoformat` of Python 3.11; that of 3.10 takes no `Z`, and three or six digits after the second alone."""
    text = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text).replace("Z", "+00:00")
    return datetime.fromisoformat(text)


def _reading(record: Path, number: int, line: Sequence[str]) -> tuple[float, float]:
    """Seconds since 1970 and watts in a line."""
    when = watts = math.nan
    with contextlib.suppress(ValueError, IndexError):
        watts = float(line[1])
        when = _date(line[0].strip()).timestamp()
    with contextlib.suppress(ValueError):
        when = float(line[0])
    if not (math.isfinite(when) and 0 <= watts <= MAX_WATTS):
        raise UserError(
            f"{record}: line {number} must contain a time (seconds since 1970, or 2026-01-31T12:00:00), a "
            f"comma, and watts from 0 to {MAX_WATTS:,}"
        )
    return when, watts


def integrate_power(
    times: np.ndarray, watts: np.ndarray, spans: Sequence[Sequence[float]], train_seconds: Sequence[float]
) -> list[float]:
    """Joules spent in training time up to each of `train_seconds`, ascending; the last is the end of the last span.

    Power in watts changes linearly between two readings, whose `times`, like the `spans` of training, are in seconds
    since 1970. Raises `ValueError` if the readings do not cover them.
    """
    starts, ends = np.array(spans, float).T
    if starts.min() < times[0] or ends.max() > times[-1]:
        raise ValueError("does not cover all of training")
    for start, end in zip(starts, ends, strict=True):
        around = times[max(np.searchsorted(times, start, "right") - 1, 0) : np.searchsorted(times, end) + 1]
        if np.diff(around).max(initial=0) > MAX_GAP_SECONDS:
            raise ValueError(f"has no reading for more than {MAX_GAP_SECONDS} s of training")
    done = np.concatenate([[0], np.cumsum(ends - starts)])
    wanted = np.clip([*train_seconds[:-1], done[-1]], 0, done[-1])
    index = np.clip(np.searchsorted(done, wanted, "left") - 1, 0, len(starts) - 1)
    moments = starts[index] + (wanted - done[index])
    every = np.unique(np.concatenate([times, starts, ends, moments]))
    power = np.interp(every, times, watts)
    energy = np.concatenate([[0], np.cumsum((power[1:] + power[:-1]) / 2 * np.diff(every))])
    at_start, at_end, at_moment = (np.interp(when, every, energy) for when in (starts, ends, moments))
    before = np.concatenate([[0], np.cumsum(at_end - at_start)])
    return [float(joules) for joules in before[index] + at_moment - at_start[index]]
