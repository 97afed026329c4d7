"""Runs that keep features: as runs without where both train the same, and resumed as unbroken."""

import numpy as np
import pytest
from conftest import BATCH, make_small_data, make_small_model, make_table
from interrupted_runs import InterruptingData, PowerCut
from small_runs import rows_of

import train
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.engine.features import FeatureCache
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings


class Mirrored(InterruptingData):
    """The small data with mirroring; see `InterruptingData`."""

    def __init__(self, at=None):
        super().__init__(at)
        plain = make_small_data()
        self._data = ImageData("small", plain.class_names, plain._train, plain._test, BATCH, 0, augment="flip")


@pytest.fixture
def reads(monkeypatch):
    """How many images' features were read by each step."""
    steps: list[int] = []
    read = FeatureCache.read

    def counting(self, order):
        steps.append(len(order.rows))
        return read(self, order)

    monkeypatch.setattr(FeatureCache, "read", counting)
    return steps


def run(folder, data, name="elastic_training", **changes):
    """Eight epochs, selecting every second one where the forward pass takes half of a step. Weights and summary."""
    settings = Settings(
        **{
            "learning_rate": 0.05,
            "num_epochs": 8,
            "interval": 2,
            "rho": 0.65,
            "deterministic": True,
            "checkpoint_minutes": 0,
            "trained_layers": 2,
            "feature_cache": "float32",
            **changes,
        }
    )
    folder.mkdir(exist_ok=True)
    model = make_small_model()
    table = make_table(model, t_fw_ms=2.0, constant_ms=1.0) if name == "elastic_training" else None
    with RunLog(folder, {"seed": 0}, tensor_names(model)) as log:
        summary = train.train(name, model, data, settings, log, table)
    return [variable.numpy() for variable in model.variables], summary


def selections(folder):
    """The names chosen by each selection."""
    rows = rows_of(folder / "selections.csv")
    return [
        [row["name"] for row in rows if row["step"] == step and row["chosen"] == "1"]
        for step in dict.fromkeys(row["step"] for row in rows)
    ]


def test_a_run_of_the_last_layers_with_features_is_one_without(tmp_path, reads):
    expected, _ = run(tmp_path / "off", Mirrored(), "last_layers_training", feature_cache="off")
    assert not reads
    weights, summary = run(tmp_path / "kept", Mirrored(), "last_layers_training")
    assert len(reads) >= 8 * 6 and summary["feature_seconds"] > 0
    for one, other in zip(expected, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_elastic_run_with_features_selects_more_and_is_resumed_as_if_unbroken(tmp_path, reads):
    run(tmp_path / "off", Mirrored(), feature_cache="off")
    assert not reads
    expected, _ = run(tmp_path / "unbroken", Mirrored())
    assert len(reads) >= 12
    chosen, without = selections(tmp_path / "unbroken"), selections(tmp_path / "off")
    assert len({*map(tuple, chosen)}) > 1 and len(chosen) == 4
    assert len(chosen[0]) > len(without[0])
    for at in (12, 13, 30):  # at a selection, between one and the next step, and later
        with pytest.raises(PowerCut):
            run(tmp_path / "resumed", Mirrored(at))
    resumed, _ = run(tmp_path / "resumed", Mirrored())
    assert selections(tmp_path / "resumed") == chosen
    for one, other in zip(expected, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
