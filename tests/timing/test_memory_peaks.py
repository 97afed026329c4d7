"""Measured peaks of memory correct what is predicted; without them, nothing changes."""

import os
import signal
from typing import Any

import numpy as np
import pytest
from conftest import make_small_model
from small_runs import SETTINGS

import profiler
from elastic_trainer import machine
from elastic_trainer.machine import resident_memory_mb
from elastic_trainer.memory.step_memory import MemoryPeaks
from elastic_trainer.timing import memory_check, memory_peaks
from elastic_trainer.timing.memory_check import TracedSteps


@pytest.mark.parametrize(
    ("predicted_mb", "corrected_mb"),
    [(100.0, 90.0), (150.0, 160.0), (175.0, 195.0), (200.0, 230.0), (50.0, 40.0), (900.0, 930.0)],
)
def test_errors_between_two_peaks_are_interpolated(predicted_mb, corrected_mb):
    assert MemoryPeaks((100.0, 200.0), (90.0, 230.0)).corrected_mb(predicted_mb) == pytest.approx(corrected_mb)


def test_peaks_are_in_the_order_of_what_was_predicted(monkeypatch):
    measured = []

    def measure_selections(setup, masks):
        measured.extend(masks)
        return [(30.0, 31.0), (20.0, 22.0), (40.0, 44.0)]

    monkeypatch.setattr(memory_peaks, "measure_selections", measure_selections)
    head = np.arange(9) == 8
    peaks = memory_peaks.measure_peaks(killed, head)
    assert peaks == ((20.0, 30.0, 40.0), (22.0, 31.0, 44.0))
    assert [np.flatnonzero(mask).tolist() for mask in measured] == [[8], [4, 5, 6, 7, 8], [*range(9)]]


def killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_ends_the_measurement():
    with pytest.raises(EOFError):
        memory_peaks.measure_selections(killed, [np.ones(2, bool)])


@pytest.mark.parametrize("why", ["killed", "no room", "not reported"])
def test_a_profile_goes_on_without_peaks_that_cannot_be_measured(why, monkeypatch, capsys):
    started = []

    def broken(setup, head):
        started.append(head)
        raise EOFError

    monkeypatch.setattr(memory_peaks, "measure_peaks", broken)
    if why == "no room":
        monkeypatch.setattr(memory_check, "room_mb", lambda: (resident_memory_mb() or 0.0) + 1.0)
    if why == "not reported":
        monkeypatch.setattr(machine, "PEAK_RESET", machine.PEAK_RESET / "missing")
    assert profiler._memory_peaks(TracedSteps(make_small_model(), SETTINGS), 4) is None
    out = capsys.readouterr().out
    assert out == "" if why == "not reported" else "not corrected by measured peaks" in out
    assert len(started) == (why == "killed")
