"""Timing tables load as saved, and are refused if they do not fit the network, its settings or the machine."""

import re
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import BATCH, CLASSES, SIZE, make_table
from small_runs import SETTINGS

from elastic_trainer.cli.commands import profiler_command
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import environment
from elastic_trainer.system.memory_budget import StepMemory
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table_file import TABLE_SETTINGS, load_table, other_setup, save_table, table_folder


@pytest.fixture
def saved(tmp_path, small_model):
    """The settings, the network and the table of a file."""
    table = make_table(small_model, t_fw_ms=0.5)
    count = len(table.names)
    memory = StepMemory(BATCH, np.arange(count) / 2, np.arange(count) + 0.1, np.ones(count))
    fit, features_mb = replace(table.fit, copying_factor=0.5), np.linspace(4, 1, count)
    table = replace(table, memory=memory, fit=fit, features_mb=features_mb)
    network = replace(SETTINGS, logdir=tmp_path, dataset_name="digits")
    table.details.update(environment=environment())
    save_table(table, network, table_folder(network))
    return network, small_model, table


def load(network, model):
    return load_table(network, model, profiler_command(network))


def saved_again(network, model, table, **changed):
    """The table with other fields, and what is loaded after it was saved."""
    table = replace(table, **changed)
    save_table(table, network, table_folder(network))
    return table, load(network, model)


