"""Whether training fits into memory: what is refused, and which batch is chosen."""

import numpy as np
import pytest

import models
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import MODEL_NAMES
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing import memory_check
from elastic_trainer.timing.memory_check import check_memory, fitting_size, needed_mb, surely_fits


@pytest.fixture(scope="module")
def small():
    return models.build_model("mobilenetv2", 64, 10, alpha=0.35)


def network(**changed):
    return NetworkSettings(
        **{"model_name": "mobilenetv2", "input_size": 64, "batch_size": 64, "alpha": 0.35, **changed}
    )


def fitting(small, mask, in_parts=False):
    """Of a batch of 64: the largest half, quarter, … of it, or part of it, that fits."""

    def needed(size):
        return needed_mb(small, network(), *((64, mask, size) if in_parts else (size, mask)))

    return fitting_size(small, needed, 64)


def has_free(monkeypatch, megabytes):
    monkeypatch.setattr(memory_check, "available_memory_mb", lambda: megabytes)


def test_too_little_memory_is_refused_with_the_batch_that_fits(small, monkeypatch):
    everything, head = all_mask(small), head_mask(small)
    full_mb, head_mb, half_mb = (
        needed_mb(small, network(), size, mask) for size, mask in ((64, everything), (64, head), (32, everything))
    )
    quarters_mb = needed_mb(small, network(), 64, everything, 16)
    assert head_mb < half_mb < quarters_mb < full_mb, "sums of gradients take memory, too"
    has_free(monkeypatch, full_mb + 1)
    check_memory(small, network(), everything)
    assert fitting(small, everything) == fitting(small, everything, in_parts=True) == 64
    has_free(monkeypatch, full_mb - 1)
    check_memory(small, network(), head)
    assert fitting(small, everything) == fitting(small, everything, in_parts=True) == 32
    message = rf"--batch_size 64: training mobilenetv2 on 64 images of 64×64 takes about {full_mb:.0f} MB more"
    with pytest.raises(
        UserError, match=f"{message}, and {full_mb - 1:.0f} MB are available; what fits: --batch_size 32$"
    ):
        check_memory(small, network(), everything)
    with pytest.raises(UserError, match=r"what fits: --batch_size 32, or --train_type less$"):
        check_memory(small, network(), everything, trains_less="--train_type less")
    has_free(monkeypatch, quarters_mb + 1)
    with pytest.raises(UserError, match=r"what fits: --batch_size 32, or --micro_batch 16$"):
        check_memory(small, network(), everything, can_split=True)
    has_free(monkeypatch, quarters_mb - 1)
    with pytest.raises(UserError, match=r"what fits: --micro_batch 8, or --batch_size 16$"):
        check_memory(small, network(), everything, micro_batch=16, can_split=True)
    has_free(monkeypatch, 20.0)
    assert fitting(small, everything) is None
    with pytest.raises(UserError, match="no batch fits; choose a smaller --input_size"):
        check_memory(small, network(), everything)


def test_a_limit_counts_what_the_process_takes_already(small, monkeypatch):
    has_free(monkeypatch, 1e6)
    monkeypatch.setattr(memory_check, "resident_memory_mb", lambda: 800.0)
    full_mb = needed_mb(small, network(), 64, all_mask(small))
    check_memory(small, network(), all_mask(small), 801 + full_mb)
    with pytest.raises(UserError, match=rf"{full_mb - 1:.0f} MB are available \(limit {799 + full_mb:,.0f} MB\)"):
        check_memory(small, network(), all_mask(small), 799 + full_mb)


def test_where_the_memory_is_not_known_nothing_is_refused(small, monkeypatch):
    has_free(monkeypatch, None)
    check_memory(small, network(batch_size=10**9), all_mask(small))
    has_free(monkeypatch, 1.0)
    monkeypatch.setattr(memory_check, "has_own_memory", lambda: True)
    check_memory(small, network(batch_size=10**9), all_mask(small))


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("batch_size", [1, 32])
def test_what_surely_fits_does(name, batch_size):
    """The bound that saves tracing is above what the traced step takes."""
    model = models.build_model(name, 64, 10)
    settings = network(model_name=name, batch_size=batch_size, alpha=1.0, optimizer="adam")
    needed = needed_mb(model, settings, batch_size, np.ones(len(model.trainable_variables), bool))
    assert not surely_fits(model, batch_size, needed)
