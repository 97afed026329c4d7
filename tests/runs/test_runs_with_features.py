"""Runs that keep features end with the weights of runs that do not, also after a power cut."""

import csv

import numpy as np
import pytest
from conftest import BATCH, make_small_data
from interrupted_runs import InterruptingData, PowerCut, run

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.training.feature_cache import FeatureCache


class Mirrored(InterruptingData):
    """The small data with mirroring; see `InterruptingData`."""

    def __init__(self, at=None):
        super().__init__(at)
        plain = make_small_data()
        self._data = ImageData("small", plain.class_names, plain._train, plain._test, BATCH, 0, augment="flip")


@pytest.fixture
def reads(monkeypatch):
    """Features are kept whatever the clock says; the number of steps that read some."""
    steps = []
    decide, read = FeatureCache.is_worth_it, FeatureCache.read
    monkeypatch.setattr(FeatureCache, "is_worth_it", lambda *args: decide(*args) or True)

    def counting(self, keys):
        steps.append(len(keys))
        return read(self, keys)

    monkeypatch.setattr(FeatureCache, "read", counting)
    return steps


def test_an_elastic_run_with_features_is_one_without_also_after_power_cuts(tmp_path, reads):
    changes = {"elastic": True, "num_epochs": 4, "rho": 0.7}  # selects eight times
    expected, _ = run(tmp_path / "off", Mirrored(), feature_cache="off", **changes)
    assert not reads
    weights, summary = run(tmp_path / "kept", Mirrored(), **changes)
    assert len(reads) > 10 and summary["feature_seconds"] > 0
    with (tmp_path / "kept" / "selections.csv").open(newline="") as file:
        chosen = {(row["epoch"], row["name"]) for row in csv.DictReader(file) if row["chosen"] == "1"}
    assert len({frozenset(name for at, name in chosen if at == epoch) for epoch, _ in chosen}) > 1
    for at in (4, 10, 17):
        with pytest.raises(PowerCut):
            run(tmp_path / "resumed", Mirrored(at), **changes)
    resumed, _ = run(tmp_path / "resumed", Mirrored(), **changes)
    for one, other, third in zip(expected, weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
