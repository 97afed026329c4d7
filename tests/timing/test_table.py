"""Timing tables load as saved, and are refused if they do not fit the network, its settings or the machine."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import BATCH, CLASSES, SIZE, make_table
from small_runs import SETTINGS

from elastic_trainer.cli.commands import profiler_command
from elastic_trainer.engine.memory import StepMemory
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import alone_in
from elastic_trainer.system.machine import environment
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import (
    TABLE_SETTINGS,
    StaleTableError,
    load_table,
    save_table,
    table_folder,
    table_settings,
)

GRAPH = "a1b2"


@pytest.fixture
def saved(tmp_path, small_model):
    table = make_table(small_model, t_fw_ms=0.5)
    count = len(table.names)
    memory = StepMemory(BATCH, np.arange(count) / 2, np.arange(count) + 0.1, np.ones(count))
    table = replace(table, memory=memory)
    table.settings.update(table_settings(SETTINGS))
    table.details.update(environment=environment(), graph_digest=GRAPH)
    save_table(table, table_folder(replace(SETTINGS, logdir=tmp_path)))
    return tmp_path, tensor_names(small_model), table


def load(logdir, names, table, network=SETTINGS, allow_stale=False, graph=GRAPH):
    network = replace(network, logdir=logdir, dataset_name="digits")
    shapes = dict(zip(table.positions, table.shapes, strict=True))
    remake = profiler_command(network)
    in_order = [shapes.get(k, ()) for k in range(len(names))]
    return load_table(table_folder(network), table_settings(network), names, in_order, graph, remake, allow_stale)


def test_saved_table_loads_unchanged(saved):
    logdir, names, table = saved
    assert table_folder(replace(SETTINGS, logdir=logdir)).name == f"mobilenetv2-0.5_{SIZE}_{CLASSES}_{BATCH}"
    header = (table_folder(replace(SETTINGS, logdir=logdir)) / "table.csv").read_text().splitlines()[0]
    assert header == "name,shape,order,t_dw_ms,t_dy_ms,t_fw_ms,kernel,features_mb"
    loaded = load(logdir, names, table)
    assert loaded.names == table.names and loaded.shapes == table.shapes and loaded.fit == table.fit
    np.testing.assert_array_equal(loaded.positions, table.positions)
    mask = np.random.default_rng(0).random(len(names)) < 0.5
    for misses in (1.0, 0.3, 0.0):
        assert loaded.predict(mask, misses) == pytest.approx(table.predict(mask, misses))
    for found, expected in zip(loaded.memory, table.memory, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_features_that_take_room_take_time_and_the_solver_gets_the_largest_so_far(saved):
    logdir, names, table = saved
    features_mb = np.linspace(4, 1, len(names))  # the deeper the cut, the smaller
    table = replace(table, features_mb=features_mb, fit=replace(table.fit, reading_factor=0.5, writing_factor=0.25))
    save_table(table, table_folder(replace(SETTINGS, logdir=logdir)))
    loaded = load(logdir, names, table)
    mask, misses = np.zeros(len(names), bool), 0.2
    mask[table.positions[3]] = True
    plain = replace(table, features_mb=np.zeros(len(names)))
    added_ms = (0.5 + 0.2 * 0.25) * features_mb[3]
    assert loaded.predict_ms(mask, misses) == table.predict_ms(mask, misses)
    assert table.predict_ms(mask, misses) == pytest.approx(plain.predict_ms(mask, misses) + added_ms)
    assert (table.wall_t_dy_ms(misses) >= 0).all()
    costs = table.forward_costs(misses)
    most_ms = np.maximum.accumulate(costs.step_ms + costs.caching_ms)
    chain_ms = np.cumsum(table.wall_t_dy_ms(misses) - table.fit.t_dy_factor * table.t_dy_ms)
    np.testing.assert_allclose(chain_ms, most_ms[1:] - most_ms[0])


def test_gammas_load_with_their_kernels_and_wait_for_them(saved):
    logdir, names, table = saved
    kernels = np.full(len(names), -1)
    kernels[3] = 5
    table = replace(table, kernels=kernels)
    save_table(table, table_folder(replace(SETTINGS, logdir=logdir)))
    loaded = load(logdir, names, table)
    np.testing.assert_array_equal(loaded.kernels, kernels)
    for chosen, kept in (([3, 4], [4]), ([3, 5], [3, 5]), ([5], [5])):
        masks = np.zeros((2, len(names)), bool)
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


@pytest.mark.parametrize(
    ("was", "why"), [("c3d4", "profiled with other operations"), (None, "profiled with other operations")]
)
def test_table_of_another_graph_is_stale(saved, was, why):
    logdir, names, table = saved
    table.details["graph_digest"] = was
    save_table(table, table_folder(replace(SETTINGS, logdir=logdir)))
    with pytest.raises(StaleTableError, match=f"the timing table in {logdir}/.* was {why}"):
        load(logdir, names, table)
    assert load(logdir, names, table, allow_stale=True).names == names[::-1]


def test_missing_damaged_or_foreign_table_names_the_profiler_command(saved):
    logdir, names, table = saved
    folder = table_folder(replace(SETTINGS, logdir=logdir))
    command = (
        "python profiler.py --model_name mobilenetv2 --dataset_name digits --preset paper --alpha 0.5 --input_size 8"
    )
    with pytest.raises(UserError, match=f"optimizer sgd, not adam; make it again: {command}"):
        load(logdir, names, table, replace(SETTINGS, optimizer="adam"))
    with pytest.raises(UserError, match=f"not the timing table of this network.*{command}"):
        load(logdir, ["other", *names[1:]], table)
    with pytest.raises(UserError, match=r"holds \d+ of this network's \d+ tensors"):
        load(logdir, [*names, "more"], table)
    table.shapes[0] = (1, 2)
    with pytest.raises(UserError, match=r"holds .* with shape \(\d+.*\), not \(1, 2\)"):
        load(logdir, names, table)
    (folder / "table.csv").unlink()
    with pytest.raises(UserError, match=f"no timing table in .*{command}"):
        load(logdir, names, table)


def changed(**fields):
    """A change of the text of a profile.json: other fields, or without those that are None."""

    def change(text):
        record = {**json.loads(text), **fields}
        return json.dumps({name: value for name, value in record.items() if value is not None})

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("profile.json", lambda text: text[:100]),
        ("profile.json", lambda text: ""),
        ("profile.json", lambda text: "null"),
        ("profile.json", lambda text: "\udcff"),
        ("profile.json", changed(version=0)),
        ("profile.json", changed(version=None)),
        ("profile.json", changed(fit=None)),
        ("profile.json", changed(memory={"forward_mb": 1.0})),
        ("table.csv", lambda text: text.replace("0.", "fast", 1)),
        ("table.csv", lambda text: text[: len(text) // 2]),
        ("table.csv", lambda text: text.partition("\n")[2]),
        ("table.csv", lambda text: text + "\udcff"),
    ],
)
def test_a_damaged_table_and_one_of_another_version_is_one_line_that_names_the_file(name, change, saved):
    logdir, names, table = saved
    path = table_folder(replace(SETTINGS, logdir=logdir)) / name
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        load(logdir, names, table)
    said, _, advice = str(caught.value).partition("; make it again: python profiler.py")
    assert advice and said == f"{path}: is damaged or of another version; delete it"


@pytest.mark.parametrize("setting", TABLE_SETTINGS)
def test_table_of_other_settings_is_refused_even_if_stale_ones_are_allowed(setting, saved):
    logdir, names, table = saved
    value = {"model_name": "vit", "optimizer": "adam", "alpha": 0.35}.get(setting, 77)
    field = "gradient_clipping" if setting == "clips_gradients" else setting
    other = replace(SETTINGS, logdir=logdir, **{field: value})  # type: ignore[arg-type]
    folder = table_folder(replace(SETTINGS, logdir=logdir))
    if table_folder(other) != folder:
        folder.rename(table_folder(other))
    was, changed = getattr(SETTINGS, setting), getattr(other, setting)
    with pytest.raises(UserError, match=f"measured with --{setting} {was}, not {changed}; make it again"):
        load(logdir, names, table, other, allow_stale=True)


OTHER_ENVIRONMENTS = {
    "tensorflow": ("packages", {"tensorflow": "2.0.0"}, r"tensorflow 2\.0\.0, here 2\.\d+\.\d+"),
    "machine": ("machine", "pdp11", r"machine pdp11, here \w+"),
    "processor": ("processor", "abacus", r"processor abacus, here .+"),
    "cores": ("cores", 999, r"cores 999, here \d+"),
    "usable cores": ("usable_cores", 999, r"usable cores 999, here \d+"),
    "threads": ("thread_settings", {"OMP_NUM_THREADS": "99"}, r"thread settings OMP_NUM_THREADS=99, here \w+"),
    "system": ("system", "Multics", r"system Multics, here \w+"),
}


def change_environment(logdir, **changed):
    path = table_folder(replace(SETTINGS, logdir=logdir)) / "profile.json"
    record = json.loads(path.read_text())
    record["environment"].update(changed)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("what", OTHER_ENVIRONMENTS)
def test_table_of_another_environment_is_stale(what, saved):
    logdir, names, table = saved
    key, value, words = OTHER_ENVIRONMENTS[what]
    change_environment(logdir, **{key: value})
    with pytest.raises(StaleTableError, match=f"profiled on a different setup: {words}$"):
        load(logdir, names, table)
    assert load(logdir, names, table, allow_stale=True).names == table.names


def test_every_difference_is_named_and_unrecorded_values_are_ignored(saved):
    logdir, names, table = saved
    change_environment(logdir, machine="pdp11", system="Multics", cores=None, python="1.5.2")
    with pytest.raises(UserError, match=r"different setup: machine pdp11, here \w+; system Multics, here \w+$"):
        load(logdir, names, table)


def test_table_without_environment_is_stale(saved):
    logdir, names, table = saved
    path = table_folder(replace(SETTINGS, logdir=logdir)) / "profile.json"
    record = json.loads(path.read_text())
    del record["environment"]
    path.write_text(json.dumps(record))
    with pytest.raises(StaleTableError, match=r"no machine recorded$"):
        load(logdir, names, table)
    load(logdir, names, table, allow_stale=True)


def test_table_of_a_trace_has_a_separate_folder_and_loads_unchanged(tmp_path, small_model):
    network = Settings("resnet50", input_size=8, num_classes=3, batch_size=4, weights="none")
    network = replace(network, logdir=tmp_path)
    measured_here = table_folder(network)
    folder = table_folder(network, Path("far") / "tx2.xplane.pb")
    assert folder == measured_here.with_name(measured_here.name + "_from_tx2")
    table = make_table(small_model)
    table.settings.update(table_settings(network))
    unknown = Fit(2.0, 1.0, 1.0, 1.0, None, None, 0, 0)
    save_table(TimingTable(**{**vars(table), "fit": unknown}), folder)
    shapes = [tuple(variable.shape) for variable in small_model.trainable_variables]
    names, settings = tensor_names(small_model), table_settings(network)
    assert load_table(folder, settings, names, shapes, GRAPH, "profiler.py", allow_stale=True).fit == unknown
    with pytest.raises(UserError, match="no machine recorded"):
        load_table(folder, settings, names, shapes, GRAPH, "profiler.py")


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({}, None),
        ({"median_error_percent": 14.0}, None),
        ({"median_error_percent": 26.0}, "it predicts measured steps with a median error of 26%"),
        ({"t_dw_factor": 0.0}, "computing weight gradients takes no time by it"),
        ({"t_dy_factor": 0.0}, "passing the error on takes no time by it"),
        ({"t_fw_factor": 0.0}, "the forward pass takes no time by it"),
        ({"median_error_percent": None}, None),
    ],
)
def test_a_fit_with_large_errors_or_a_part_for_free_is_doubtful(change, doubt, small_model):
    table = make_table(small_model, t_fw_ms=1.0)
    assert replace(table, fit=replace(table.fit, **change)).doubt == doubt


def test_a_part_that_takes_no_time_by_its_trace_is_no_reason_for_doubt(small_model):
    table = make_table(small_model, t_fw_ms=0.001)
    assert replace(table, fit=replace(table.fit, t_fw_factor=0.0)).doubt is None


def test_two_programs_do_not_write_a_table_at_the_same_time(tmp_path, small_model):
    folder = table_folder(replace(SETTINGS, logdir=tmp_path))
    with alone_in(folder):
        other = threading.Thread(target=save_table, args=(make_table(small_model), folder), daemon=True)
        other.start()
        other.join(0.2)
        assert other.is_alive() and not [*folder.iterdir()]
    other.join(20)
    assert {path.name for path in folder.iterdir()} == {"table.csv", "profile.json"}
