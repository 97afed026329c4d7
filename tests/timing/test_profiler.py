"""The profiler: attribution by data flow against a naive reading of it, the fit, the table's file."""

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import BATCH, CLASSES, SIZE, full_step, make_small_model, make_table, naive_needs
from small_runs import SETTINGS

import profiler
from elastic_trainer import machine
from elastic_trainer.cli.commands import profiler_command
from elastic_trainer.machine import environment, stolen_seconds
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.settings import DataSettings
from elastic_trainer.timing import wall_time
from elastic_trainer.timing.attribution import attribute_times
from elastic_trainer.timing.fit import fit_wall_time, selection_sums
from elastic_trainer.timing.table import TABLE_SETTINGS, load_table, stale_since, table_folder, table_settings
from elastic_trainer.timing.wall_time import measure_ms, without_drift
from utils import UserError


@pytest.fixture(scope="module")
def attributed():
    """A step of the small network, random operation times, and their attribution."""
    model = make_small_model()
    step = full_step(model)
    rng = np.random.default_rng(0)
    op_ms = {op.name: float(rng.exponential()) for op in step.graph.get_operations()}
    return model, step, op_ms, attribute_times(step, model.trainable_variables, op_ms)


def test_attribution_equals_the_naive_reading_of_the_data_flow(attributed):
    _, step, op_ms, costs = attributed
    forward, needs = naive_needs(step)
    count = len(needs)
    order = sorted(range(count), key=lambda k: (len(needs[k]), -k))
    assert costs.positions.tolist() == order
    assert costs.forward_ms == pytest.approx(sum(op_ms[name] for name in forward))
    seen: set[str] = set()
    for rank, k in enumerate(order):
        others = set().union(*(needs[j] for j in range(count) if j != k))
        own = needs[k] - others
        shared = (needs[k] & others) - seen
        seen |= shared
        gradient_ms = costs.t_dw_ms[rank] - costs.update_ms[rank]
        assert gradient_ms == pytest.approx(sum(op_ms[name] for name in own))
        assert costs.t_dy_ms[rank] == pytest.approx(sum(op_ms[name] for name in shared))


def test_every_operation_is_counted_once(attributed):
    _, _, op_ms, costs = attributed
    counted = costs.forward_ms + costs.other_ms + costs.t_dw_ms.sum() + costs.t_dy_ms.sum()
    assert counted == pytest.approx(sum(op_ms.values()))


def test_chain_sum_is_never_below_the_operations_a_selection_needs(attributed):
    _, step, op_ms, costs = attributed
    _, needs = naive_needs(step)
    rng = np.random.default_rng(1)
    gradient_ms = costs.t_dw_ms - costs.update_ms
    for _ in range(300):
        selected = rng.random(len(needs)) < rng.random()
        union = set().union(*(needs[costs.positions[k]] for k in np.flatnonzero(selected)))
        chain, own = selection_sums(selected, costs.t_dy_ms, gradient_ms)
        assert chain + own >= sum(op_ms[name] for name in union) - 1e-9


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "ResourceApplyKerasMomentum"), ("adam", "ResourceApplyAdam")])
def test_each_update_belongs_to_its_tensor(optimizer, kind):
    model = make_small_model()
    step = full_step(model, optimizer)
    operations = step.graph.get_operations()
    updates = {op.name: 1.0 for op in operations if op.type == kind}
    assert len(updates) == len(model.trainable_variables)
    costs = attribute_times(step, model.trainable_variables, updates)
    np.testing.assert_array_equal(costs.update_ms, 1.0)
    if optimizer == "sgd":  # weight decay is part of the update
        decay = {op.name: 1.0 for op in operations if op.type == "AssignSubVariableOp"}
        costs = attribute_times(step, model.trainable_variables, decay)
        np.testing.assert_array_equal(costs.update_ms, 1.0)


def test_tensors_come_output_first(attributed):
    model, _, _, costs = attributed
    names = [tensor_names(model)[k] for k in costs.positions]
    assert set(names[:2]) == {"head/kernel", "head/bias"}
    assert names[-1].startswith("stem/")


def test_the_fit_finds_the_factors_and_leaves_out_fairly():
    rng = np.random.default_rng(0)
    chain, own = rng.uniform(0, 50, (2, 12))
    fit = fit_wall_time(chain, own, 10 + 0.7 * chain + 0.4 * own, rounds=1)
    assert (fit.constant_ms, fit.chain_factor, fit.own_factor) == pytest.approx((10, 0.7, 0.4))
    assert (fit.p95_error_percent, fit.median_error_percent) == pytest.approx((0, 0), abs=1e-6)


