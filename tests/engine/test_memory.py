"""The memory budget: what a limit leaves, and what fits where it is too little."""

import numpy as np
import pytest

from elastic_trainer.system import memory_budget as budget
from elastic_trainer.system.memory_budget import MemoryBudget, StepMemory


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


@pytest.mark.parametrize("batch_size", [1, 2, 48, 64, 1024])
@pytest.mark.parametrize("room_mb", [99.0, 101.0, 130.0, 164.0, 300.0, 1100.0])
def test_the_largest_half_that_fits_is_found(batch_size, room_mb, monkeypatch):
    machine(monkeypatch, 0.0)
    sizes = [batch_size >> k for k in range(batch_size.bit_length())]
    best = next((size for size in sizes if 100 + size <= room_mb), None)
    assert MemoryBudget(room_mb).fitting_size(lambda size: 100 + size, batch_size) == best


def test_depths_fit_with_a_little_to_spare(monkeypatch):
    machine(monkeypatch, 50.0)
    needed_mb = np.array([40.0, 48.0, 48.1, 60.0])
    assert MemoryBudget(100.0).deepest(needed_mb) == 2, "of 100 MB, 98, without the 50 that are taken"
    machine(monkeypatch, None, None)
    assert MemoryBudget().deepest(needed_mb) == 4


@pytest.mark.parametrize(
    ("limit_mb", "rows", "can_split", "fits"),
    [  # the process takes 50 MB, training 42 and 4 for each of 16 examples, the sums of its gradients 6
        (155.9, 16, True, "--micro_batch 8, or --batch_size 8, or --memory 160M"),
        (129.9, 16, True, "--micro_batch 4, or --batch_size 8, or --memory 160M"),
        (123.9, 16, True, "--micro_batch 4, or --batch_size 4, or --memory 160M"),
        (124.0, 8, True, "--micro_batch 4, or --batch_size 8, or --memory 140M"),
        (124.0, 16, False, "--batch_size 8, or --memory 160M"),
        (97.0, 16, True, "--batch_size 1, or --memory 160M"),
        (95.9, 16, True, "--memory 160M"),
    ],
)
def test_a_refusal_names_exactly_what_fits(limit_mb, rows, can_split, fits, monkeypatch):
    machine(monkeypatch, 50.0)
    memory = StepMemory(16, np.array([42.0, 1e3]), np.array([64.0, 1e3]), np.array([6.0, 1e3]))

    def needed(batch_size, micro_batch):
        return float(memory.needed_mb(batch_size, micro_batch)[0])

    refusal = MemoryBudget(limit_mb).refuse("training the head alone", needed, 16, rows, can_split)
    assert str(refusal) == (
        f"memory: training the head alone takes about {106 if rows == 16 else 80} MB more, and {limit_mb - 50:.0f} MB "
        f"are available (limit {limit_mb:.0f} MB, taken 50 MB); what fits: {fits}"
    )


@pytest.mark.parametrize(
    ("limit_mb", "available_mb", "others", "advice"),
    [
        (None, 30.0, [], "no batch fits; choose a smaller --input_size or network"),
        (60.0, 30.0, [], "no batch fits; choose a smaller --input_size or network"),  # the machine has no more
        (60.0, 60.0, ["less"], "what fits: --memory 110M, or less"),
    ],
)
def test_a_refusal_says_where_little_or_nothing_fits(limit_mb, available_mb, others, advice, monkeypatch):
    machine(monkeypatch, 50.0, available_mb)
    refusal = MemoryBudget(limit_mb).refuse("it", lambda *_: 50.0, 64, can_split=True, others=others)
    assert str(refusal).endswith(f"; {advice}")
