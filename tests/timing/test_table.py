"""Timing tables load as saved, and are refused if they do not fit the network, its settings or the machine."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BATCH, CLASSES, SIZE, make_table
from small_runs import SETTINGS

from elastic_trainer.cli.commands import profiler_command
from elastic_trainer.errors import UserError
from elastic_trainer.files import alone_in
from elastic_trainer.machine import environment
from elastic_trainer.memory.costs import NO_CHAIN, Kept, MemoryCosts
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import DataSettings, NetworkSettings
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import TABLE_SETTINGS, load_table, save_table, table_folder, table_settings

GRAPH = "a1b2"


@pytest.fixture
def saved(tmp_path, small_model):
    table = make_table(small_model, t_fw_ms=0.5)
    count = len(table.names)
    costs = MemoryCosts(30.0, 10.0, 1.0, np.arange(count) / 2, np.ones(count), [Kept((0, 1), NO_CHAIN, 100.0)])
    table = replace(table, memory=costs, compiling_ms=1500.0, plain_step_ms=7.0)
    table.settings.update(table_settings(SETTINGS))
    table.details.update(environment=environment(), graph_digest=GRAPH)
    save_table(table, table_folder(SETTINGS, tmp_path))
    return tmp_path, tensor_names(small_model), table


def load(logdir, names, table, network=SETTINGS, allow_stale=False, graph=GRAPH):
    shapes = dict(zip(table.positions, table.shapes, strict=True))
    remake = profiler_command(network, DataSettings("digits"), logdir)
    in_order = [shapes.get(k, ()) for k in range(len(names))]
    return load_table(
        table_folder(network, logdir), table_settings(network), names, in_order, graph, remake, allow_stale
    )


def test_saved_table_loads_unchanged(saved):
    logdir, names, table = saved
    assert table_folder(SETTINGS, logdir).name == f"mobilenetv2-0.5_{SIZE}_{CLASSES}_{BATCH}"
    header = (table_folder(SETTINGS, logdir) / "table.csv").read_text().splitlines()[0]
    assert header == "name,shape,order,t_dw_ms,t_dy_ms,t_fw_ms,kernel,features_mb"
    loaded = load(logdir, names, table)
    assert loaded.names == table.names and loaded.shapes == table.shapes and loaded.fit == table.fit
    np.testing.assert_array_equal(loaded.positions, table.positions)
    mask = np.random.default_rng(0).random(len(names)) < 0.5
    for misses in (1.0, 0.3, 0.0):
        assert loaded.predict(mask, misses) == pytest.approx(table.predict(mask, misses))
    assert loaded.predict_mb(mask, 2.0) == table.predict_mb(mask, 2.0)
    assert (loaded.compiling_ms, loaded.plain_over_full) == (1500.0, 7.0 / table.full_step_ms)


def test_features_that_take_room_take_time_and_the_solver_gets_the_largest_so_far(saved):
    logdir, names, table = saved
    features_mb = np.linspace(4, 1, len(names))  # the deeper the cut, the smaller
    table = replace(table, features_mb=features_mb, fit=replace(table.fit, reading_factor=0.5, writing_factor=0.25))
    save_table(table, table_folder(SETTINGS, logdir))
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
    save_table(table, table_folder(SETTINGS, logdir))
    loaded = load(logdir, names, table)
    np.testing.assert_array_equal(loaded.kernels, kernels)
    for chosen, kept in (([3, 4], [4]), ([3, 5], [3, 5]), ([5], [5])):
        masks = np.zeros((2, len(names)), bool)
        masks[0, table.positions[chosen]] = masks[1, table.positions[kept]] = True
        np.testing.assert_array_equal(loaded.with_kernels(masks[0]), masks[1])


def test_table_of_an_earlier_version_is_refused_in_one_line_or_loads(saved):
    logdir, names, table = saved
    path = table_folder(SETTINGS, logdir) / "profile.json"
    record = json.loads(path.read_text())
    earlier = {name: value for name, value in record.items() if name not in ("memory", "compiling_ms", "plain_step_ms")}
    peaks = {"predicted_mb": [1.0], "measured_mb": [2.0]}  # which are not measured any more
    for more, has_memory in (({"memory": record["memory"], "memory_peaks": peaks}, True), ({}, False)):
        path.write_text(json.dumps({**earlier, **more}))
        loaded = load(logdir, names, table)
        assert (loaded.memory is not None) == has_memory and loaded.compiling_ms is None
    record["fit"]["normalisation_factor"] = 0.5
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"profile\.json: fit: normalisation_factor: .*; make it again: python"):
        load(logdir, names, table)


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
def test_table_of_another_graph_is_refused_or_used_with_a_warning(saved, capsys, was, why):
    logdir, names, table = saved
    table.details["graph_digest"] = was
    save_table(table, table_folder(SETTINGS, logdir))
    with pytest.raises(UserError, match=f"{why}.*; make it again: .*; or use it anyway with --allow_stale_profile"):
        load(logdir, names, table)
    assert load(logdir, names, table, allow_stale=True).names == names[::-1]
    assert f": {why}" in capsys.readouterr().out


def test_missing_damaged_or_foreign_table_names_the_profiler_command(saved):
    logdir, names, table = saved
    folder = table_folder(SETTINGS, logdir)
    command = "python profiler.py --model_name mobilenetv2 --dataset_name digits --alpha 0.5 --input_size 8"
    with pytest.raises(UserError, match=f"optimizer sgd, not adam; make it again: {command}"):
        load(logdir, names, table, replace(SETTINGS, optimizer="adam"))
    with pytest.raises(UserError, match=f"not the timing table of this network.*{command}"):
        load(logdir, ["other", *names[1:]], table)
    with pytest.raises(UserError, match=r"holds \d+ of this network's \d+ tensors"):
        load(logdir, [*names, "more"], table)
    with pytest.raises(UserError, match="measured with --optimizer sgd, not adam; --mixed_precision False, not True;"):
        load(logdir, names, table, replace(SETTINGS, optimizer="adam", mixed_precision=True))
    table.shapes[0] = (1, 2)
    with pytest.raises(UserError, match=r"holds .* with shape \(\d+.*\), not \(1, 2\)"):
        load(logdir, names, table)
    (folder / "table.csv").unlink()
    with pytest.raises(UserError, match=f"no timing table in .*{command}"):
        load(logdir, names, table)


MEMORY = MemoryCosts(1.0, 1.0, 1.0, np.zeros(0), np.zeros(0), []).to_record()
DAMAGED_PROFILES: dict[str, tuple[Any, str]] = {
    "cut short": ('{"model_name": "mob', "is not valid JSON"),
    "empty": ("", "is not valid JSON"),
    "no object": ("[]", "must be an object"),
    "null": ("null", "must be an object"),
    "nested deeply": ("[" * 100_000, "is not valid JSON"),
    "no UTF-8": (b"\xff", "is not valid JSON"),
    "name null": ({"optimizer": None}, "optimizer: must be text, not None"),
    "time as text": ({"full_step_ms": "fast"}, "full_step_ms: must be a finite number above 0 .*, not 'fast'"),
    "time 0": ({"full_step_ms": 0}, "full_step_ms: must be a finite number above 0 .*, not 0"),
    "time of an age": ({"gradient_pass_ms": 1e30}, r"gradient_pass_ms: must be .* to 1e\+09, not 1e\+30"),
    "time NaN": ({"forward_ms": float("nan")}, "forward_ms: must be a finite number .*, not nan"),
    "time nested": ({"forward_ms": [[1]]}, "forward_ms: must be a finite number"),
    "fit null": ({"fit": None}, "fit: must be an object"),
    "fit without factors": ({"fit": {"constant_ms": 1.0}}, "fit: t_dy_factor: is missing$"),
    "environment as text": ({"environment": "here"}, "environment: must be an object"),
    "packages as a list": ({"environment": {"packages": [1]}}, "environment: packages: must be an object"),
    "memory without costs": ({"memory": {"forward_mb": 1.0}}, "memory: beside_mb: is missing$"),
    "memory of no tensors": ({"memory": MEMORY}, r"memory: is not of \d+ tensors$"),
    "memory of a tensor too many": (
        {"memory": {**MEMORY, "own_mb": [0.0] * 11, "chain_mb": [0.0] * 11, "kept": [([11], -1, 1.0)]}},
        "memory: is not of 11 tensors$",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_PROFILES)
def test_damaged_profile_is_one_line_that_names_the_file_and_the_field(damage, saved):
    logdir, names, table = saved
    path = table_folder(SETTINGS, logdir) / "profile.json"
    content, message = DAMAGED_PROFILES[damage]
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load(logdir, names, table)
    said, _, advice = str(caught.value).partition("; make it again: ")
    assert advice and "\n" not in said
    assert re.match(f"{re.escape(str(path))}: {message}", said), said


def in_t_fw_ms(text, row):
    """A row of table.csv with `text` as its t_fw_ms."""
    return re.sub("[^,]+((,[^,]*){2})$", rf"{text}\1", row)


DAMAGED_TABLES = {
    "row twice": (lambda rows: [*rows, rows[1]], r"line \d+: name: head/bias is a duplicate of line \d+"),
    "order twice": (
        lambda rows: [*rows[:2], rows[2].replace(",1,", ",0,"), *rows[3:]],
        "line 3: order: 0 is a duplicate",
    ),
    "huge field": (lambda rows: [*rows, "x" * 200_000], r"field larger than field limit"),
    "all times 0": (
        lambda rows: [re.sub(r"(\d+\.\d+,){3}([^,]*,[^,]*)$", r"0,0,0,\2", row) for row in rows],
        "holds no time above 0",
    ),
    "no rows": (lambda rows: rows[:1], "holds no time above 0"),
    "time of an age": (lambda rows: [*rows[:1], in_t_fw_ms("1e30", rows[1])], r"line 2: t_fw_ms: .*, not 1e\+30"),
    "time inf": (lambda rows: [*rows[:1], in_t_fw_ms("inf", rows[1])], "line 2: t_fw_ms: .* finite .*, not inf"),
    "negative time": (lambda rows: [*rows[:1], in_t_fw_ms("-1", rows[1])], "line 2: t_fw_ms: .*, not -1"),
    "time as text": (lambda rows: [*rows[:1], in_t_fw_ms("fast", rows[1])], "line 2: t_fw_ms: .*, not 'fast'"),
    "shape as text": (lambda rows: [rows[0], "head/bias,big,0,1,1,1"], "line 2: shape: must be text that matches"),
    "row cut short": (lambda rows: [*rows[:1], "head/bias"], "line 2: shape: must be text that matches .*, not None"),
    "no header": (lambda rows: rows[1:], "line 2: name: is missing"),
    "no UTF-8": (lambda rows: [*rows, "\udcff"], "'utf-8' codec can't decode"),
}


@pytest.mark.parametrize("damage", DAMAGED_TABLES)
def test_damaged_table_is_one_line_that_names_the_file_and_the_field(damage, saved):
    logdir, names, table = saved
    path = table_folder(SETTINGS, logdir) / "table.csv"
    change, message = DAMAGED_TABLES[damage]
    text = "\n".join(change(path.read_text().splitlines()))
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        load(logdir, names, table)
    said, _, advice = str(caught.value).partition("; make it again: ")
    assert advice and "\n" not in said
    assert re.match(f"{re.escape(str(path))}: {message}", said), said


@pytest.mark.parametrize("setting", TABLE_SETTINGS)
def test_table_of_other_settings_is_refused_even_if_stale_ones_are_allowed(setting, saved):
    logdir, names, table = saved
    changed = {"model_name": "vit", "optimizer": "adam", "alpha": 0.35}.get(setting, 77)
    other = replace(SETTINGS, **{setting: changed})  # type: ignore[arg-type]
    folder = table_folder(SETTINGS, logdir)
    if table_folder(other, logdir) != folder:
        folder.rename(table_folder(other, logdir))
    with pytest.raises(
        UserError, match=f"measured with --{setting} {getattr(SETTINGS, setting)}, not {changed}; make it again"
    ):
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
    path = table_folder(SETTINGS, logdir) / "profile.json"
    record = json.loads(path.read_text())
    record["environment"].update(changed)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("what", OTHER_ENVIRONMENTS)
def test_table_of_another_environment_is_refused_or_allowed_with_a_warning(what, saved, capsys):
    logdir, names, table = saved
    key, value, words = OTHER_ENVIRONMENTS[what]
    change_environment(logdir, **{key: value})
    with pytest.raises(
        UserError,
        match=f"different setup: {words}; make it again: python profiler.* with --allow_stale_profile$",
    ):
        load(logdir, names, table)
    assert load(logdir, names, table, allow_stale=True).names == table.names
    assert re.match(rf"warning: .*profiled on a different setup: {words}; used anyway \(", capsys.readouterr().out)


def test_every_difference_is_named_and_unrecorded_values_are_ignored(saved):
    logdir, names, table = saved
    change_environment(logdir, machine="pdp11", system="Multics", cores=None, python="1.5.2")
    with pytest.raises(UserError, match=r"different setup: machine pdp11, here \w+; system Multics, here \w+; make it"):
        load(logdir, names, table)


def test_table_without_environment_is_refused_or_allowed_with_a_warning(saved, capsys):
    logdir, names, table = saved
    path = table_folder(SETTINGS, logdir) / "profile.json"
    record = json.loads(path.read_text())
    del record["environment"]
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="no machine recorded; make it again"):
        load(logdir, names, table)
    load(logdir, names, table, allow_stale=True)
    assert "warning: " in capsys.readouterr().out


def test_table_of_a_trace_has_a_separate_folder_and_loads_unchanged(tmp_path, small_model):
    network = NetworkSettings("resnet50", input_size=8, num_classes=3, batch_size=4, weights="none")
    measured_here = table_folder(network, tmp_path)
    folder = table_folder(network, tmp_path, Path("far") / "tx2.xplane.pb")
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
    folder = table_folder(SETTINGS, tmp_path)
    with alone_in(folder):
        other = threading.Thread(target=save_table, args=(make_table(small_model), folder), daemon=True)
        other.start()
        other.join(0.2)
        assert other.is_alive() and not [*folder.iterdir()]
    other.join(20)
    assert {path.name for path in folder.iterdir()} == {"table.csv", "profile.json"}
