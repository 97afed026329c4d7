"""Energy of a finished run from the record of an external power meter."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

import utils
from elastic_trainer.runs.reader import METRICS, SUMMARY, read_own, read_rows
from utils import UserError

LONGEST_GAP_SECONDS = 60  # between two readings; a longer gap is no measurement


def add_external_energy(folder: Path, record: Path) -> float | None:
    """Add the energy that an external power meter recorded during training to the finished run in `folder`.

    summary.json and metrics.csv are rewritten, and TensorBoard gets the curve.

    Args:
        folder: of the run.
        record: a CSV file with a line of names and two columns: time, as seconds since 1970 or as ISO 8601 (local time
            if it names no zone), and watts.

    Returns:
        Joules, or None if the record does not cover the run; `energy_missing` of the summary then says why.

    Raises:
        UserError: the record cannot be read.
    """
    import tensorflow as tf

    times, watts = read_power(record)
    summary, rows = read_own(folder, SUMMARY), read_rows(folder / METRICS)
    seconds = [float(row["train_seconds"]) for row in rows]
    try:
        joules = integrate_power(times, watts, summary["training_spans"], seconds)
    except ValueError as error:
        summary["energy_missing"] = f"{record}: {error}"
    else:
        summary.update(energy_joules=joules[-1], energy_meter=str(record), energy_missing=None)
        writer = tf.summary.create_file_writer(str(folder), filename_suffix=".energy")
        with writer.as_default():
            for row, value in zip(rows, joules, strict=True):
                row["energy_joules"] = str(value)
                tf.summary.scalar("meters/energy_joules", value, int(row["step"]))
        writer.close()
        utils.write_csv(folder / METRICS, [*rows[0]], [list(row.values()) for row in rows])
    utils.write_json(folder / SUMMARY, summary)
    return summary["energy_joules"]


def read_power(record: Path) -> tuple[np.ndarray, np.ndarray]:
    """Times (s since 1970) and watts of an external meter's CSV file, see `add_external_energy`, in order of time.

    Raises:
        UserError: there is no such file, or a line of it is not of that form.
    """
    readings = []
    try:
        with record.open(newline="", encoding="utf-8-sig") as file:
            for number, line in enumerate(csv.reader(file), 1):
                if number == 1 or not line:
                    continue
                try:
                    readings.append((_seconds_since_1970(line[0]), float(line[1])))
                except (ValueError, IndexError):
                    raise UserError(
                        f"--power_csv {record}: line {number} is not a time (seconds since 1970, or as "
                        "2026-01-31T12:00:00) and watts, separated by a comma"
                    ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--power_csv {record}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(readings) < 2:
        raise UserError(
            f"--power_csv {record}: holds no two readings; give a line of names, then time and watts a line"
        )
    times, watts = np.array(sorted(readings)).T
    return times, watts


def _seconds_since_1970(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()


def integrate_power(
    times: np.ndarray, watts: np.ndarray, spans: Sequence[Sequence[float]], train_seconds: Sequence[float]
) -> list[float]:
    """Joules spent in training time up to each of `train_seconds`.

    Args:
        times, watts: [n] readings in order of time; between two of them power changes linearly.
        spans: start and end of each period of training, in the same time.
        train_seconds: ascending seconds of training; the last is taken as the end of the last span.

    Raises:
        ValueError: the readings do not cover all spans.
    """
    starts, ends = np.array(spans, float).T
    if starts.min() < times[0] or ends.max() > times[-1]:
        raise ValueError("does not cover all of the training")
    for start, end in zip(starts, ends, strict=True):
        around = times[max(np.searchsorted(times, start, "right") - 1, 0) : np.searchsorted(times, end) + 1]
        if np.diff(around).max(initial=0) > LONGEST_GAP_SECONDS:
            raise ValueError(f"has no reading for more than {LONGEST_GAP_SECONDS} s of the training")
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
