"""The profiler makes a timing table by measuring, by counting FLOPs, or from a trace of another board."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import record_trace_fixture as fixture
from conftest import make_small_model, with_vit
from small_runs import SETTINGS
from traces import GRADIENT_MS, tx2_trace

import models
import profiler
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.profiling import measuring
from elastic_trainer.profiling.profile import table_of_trace
from elastic_trainer.settings import Settings
from elastic_trainer.timing.trace import read_trace


def test_profile_gives_a_complete_table_and_keeps_the_weights(tmp_path, small_model):
    before = [v.numpy() for v in small_model.trainable_variables]
    table = profiler.profile(small_model, SETTINGS, tmp_path)
    for old, variable in zip(before, small_model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())
    assert sorted(table.positions) == list(range(len(before)))
    assert table.details["unmatched_time_percent"] < 2
    assert 0 < table.gradient_pass_ms < 1.2 * table.full_step_ms
    assert table.t_dw_ms.sum() > 0 and table.t_dy_ms.sum() > 0 and table.t_fw_ms.sum() > 0
    assert table.fit.t_fw_factor > 0
    cached = [step["trained_tensors"] for step in table.details["measured_steps"] if step["from_features"]]
    assert min(cached) == head_mask(small_model).sum() and max(cached) < len(before)
    assert any(
        "from cached features, once made: 0." in line for line in profiler._report(table, head_mask(small_model))
    )
    assert table.predict_ms(np.ones(len(before), bool)) > table.predict_ms(head_mask(small_model))
    doubtful = replace(table, fit=replace(table.fit, median_error_percent=26.0))
    assert any("unreliable" in line for line in profiler._report(doubtful, head_mask(small_model)))
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    profiler.draw_table(table, replace(SETTINGS, model_name="$\\frac{$.keras"), tmp_path / "timing")
    assert (tmp_path / "timing.png").stat().st_size > 1000 and (tmp_path / "timing.pdf").is_file()


def test_profile_of_a_network_that_starts_at_random_knows_no_prefix(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 5)
    small = make_small_model()
    inputs = keras.Input(small.input_shape[1:])
    model = keras.Model(inputs, small(keras.layers.RandomFlip(seed=0)(inputs)))
    table = profiler.profile(model, SETTINGS, tmp_path)
    assert not table.t_fw_ms.any()
    assert not any(step["from_features"] for step in table.details["measured_steps"])
    head = head_mask(model)
    assert table.predict(head, misses=0.0) == table.predict(head)


@pytest.mark.parametrize("name", with_vit(GRADIENT_MS))
def test_tx2_trace_gives_a_complete_table(name):
    trace = read_trace(tx2_trace(name))
    model = models.build_model(name, 224, 200, "none")
    network = Settings(name, batch_size=4, optimizer="sgd")
    training = measuring.idle_training(model, network)
    table = table_of_trace(training, trace, f"{name}.xplane.pb")
    assert table.details["unmatched_time_percent"] < 2
    assert table.full_step_ms == pytest.approx(trace.total_ms)
    assert table.predict_ms(np.ones(len(table.names), bool)) == pytest.approx(table.full_step_ms)
    gradient_ms = float(table.t_dw_ms.sum() + table.t_dy_ms.sum())
    assert gradient_ms >= GRADIENT_MS[name] and table.details["operation_ms"]["updates"] == 0
    smallest = table.predict_ms(head_mask(model)) / table.full_step_ms
    assert 0.2 < smallest < 0.45


def test_profiler_command_plans_from_a_trace(tmp_path, monkeypatch, capsys):
    """As a user runs it, except that the small network of the trace replaces ResNet50."""
    monkeypatch.setattr(models, "build_model", lambda *_: fixture.small_network())
    words = ["profiler.py", "--from_trace", str(fixture.TARGET), "--model_name", "resnet50", "--batch_size", "4"]
    monkeypatch.setattr("sys.argv", [*words, "--num_classes", "3", "--input_size", "16", "--logdir", str(tmp_path)])
    profiler.main()
    printed = capsys.readouterr().out
    assert "small_step.xplane.pb: 3 complete iterations on /host:CPU" in printed
    assert "not measured" in printed and "smallest feasible rho" in printed and "equal importance" in printed
    folder = tmp_path / "profiles" / "resnet50_16_3_4_from_small_step"
    profile = json.loads((folder / "profile.json").read_text())
    assert (profile["trace"], profile["traced_steps"], profile["planes"]) == ("small_step.xplane.pb", 3, ["/host:CPU"])
    assert str(fixture.TARGET.parent) not in (folder / "profile.json").read_text()
    assert profile["fit"]["median_error_percent"] is None and profile["unmatched_time_percent"] < 2
    assert (folder / "timing.png").is_file() and (folder / "table.csv").is_file()
