"""Whether training fits into memory: what is refused, and which batch is chosen."""

from functools import partial

import pytest

import models
from elastic_trainer.errors import UserError
from elastic_trainer.memory import budget
from elastic_trainer.memory.budget import MemoryBudget
from elastic_trainer.networks.names import MODEL_NAMES
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing import memory_check
from elastic_trainer.timing.memory_check import TracedSteps


@pytest.fixture(scope="module")
def small():
    return models.build_model("mobilenetv2", 64, 10, alpha=0.35)


def network(**changed):
    return NetworkSettings(
        **{"model_name": "mobilenetv2", "input_size": 64, "batch_size": 64, "alpha": 0.35, **changed}
    )


@pytest.fixture(scope="module")
def steps(small):
    return TracedSteps(small, network())


def needed(steps, mask):
    return partial(steps.needed_mb, mask)


def has_free(monkeypatch, megabytes, resident_mb=0.0):
    monkeypatch.setattr(budget, "available_memory_mb", lambda: megabytes)
    monkeypatch.setattr(budget, "resident_memory_mb", lambda: resident_mb)
    monkeypatch.setattr(budget, "reachable_memory_mb", lambda: resident_mb + (megabytes or 0.0))


def test_too_little_memory_is_refused_with_the_batch_that_fits(small, steps, monkeypatch):
    has_free(monkeypatch, 1e6)  # what tracing takes is not counted
    everything, head = needed(steps, all_mask(small)), needed(steps, head_mask(small))
    full_mb, head_mb, half_mb, quarters_mb = everything(64), head(64), everything(32), everything(64, 16)
    assert head_mb < half_mb < quarters_mb < full_mb, "sums of gradients take memory, too"
    has_free(monkeypatch, full_mb + 1)
    steps.check(everything, 64)
    has_free(monkeypatch, full_mb - 1)
    steps.check(head, 64)
    message = rf"memory: training mobilenetv2 on 64 images of 64×64 takes about {full_mb:.0f} MB more"
    with pytest.raises(
        UserError, match=f"{message}, and {full_mb - 1:.0f} MB are available; what fits: --batch_size 32$"
    ):
        steps.check(everything, 64)
    with pytest.raises(UserError, match=r"what fits: --batch_size 32, or --train_type less$"):
        steps.check(everything, 64, trains_less="--train_type less")
    has_free(monkeypatch, quarters_mb + 1)
    with pytest.raises(UserError, match=r"what fits: --batch_size 32, or --micro_batch 16$"):
        steps.check(everything, 64, can_split=True)
    has_free(monkeypatch, quarters_mb - 1)
    with pytest.raises(UserError, match=r"what fits: --micro_batch 8, or --batch_size 16$"):
        steps.check(everything, 64, 16, can_split=True)
    has_free(monkeypatch, 20.0)
    with pytest.raises(UserError, match="no batch fits; choose a smaller --input_size"):
        steps.check(everything, 64, trains_less="--train_type less")


def test_a_step_is_traced_once(small, monkeypatch):
    traced = []

    def training_mb(step):
        traced.append(step)
        return [len(traced)]

    monkeypatch.setattr(memory_check, "training_mb", training_mb)
    made = TracedSteps(small, network())
    sizes = [(64, None), (64, 32), (64, None), (64, 64), (64, 32), (32, None)]
    assert [made.needed_mb(all_mask(small), *size) for size in sizes] == [1, 2, 1, 1, 2, 3]
    assert made.needed_mb(head_mask(small), 64) == 4


def test_a_limit_counts_what_the_process_takes_already(small, monkeypatch):
    has_free(monkeypatch, 1e6, resident_mb=800.0)
    made = TracedSteps(small, network(), MemoryBudget(1.0))
    everything = needed(made, all_mask(small))
    made.memory.limit_mb = 801 + everything(64)
    made.check(everything, 64)
    made.memory.limit_mb = limit_mb = 799 + everything(64)
    with pytest.raises(
        UserError, match=rf"{limit_mb - 800:.0f} MB are available \(limit {limit_mb:,.0f} MB, taken 800"
    ):
        made.check(everything, 64)


def test_where_the_memory_is_not_known_nothing_is_refused(small, steps, monkeypatch):
    has_free(monkeypatch, None)
    steps.check(needed(steps, all_mask(small)), 10**9)
    has_free(monkeypatch, 1.0)
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    steps.check(needed(steps, all_mask(small)), 10**9)
    with pytest.raises(UserError, match="--memory: needs a system that reports the memory"):
        MemoryBudget(1e3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_what_certainly_fits_does(name, monkeypatch):
    """The bound that saves tracing is above what the traced step takes."""
    model = models.build_model(name, 64, 10)
    made = TracedSteps(model, network(model_name=name, alpha=1.0, optimizer="adam"))
    has_free(monkeypatch, 1e6)
    for batch_size in (1, 32):
        has_free(monkeypatch, made.needed_mb(all_mask(model), batch_size))
        assert not made.certainly_fit(batch_size)