def test_profiling_a_network_end_to_end(tmp_path, small_model):
    before = [v.numpy() for v in small_model.trainable_variables]
    table = profiler.profile(small_model, SETTINGS, tmp_path)
    for old, variable in zip(before, small_model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())
    assert sorted(table.positions) == list(range(len(before)))
    assert table.details["unmatched_time_percent"] < 2
    assert 0 < table.forward_ms < table.full_step_ms
    updates_ms = table.fit.own_factor * table.details["operation_ms"]["updates"]
    assert 0 < updates_ms == pytest.approx(table.full_step_ms - table.gradient_pass_ms)
    assert table.t_dw_ms.sum() > 0 and table.t_dy_ms.sum() > 0
    assert table.predict_ms(np.ones(len(before), bool)) > table.predict_ms(head_mask(small_model))
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    profiler.draw_table(table, tmp_path / "timing")
    assert (tmp_path / "timing.png").stat().st_size > 1000 and (tmp_path / "timing.pdf").is_file()


@pytest.fixture
def saved(tmp_path, small_model):
    table = make_table(small_model)
    table.settings.update(table_settings(SETTINGS))
    table.details["environment"] = environment()
    table.save(table_folder(SETTINGS, tmp_path))
    return tmp_path, tensor_names(small_model), table


def load(logdir, names, table, network=SETTINGS, allow_stale=False):
    shapes = dict(zip(table.positions, table.shapes, strict=True))
    remake = profiler_command(network, DataSettings("digits"), logdir)
    in_order = [shapes.get(k, ()) for k in range(len(names))]
    return load_table(table_folder(network, logdir), network, names, in_order, remake, allow_stale)


def test_the_table_is_read_back_as_written(saved):
    logdir, names, table = saved
    assert table_folder(SETTINGS, logdir).name == f"mobilenetv2-0.5_{SIZE}_{CLASSES}_{BATCH}"
    header = (table_folder(SETTINGS, logdir) / "table.csv").read_text().splitlines()[0]
    assert header == "name,shape,order,t_dw_ms,t_dy_ms"
    loaded = load(logdir, names, table)
    assert loaded.names == table.names and loaded.shapes == table.shapes and loaded.fit == table.fit
    np.testing.assert_array_equal(loaded.positions, table.positions)
    mask = np.random.default_rng(0).random(len(names)) < 0.5
    assert loaded.predict_ms(mask) == pytest.approx(table.predict_ms(mask))


def test_a_missing_damaged_or_foreign_table_names_the_command_to_run(saved):
    logdir, names, table = saved
    folder = table_folder(SETTINGS, logdir)
    command = "python profiler.py --model_name mobilenetv2 --dataset_name digits --alpha 0.5 --input_size 8"
    with pytest.raises(UserError, match=f"optimizer sgd, not adam; make it again: {command}"):
        load(logdir, names, table, replace(SETTINGS, optimizer="adam"))
    with pytest.raises(UserError, match=f"not the timing table of this network.*{command}"):
        load(logdir, ["other", *names[1:]], table)
    with pytest.raises(UserError, match=r"holds \d+ of this network's \d+ tensors"):
        load(logdir, [*names, "more"], table)
    with pytest.raises(UserError, match="measured with --optimizer sgd, not adam; --augment none, not flip; make it"):
        load(logdir, names, table, replace(SETTINGS, optimizer="adam", augment="flip"))
    table.shapes[0] = (1, 2)
    with pytest.raises(UserError, match=r"holds .* with shape \(\d+.*\), not \(1, 2\)"):
        load(logdir, names, table)
    record = json.loads((folder / "profile.json").read_text())
    for damaged in (json.dumps(record)[:-30], "[]", "", json.dumps({**record, "model_name": None})):
        (folder / "profile.json").write_text(damaged)
        with pytest.raises(UserError, match=f"(not a timing table|--model_name None).*make it again: {command}"):
            load(logdir, names, table)
    (folder / "profile.json").write_text(json.dumps({**record, "full_step_ms": "fast"}))
    with pytest.raises(UserError, match=f"not the timing table of this network.*{command}"):
        load(logdir, names, table)
    (folder / "table.csv").unlink()
    with pytest.raises(UserError, match=f"no timing table in .*{command}"):
        load(logdir, names, table)


def test_a_tensor_without_gradient_comes_last_and_costs_nothing():
    model = make_small_model()
    lonely = model.add_weight(shape=(3,), name="lonely")
    index = next(k for k, v in enumerate(model.trainable_variables) if v is lonely)
    step = full_step(model)
    assert step.gradients[index] is None
    costs = attribute_times(step, model.trainable_variables, {op.name: 1.0 for op in step.graph.get_operations()})
    assert costs.positions[-1] == index
    assert costs.t_dy_ms[-1] == 0 and costs.t_dw_ms[-1] == 0


def test_a_drift_of_the_machine_does_not_pass_for_a_difference_between_runs():
    """Runs of known times on a machine that a neighbour slows down for spells of some calls."""
    rng = np.random.default_rng(0)
    true_ms = np.array([100.0, 140.0, 60.0, 180.0, 120.0, 90.0, 160.0])
    calls = 12 * len(true_ms)
    speed = np.ones(calls)
    for begin in range(5, calls, 25):
        speed[begin : begin + 10] = rng.uniform(1.2, 1.6)
    times = true_ms * (speed * rng.normal(1, 0.01, calls)).reshape(12, -1)
    plain, found = (np.abs(np.median(t, axis=0) / true_ms - 1).max() for t in (times, without_drift(times)))
    assert found < 0.02 < plain


