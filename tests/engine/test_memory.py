"""The memory budget: what a limit leaves, and what fits where it is too little."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import BATCH, make_small_data, make_small_model, make_table

from elastic_trainer.engine import memory as budget
from elastic_trainer.engine.memory import MemoryBudget
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.memory_budget import MEMORY_SHARE, feature_batches, selection_room_mb
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.memory_costs import NO_CHAIN, Kept, MemoryCosts


def machine(monkeypatch, resident_mb, available_mb=1e4):
    monkeypatch.setattr(budget, "resident_memory_mb", lambda: resident_mb)
    monkeypatch.setattr(budget, "available_memory_mb", lambda: available_mb)
    monkeypatch.setattr(budget, "reachable_memory_mb", lambda: resident_mb + available_mb)


def test_what_was_measured_and_freed_is_taken_again(monkeypatch):
    machine(monkeypatch, 100.0, 900.0)
    memory = MemoryBudget(limit_mb=400.0)
    assert (memory.start_mb, memory.room_mb, memory.needed_mb(50.0)) == (100.0, 300.0, 150.0)
    with memory.reusing():
        machine(monkeypatch, 200.0, 800.0)
    assert memory.start_mb == pytest.approx(100.0) and memory.room_mb == pytest.approx(300.0)
    assert memory.fits(300.0) and not memory.fits(300.1) and memory.left_mb == 200.0
    started = memory.started()
    machine(monkeypatch, 350.0, 30.0)  # training takes memory, and another program as well
    assert started.start_mb == pytest.approx(100.0) and started.total_mb == 380.0 and started.left_mb == 30.0
    assert memory.start_mb == pytest.approx(250.0), "other training may start later"


def test_without_a_limit_the_machine_is_one(monkeypatch):
    machine(monkeypatch, 100.0, 900.0)
    assert MemoryBudget().room_mb == 900.0 and not MemoryBudget().has_limit
    machine(monkeypatch, None, None)
    assert MemoryBudget().room_mb == np.inf and MemoryBudget().start_mb is None


@pytest.mark.parametrize("batch_size", [1, 2, 48, 64, 1024])
@pytest.mark.parametrize("room_mb", [99.0, 101.0, 130.0, 164.0, 300.0, 1100.0])
@pytest.mark.parametrize("bend", [0.9, 1.0, 1.1])
def test_the_largest_half_that_fits_is_found_with_few_traced_steps(batch_size, room_mb, bend, monkeypatch):
    machine(monkeypatch, 0.0)
    asked = []

    def needed_mb(rows):
        asked.append(rows)
        return 100 + rows**bend

    found = MemoryBudget(room_mb).fitting_size(needed_mb, batch_size)
    sizes = [batch_size >> k for k in range(batch_size.bit_length())]
    best = next((size for size in sizes if 100 + size**bend <= room_mb), None)
    assert (found is None) == (best is None) and len(asked) <= 5
    assert found is None or best is None or best / 2 <= found <= best
    assert found == best or bend != 1.0


@pytest.mark.parametrize(
    ("limit_mb", "parts", "can_split", "fits"),
    [  # the process takes 50 MB, the head 42 and 4 for each of 16 examples, the sums of its gradients 6
        (155.9, 1, True, "--memory 160M, or --batch_size 8, or --micro_batch 8"),
        (130.0, 1, True, "--memory 160M, or --batch_size 8, or --micro_batch 8"),
        (129.9, 1, True, "--memory 160M, or --batch_size 8, or --micro_batch 4"),
        (124.0, 1, True, "--memory 160M, or --batch_size 8, or --micro_batch 4"),
        (123.9, 1, True, "--memory 160M, or --batch_size 4, or --micro_batch 4"),
        (124.0, 2, True, "--memory 160M, or --micro_batch 8, or --batch_size 8"),  # its table has the sums
        (124.0, 1, False, "--memory 160M, or --batch_size 8"),
        (97.0, 1, True, "--memory 160M, or --batch_size 1"),
        (95.9, 1, True, "--memory 160M"),
    ],
)
def test_a_refusal_names_exactly_what_fits(limit_mb, parts, can_split, fits, monkeypatch):
    machine(monkeypatch, 50.0)
    model = make_small_model()
    table, head = make_table(model), head_mask(model)
    is_head, count = head[table.positions], len(head)
    kept = [Kept((0,), NO_CHAIN, 64.0)]
    costs = MemoryCosts(10.0, 40.0, 0.0, np.where(is_head, 1.0, 100.0), np.zeros(count), kept)
    shapes = [(750_000,) if always else (1,) for always in is_head]
    table = replace(table, shapes=shapes, memory=costs)
    assert is_head.sum() == 2 and is_head[0] and table.predict_mb(head) == 106
    with pytest.raises(UserError) as refusal:
        selection_room_mb(MemoryBudget(limit_mb), table, head, 16, parts, can_split)
    assert str(refusal.value) == (
        f"memory: training the head alone takes about 106 MB more, and {limit_mb - 50:.0f} MB are available "
        f"(limit {limit_mb:.0f} MB, taken 50 MB); what fits: {fits}"
    )
    room_mb = selection_room_mb(MemoryBudget(156.0), table, head, 16, parts, can_split)
    assert room_mb == pytest.approx(MEMORY_SHARE * 156 - 50)


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


def test_training_features_in_float16_count_half():
    data = make_small_data()  # 24 images to train on, and to test
    batches = [feature_batches(data, Settings(feature_cache=kind)) for kind in ("float32", "float16")]
    assert batches == [48 / BATCH, 36 / BATCH]
