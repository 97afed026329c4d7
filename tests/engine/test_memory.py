"""The memory budget: what a limit leaves, and how deep steps may reach within it."""

import numpy as np
import pytest

from elastic_trainer.system import memory_budget as budget
from elastic_trainer.system.memory_budget import MemoryBudget


def machine(monkeypatch, resident_mb, available_mb=1e4):
    monkeypatch.setattr(budget, "resident_memory_mb", lambda: resident_mb)
    monkeypatch.setattr(budget, "free_memory_mb", lambda: available_mb)


def test_room_is_what_a_limit_leaves_and_the_start_of_training_is_fixed(monkeypatch):
    machine(monkeypatch, 100.0, 900.0)
    memory = MemoryBudget(limit_mb=400.0)
    assert (memory.start_mb, memory.room_mb, memory.needed_mb(50.0)) == (100.0, 300.0, 150.0)
    assert memory.fits(300.0) and not memory.fits(300.1) and memory.left_mb == 300.0
    memory.start()
    machine(monkeypatch, 350.0, 30.0)  # training takes memory, and another program as well
    assert memory.start_mb == pytest.approx(100.0) and memory.total_mb == 380.0 and memory.left_mb == 30.0


def test_without_a_limit_the_machine_is_one(monkeypatch):
    machine(monkeypatch, 100.0, 900.0)
    assert MemoryBudget().room_mb == 900.0 and not MemoryBudget().has_limit
    machine(monkeypatch, None, None)
    assert MemoryBudget().room_mb == np.inf and MemoryBudget().start_mb is None


def test_depths_fit_with_a_little_to_spare(monkeypatch):
    machine(monkeypatch, 50.0)
    needed_mb = np.array([40.0, 48.0, 48.1, 60.0])
    assert MemoryBudget(100.0).deepest(needed_mb) == 2, "of 100 MB, 98, without the 50 that are taken"
    machine(monkeypatch, None, None)
    assert MemoryBudget().deepest(needed_mb) == 4