@pytest.mark.parametrize(("stolen_ms", "calls"), [([0, 0], 1), ([9, 0], 2), ([9, 9, 0], 3), ([9, 9, 9], 3)])
def test_a_call_that_others_disturbed_is_measured_again(stolen_ms, calls, monkeypatch):
    clock = [0.0, 0.0]  # wall time, stolen time
    done = iter(stolen_ms)

    def run():
        clock[0] += 0.1
        clock[1] += next(done) / 1e3

    monkeypatch.setattr(wall_time.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(wall_time, "stolen_seconds", lambda: clock[1])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)  # of 400 ms, 8 may be stolen
    assert measure_ms([run], 1, most_tries=3).tolist() == [[pytest.approx(100)]]
    assert clock[0] == pytest.approx(calls * 0.1)


def test_stolen_time_is_what_the_kernel_tells(tmp_path):
    assert stolen_seconds(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc" / "stat").write_text(f"cpu  11 12 13 14 15 16 17 {3 * ticks} 19 20\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert stolen_seconds(tmp_path) == 3
    (tmp_path / "proc" / "stat").write_text("cpu  11 12 13 14\n")
    assert stolen_seconds(tmp_path) == 0


def test_without_a_drift_times_stay_as_they_are():
    times = np.random.default_rng(0).normal([10.0, 30.0, 20.0], 0.1, (20, 3))
    np.testing.assert_allclose(np.median(without_drift(times), 0), np.median(times, 0), rtol=0.01)


@pytest.mark.parametrize("setting", TABLE_SETTINGS)
def test_a_table_copied_from_other_settings_is_refused_even_if_a_stale_one_is_allowed(setting, saved):
    logdir, names, table = saved
    changed = {"model_name": "vit", "optimizer": "adam", "augment": "flip", "alpha": 0.35}.get(setting, 77)
    other = replace(SETTINGS, **{setting: changed})  # type: ignore[arg-type]
    folder = table_folder(SETTINGS, logdir)
    if table_folder(other, logdir) != folder:
        folder.rename(table_folder(other, logdir))
    with pytest.raises(
        UserError, match=f"measured with --{setting} {getattr(SETTINGS, setting)}, not {changed}; make it again"
    ):
        load(logdir, names, table, other, allow_stale=True)


ELSEWHERE = {
    "tensorflow": ("packages", {"tensorflow": "2.0.0"}, r"TensorFlow 2\.0\.0, here 2\.\d+\.\d+"),
    "machine": ("machine", "pdp11", r"machine pdp11, here \w+"),
    "processor": ("processor", "abacus", r"processor abacus, here .+"),
    "cores": ("cores", 999, r"cores 999, here \d+"),
    "usable cores": ("usable_cores", 999, r"usable cores 999, here \d+"),
    "threads": ("thread_settings", {"OMP_NUM_THREADS": "99"}, r"thread settings OMP_NUM_THREADS=99, here \w+"),
    "system": ("system", "Multics", r"system Multics, here \w+"),
}


def change_environment(logdir, **changed):
    path = table_folder(SETTINGS, logdir) / "profile.json"
    record = json.loads(path.read_text())
    record["environment"].update(changed)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_table_made_elsewhere_is_refused_or_with_a_warning_allowed(what, saved, capsys):
    logdir, names, table = saved
    key, value, words = ELSEWHERE[what]
    change_environment(logdir, **{key: value})
    with pytest.raises(
        UserError, match=f"made elsewhere: {words}; make it again: python profiler.* with --allow_stale_profile$"
    ):
        load(logdir, names, table)
    assert load(logdir, names, table, allow_stale=True).names == table.names
    assert re.match(rf"warning: .*made elsewhere: {words}; used all the same \(", capsys.readouterr().out)


def test_everything_that_differs_is_named_and_what_was_not_recorded_is_not_compared(saved):
    logdir, names, table = saved
    change_environment(logdir, machine="pdp11", system="Multics", cores=None, python="1.5.2")
    with pytest.raises(UserError, match=r"made elsewhere: machine pdp11, here \w+; system Multics, here \w+; make it"):
        load(logdir, names, table)


def test_a_table_that_does_not_say_where_it_was_made_is_refused(saved, capsys):
    logdir, names, table = saved
    path = table_folder(SETTINGS, logdir) / "profile.json"
    record = json.loads(path.read_text())
    del record["environment"]
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="made elsewhere: it does not say on what machine; make it again"):
        load(logdir, names, table)
    load(logdir, names, table, allow_stale=True)
    assert "warning: " in capsys.readouterr().out


def test_the_same_machine_and_versions_are_no_difference():
    now = environment()
    assert stale_since(json.loads(json.dumps(now)), now) == []
