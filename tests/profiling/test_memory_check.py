"""Whether training fits into memory: what is refused, and what is traced for that."""

import pytest
from conftest import make_small_model, with_vit
from small_runs import SETTINGS

import models
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.profiling import memory_check
from elastic_trainer.profiling.memory_check import TracedSteps
from elastic_trainer.settings import Settings
from elastic_trainer.settings.network_names import MODEL_NAMES
from elastic_trainer.system import memory_budget as budget
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory_budget import MemoryBudget, part_rows

ON_64 = "memory: training mobilenetv2 on 64 images of 8×8 takes about 650 MB more, and "


def needed(batch_size, micro_batch):
    """10 MB, 10 for each example of a part, and 20 for the sums of gradients over several parts."""
    rows = part_rows(batch_size, micro_batch)
    return 10 + 10 * rows + 20 * (rows < batch_size)


def has_free(monkeypatch, megabytes, resident_mb=0.0):
    monkeypatch.setattr(budget, "free_memory_mb", lambda: megabytes)
    monkeypatch.setattr(budget, "resident_memory_mb", lambda: resident_mb)


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    return TracedSteps(make_small_model(), SETTINGS)


@pytest.mark.parametrize(
    ("free_mb", "fits"), [(649, "what fits: --batch_size 32, or --train_type less"), (19, "no batch fits; choose .*")]
)
def test_too_little_memory_is_refused_and_less_training_offered_if_it_fits(steps, monkeypatch, free_mb, fits):
    has_free(monkeypatch, needed(64, 64))
    steps.check(needed, 64, trains_less="--train_type less")
    has_free(monkeypatch, free_mb)
    with pytest.raises(UserError, match=rf"^{ON_64}{free_mb} MB are available; {fits}$"):
        steps.check(needed, 64, trains_less="--train_type less")


def test_where_the_memory_is_not_known_nothing_is_refused(steps, monkeypatch):
    has_free(monkeypatch, None)
    steps.check(needed, 10**9)
    has_free(monkeypatch, 1.0)
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    steps.check(needed, 10**9)
    with pytest.raises(UserError, match="--memory: needs a system that reports the memory"):
        MemoryBudget(1e3)


def test_one_step_is_traced_for_all_sizes_and_selections(steps, monkeypatch):
    traced = []

    class Recorded(TrainStep):
        def __init__(self, *args, **more):
            traced.append(args[2])
            super().__init__(*args, **more)

    monkeypatch.setattr(memory_check, "TrainStep", Recorded)
    everything, head = all_mask(steps.model), head_mask(steps.model)
    whole_mb, parts_mb, small_mb = (steps.needed_mb(everything, *size) for size in ((64, None), (64, 32), (32, None)))
    assert traced == [64]
    assert small_mb < min(parts_mb, whole_mb) and steps.needed_mb(head, 64) < whole_mb
    assert whole_mb - small_mb == pytest.approx(2 * (small_mb - steps.needed_mb(everything, 16))), "in proportion"


@pytest.mark.parametrize("name", with_vit(MODEL_NAMES))
def test_what_certainly_fits_does(name, monkeypatch):
    """The bound that saves tracing is above what the traced step takes."""
    model = models.build_model(name, 64, 10)
    has_free(monkeypatch, 1e6)  # what tracing takes is not counted
    made = TracedSteps(model, Settings(name, batch_size=32, optimizer="adam"))
    has_free(monkeypatch, made.needed_mb(all_mask(model), 32))
    assert not made.certainly_fit(32)
