"""Whether training fits into memory: what is refused, and which batch is chosen."""

from functools import partial

import pytest

import models
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import MODEL_NAMES
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing import memory_check
from elastic_trainer.timing.memory_check import TracedSteps, check_memory, fitting_size, surely_fits


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


def check(steps, mask, *args, count=64, **more):
    check_memory(steps, partial(steps.needed_mb, mask), count, *args, **more)


def fitting(steps, mask, in_parts=False):
    """Of a batch of 64: the largest half, quarter, … of it, or part of it, that fits."""

    def needed(size):
        return steps.needed_mb(mask, *((64, size) if in_parts else (size,)))

    return fitting_size(steps.model, needed, 64)


def has_free(monkeypatch, megabytes):
    monkeypatch.setattr(memory_check, "available_memory_mb", lambda: megabytes)


def test_too_little_memory_is_refused_with_the_batch_that_fits(small, steps, monkeypatch):
    everything, head = all_mask(small), head_mask(small)
    full_mb, head_mb, half_mb = (
        steps.needed_mb(mask, size) for size, mask in ((64, everything), (64, head), (32, everything))
    )
    quarters_mb = steps.needed_mb(everything, 64, 16)
    assert head_mb < half_mb < quarters_mb < full_mb, "sums of gradients take memory, too"
    has_free(monkeypatch, full_mb + 1)
    check(steps, everything)
    assert fitting(steps, everything) == fitting(steps, everything, in_parts=True) == 64
    has_free(monkeypatch, full_mb - 1)
    check(steps, head)
    assert fitting(steps, everything) == fitting(steps, everything, in_parts=True) == 32
    message = rf"--batch_size 64: training mobilenetv2 on 64 images of 64×64 takes about {full_mb:.0f} MB more"
    with pytest.raises(
        UserError, match=f"{message}, and {full_mb - 1:.0f} MB are available; what fits: --batch_size 32$"
    ):
        check(steps, everything)
    with pytest.raises(UserError, match=r"what fits: --batch_size 32, or --train_type less$"):
        check(steps, everything, trains_less="--train_type less")
    has_free(monkeypatch, quarters_mb + 1)
    with pytest.raises(UserError, match=r"what fits: --batch_size 32, or --micro_batch 16$"):
        check(steps, everything, can_split=True)
    has_free(monkeypatch, quarters_mb - 1)
    with pytest.raises(UserError, match=r"what fits: --micro_batch 8, or --batch_size 16$"):
        check(steps, everything, micro_batch=16, can_split=True)
    has_free(monkeypatch, 20.0)
    assert fitting(steps, everything) is None
    with pytest.raises(UserError, match="no batch fits; choose a smaller --input_size"):
        check(steps, everything)


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


def test_a_limit_counts_what_the_process_takes_already(small, steps, monkeypatch):
    has_free(monkeypatch, 1e6)
    monkeypatch.setattr(memory_check, "resident_memory_mb", lambda: 800.0)
    full_mb = steps.needed_mb(all_mask(small), 64)
    check(steps, all_mask(small), 801 + full_mb)
    with pytest.raises(UserError, match=rf"{full_mb - 1:.0f} MB are available \(limit {799 + full_mb:,.0f} MB\)"):
        check(steps, all_mask(small), 799 + full_mb)


def test_where_the_memory_is_not_known_nothing_is_refused(small, steps, monkeypatch):
    has_free(monkeypatch, None)
    check(steps, all_mask(small), count=10**9)
    has_free(monkeypatch, 1.0)
    monkeypatch.setattr(memory_check, "has_gpu", lambda: True)
    check(steps, all_mask(small), count=10**9)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_what_surely_fits_does(name):
    """The bound that saves tracing is above what the traced step takes."""
    model = models.build_model(name, 64, 10)
    made = TracedSteps(model, network(model_name=name, alpha=1.0, optimizer="adam"))
    for batch_size in (1, 32):
        assert not surely_fits(model, batch_size, made.needed_mb(all_mask(model), batch_size))