def test_saved_table_loads_unchanged(saved):
    network, model, table = saved
    folder = table_folder(network)
    assert folder.name == f"mobilenetv2-0.5_{SIZE}_{CLASSES}_{BATCH}"
    header = (folder / "table.csv").read_text().splitlines()[0]
    assert header == "name,shape,t_dw_ms,t_dy_ms,t_fw_ms,kernels,features_mb"
    loaded = load(network, model)
    assert loaded.names == table.names and loaded.shapes == table.shapes and loaded.fit == table.fit
    np.testing.assert_array_equal(loaded.positions, table.positions)
    mask = np.random.default_rng(0).random(len(table.names)) < 0.5
    for misses in (1.0, 0.3, 0.0):
        assert loaded.predict(mask, misses) == pytest.approx(table.predict(mask, misses))
    for found, expected in zip(loaded.memory, table.memory, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("copies", [False, True])
def test_the_cheaper_way_equals_a_naive_comparison_and_the_solver_gets_the_largest_so_far(small_model, copies):
    rng, table = np.random.default_rng(0), make_table(small_model)
    count = len(table.names)
    for _ in range(60):
        t_fw_ms, features_mb = rng.exponential(size=count) * (rng.random(count) < 0.7), rng.exponential(size=count)
        before_ms, misses = float(rng.choice([0.0, 0.5])), float(rng.choice([0.0, 0.2, 0.9, 1.0, 3.0]))
        fit = Fit(0.0, 1.0, 1.0, 0.8, None, None, 0, 0, copying_factor=0.5 * copies)
        table = replace(table, t_fw_ms=t_fw_ms, preprocessing_ms=before_ms, features_mb=features_mb, fit=fit)
        costs = table.forward_costs(misses)
        for depth in range(count + 1):
            recomputed_ms, prefix_ms = 0.8 * sum(t_fw_ms[:depth]), 0.8 * (before_ms + sum(t_fw_ms[depth:]))
            copying_ms = 0.5 * copies * features_mb[depth - 1] if depth else 0.0
            computed = (recomputed_ms + prefix_ms, 0.0, False)
            cached = (recomputed_ms + copying_ms, misses * (prefix_ms + copying_ms), True)
            is_possible = misses < 1 and t_fw_ms[depth:].any()
            expected = cached if is_possible and sum(cached[:2]) <= computed[0] else computed
            assert tuple(part[depth] for part in costs) == pytest.approx(expected)
        most_ms = np.maximum.accumulate(costs.step_ms + costs.caching_ms)
        assert copies or np.allclose(most_ms, costs.step_ms + costs.caching_ms), "going deeper never costs less"
        chain_ms = np.cumsum(table.wall_t_dy_ms(misses) - table.t_dy_ms)
        np.testing.assert_allclose(chain_ms, most_ms[1:] - most_ms[0], atol=1e-9)


def test_gammas_load_with_their_kernels_and_wait_for_them(saved):
    kernels = np.full(len(saved[2].names), -1)
    kernels[3] = 5
    table, loaded = saved_again(*saved, kernels=kernels)
    np.testing.assert_array_equal(loaded.kernels, kernels)
    for chosen, kept in (([3, 4], [4]), ([3, 5], [3, 5]), ([5], [5])):
        masks = np.zeros((2, len(kernels)), bool)
        masks[0, table.positions[chosen]] = masks[1, table.positions[kept]] = True
        np.testing.assert_array_equal(loaded.with_kernels(masks[0]), masks[1])


def test_prediction_is_the_sum_of_backward_and_forward_times(small_model):
    rng = np.random.default_rng(0)
    table = make_table(small_model, constant_ms=3.0)
    count = len(table.names)
    table = replace(
        table,
        t_dw_ms=rng.random(count),
        t_dy_ms=rng.random(count),
        t_fw_ms=rng.random(count),
        preprocessing_ms=0.3,
        fit=Fit(3.0, 0.9, 0.4, 0.8, None, None, 0, 0),
    )
    for _ in range(20):
        mask = rng.random(count) < 0.2
        selected = [rank for rank in range(count) if mask[table.positions[rank]]]
        depth = selected[-1] + 1 if selected else 0
        expected_ms = 3.0 + 0.4 * sum(table.t_dw_ms[rank] for rank in selected) + 0.9 * sum(table.t_dy_ms[:depth])
        recomputed_ms, prefix_ms = 0.8 * sum(table.t_fw_ms[:depth]), 0.8 * (0.3 + sum(table.t_fw_ms[depth:]))
        assert table.depth(mask) == depth
        assert table.predict(mask) == pytest.approx((expected_ms + recomputed_ms + prefix_ms, 0.0, False))
        if depth < count:
            cached = (expected_ms + recomputed_ms, 0.25 * prefix_ms, True)
            assert table.predict(mask, 0.25) == pytest.approx(cached)
            assert table.predict_ms(mask, 0.25) == pytest.approx(sum(cached[:2]))


def test_missing_or_foreign_table_names_the_profiler_command(saved):
    network, model, _ = saved
    command = "python profiler.py --model_name mobilenetv2 --dataset_name digits --preset paper"
    with pytest.raises(UserError, match=f"optimizer sgd, not adam; make it again: {command}"):
        load(replace(network, optimizer="adam"), model)
    for other in (
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        keras.Model(model.inputs, model.layers[-2].output),
    ):
        with pytest.raises(UserError, match=f"not the timing table of this network.*{command}"):
            load(network, other)
    (table_folder(network) / "profile.json").unlink()
    with pytest.raises(UserError, match=f"cannot be read: No such file.*{command} --alpha 0.5 --input_size 8"):
        load(network, model)


@pytest.mark.parametrize("part", ["version", "fit", "names", "fixed_mb"])
def test_a_damaged_table_and_one_of_another_version_is_one_line_that_names_the_file(part, saved):
    network, model, _ = saved
    path = table_folder(network) / "profile.json"
    path.write_text(path.read_text().replace(f'"{part}"', '"other"'))
    with pytest.raises(UserError) as caught:
        load(network, model)
    said, _, advice = str(caught.value).partition("; make it again: python profiler.py")
    assert advice and said == f"{path}: is damaged or of another version; delete it"


@pytest.mark.parametrize("setting", TABLE_SETTINGS)
def test_table_of_other_settings_is_refused(setting, saved):
    network, model, _ = saved
    value = {"model_name": "vit", "optimizer": "adam", "alpha": 0.35}.get(setting, 77)
    field = "gradient_clipping" if setting == "clips_gradients" else setting
    other = replace(network, **{field: value})
    table_folder(network).rename(table_folder(other))
    was, changed = getattr(network, setting), getattr(other, setting)
    with pytest.raises(UserError, match=f"measured with --{setting} {was}, not {changed}; make it again"):
        load(other, model)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"packages": {"tensorflow": "2.0.0"}}, r"tensorflow 2\.0\.0, here 2\.\d+\.\d+"),
        ({"usable_cores": 999}, r"usable cores 999, here \d+"),
        ({"thread_settings": {"OMP_NUM_THREADS": "9"}}, r"thread settings {'OMP_NUM_THREADS': '9'}, here {.*}"),
        (
            {"machine": "pdp11", "system": "Multics", "python": "1"},
            r"machine pdp11, here .+; system Multics, here .+",
        ),
    ],
)
def test_table_of_another_setup_says_how_it_differs(changed, words):
    assert other_setup({"environment": environment()}) is None
    found = other_setup({"environment": {**environment(), **changed}})
    assert found is not None and re.fullmatch(f"profiled on a different setup: {words}", found)


def test_table_of_a_trace_has_a_separate_folder_and_no_setup(saved):
    network, model, table = saved
    here = table_folder(network)
    assert table_folder(network, Path("far") / "tx2.xplane.pb") == here.with_name(here.name + "_from_tx2")
    unknown = Fit(2.0, 1.0, 1.0, 1.0, None, None, 0, 0)
    _, loaded = saved_again(network, model, table, fit=unknown, details={})
    assert loaded.fit == unknown
    assert str(other_setup(loaded.details)).startswith("profiled on a different setup: tensorflow None, here 2.")
