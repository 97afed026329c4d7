"""What a limit of memory leaves, and what fits where it is too little, by a table with made-up costs."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import BATCH, make_small_data, make_small_model, make_table

from elastic_trainer.errors import UserError
from elastic_trainer.memory.costs import NO_CHAIN, Kept, MemoryCosts
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.memory_budget import feature_batches, memory_room_mb
from elastic_trainer.settings import Settings


@pytest.mark.parametrize(
    ("limit_mb", "parts", "fits"),
    [  # the process takes 50 MB, the head 42 and 4 for each of 16 examples, the sums of its gradients 6
        (155.9, 1, "--memory 160M, or --batch_size 8, or --micro_batch 8"),
        (130.0, 1, "--memory 160M, or --batch_size 8, or --micro_batch 8"),
        (129.9, 1, "--memory 160M, or --batch_size 8, or --micro_batch 4"),
        (124.0, 1, "--memory 160M, or --batch_size 8, or --micro_batch 4"),
        (123.9, 1, "--memory 160M, or --batch_size 4, or --micro_batch 4"),
        (124.0, 2, "--memory 160M, or --micro_batch 8, or --batch_size 8"),  # its table has the sums
        (124.0, 0, "--memory 160M, or --batch_size 8"),
        (97.0, 1, "--memory 160M, or --batch_size 1"),
        (95.9, 1, "--memory 160M"),
    ],
)
def test_a_refusal_names_exactly_what_fits(limit_mb, parts, fits, monkeypatch):
    monkeypatch.setattr("elastic_trainer.selection.memory_budget.reachable_memory_mb", lambda: 1e4)
    model = make_small_model()
    table, head = make_table(model), head_mask(model)
    is_head, count = head[table.positions], len(head)
    kept = [Kept((0,), NO_CHAIN, 64.0)]
    costs = MemoryCosts(10.0, 40.0, 0.0, np.where(is_head, 1.0, 100.0), np.zeros(count), kept)
    shapes = [(750_000,) if always else (1,) for always in is_head]
    table = replace(table, shapes=shapes, details={"memory": costs.to_record()})
    assert is_head.sum() == 2 and is_head[0] and table.predict_mb(head) == 106
    with pytest.raises(UserError, match=f"training the head alone takes about 156 MB.*; what fits: {fits}$"):
        memory_room_mb(limit_mb, 50.0, table, head, 16, parts)
    assert memory_room_mb(156.0, 50.0, table, head, 16, parts) == pytest.approx(0.98 * 156 - 50)


def test_training_features_in_float16_count_half():
    data = make_small_data()  # 24 images to train on, and to test
    batches = [feature_batches(data, Settings(feature_cache=kind)) for kind in ("float32", "float16")]
    assert batches == [48 / BATCH, 36 / BATCH]
