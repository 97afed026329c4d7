"""Properties of files that the commands read, see `properties.py`: any of them may be damaged."""

from __future__ import annotations

import functools
import io
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from conftest import BATCH, make_small_model, make_table
from hypothesis import strategies as st
from made_up_runs import made_up_run
from PIL import Image
from properties import DAMAGES, FIELD_CHANGES, Damage, FieldChange, fresh, one_line, property_of, workplace
from properties_of_command_lines import VALUES
from small_images import encoded
from small_networks import as_if_trained, values

from elastic_trainer.cli.evaluate_command import parse_evaluation
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.datasets import decoding
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.saved_model import load_model, save_model
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.reader import latest_importance, read_run, read_summary
from elastic_trainer.selection.budget import smallest_rho
from elastic_trainer.selection.select import select_tensors, select_upper_part
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import load_table, save_table
from elastic_trainer.timing.trace import read_trace

TRACE = Path(__file__).parent / "data" / "small_step.xplane.pb"

# --- tables and records -----------------------------------------------------------------------------------------------

_SETTINGS = {"model_name": "small", "batch_size": BATCH, "optimizer": "sgd"}


@functools.cache
def small_table() -> tuple[keras.Model, TimingTable, dict[str, bytes]]:
    """The small network, its table, and the files of that."""
    from elastic_trainer.machine import environment
    from elastic_trainer.memory.costs import NO_CHAIN, Kept, MemoryCosts

    model = make_small_model()
    table = make_table(model, t_fw_ms=0.5)
    count = len(table.names)
    costs = MemoryCosts(30.0, 10.0, 1.0, np.arange(count) / 2, np.ones(count), [Kept((0, 1), NO_CHAIN, 100.0)])
    table = replace(table, memory=costs, compiling_ms=1500.0, plain_step_ms=7.0, settings=dict(_SETTINGS))
    table.details.update(environment=environment(), graph_digest="a1b2")
    folder = workplace() / "table"
    save_table(table, folder)
    return model, table, {path.name: path.read_bytes() for path in folder.iterdir()}


def read_table(contents: dict[str, bytes]) -> TimingTable | None:
    """The table of these files, as a run loads it; None if it is refused in a line. Nothing in its folder changes."""
    model, folder, table = small_table()[0], workplace() / "table", None
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    with one_line():
        table = load_table(folder, _SETTINGS, tensor_names(model), shapes, "a1b2", "profiler.py", allow_stale=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    return table


def is_usable(table: TimingTable, model: keras.Model) -> None:
    """Selections by a table, and what it predicts, are sound."""
    head, importance = head_mask(model), np.ones(len(table.names))
    assert sorted(table.positions) == [*range(len(importance))]
    smallest = smallest_rho(table, head)
    assert math.isfinite(smallest) and smallest > 0
    for select in (select_tensors, select_upper_part):
        plan = select(table, importance, head, 0.6)
        assert plan.mask[head].all() and math.isfinite(plan.step_ms) and plan.step_ms >= 0
        assert (plan.mask == head).all() or plan.step_ms <= plan.budget_ms * (1 + 1e-9)
    if table.memory is not None:
        room_mb = table.predict_mb(head) + 1.0
        assert table.predict_mb(select_tensors(table, importance, head, 0.9, room_mb=room_mb).mask) <= room_mb + 1e-6
    str(table.doubt)


@property_of(st.sampled_from(["table.csv", "profile.json"]), DAMAGES, st.booleans())
def a_damaged_timing_table_is_refused_or_usable(name: str, damage: Damage, swaps: bool) -> None:
    model, _, contents = small_table()
    other = "table.csv" if name == "profile.json" else "profile.json"
    table = read_table({**contents, name: damage(contents[other if swaps else name])})
    if table is not None:
        is_usable(table, model)


@property_of(FIELD_CHANGES)
def a_timing_table_with_another_field_is_refused_or_usable(change: FieldChange) -> None:
    model, _, contents = small_table()
    record = change(json.loads(contents["profile.json"]))
    table = read_table({**contents, "profile.json": json.dumps(record).encode()})
    if table is not None:
        is_usable(table, model)


@property_of(
    st.integers(0, 10**6),
    st.sampled_from(["t_dw_ms", "t_dy_ms", "t_fw_ms", "order", "name", "kernel", "shape", "features_mb"]),
    VALUES,
)
def a_timing_table_with_another_cell_is_refused_or_usable(line: int, column: str, cell: str) -> None:
    import csv

    model, _, contents = small_table()
    rows = [*csv.reader(io.StringIO(contents["table.csv"].decode()))]
    rows[1 + line % (len(rows) - 1)][rows[0].index(column)] = cell
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    table = read_table({**contents, "table.csv": text.getvalue().encode("utf-8", "surrogateescape")})
    if table is not None:
        is_usable(table, model)


@functools.cache
def finished_run() -> tuple[Path, dict[str, bytes]]:
    """A run that was never trained, with a model, and its files."""
    record = {"class_names": ["a", "b"], "training_images": "", "test_images": ""}
    folder = made_up_run(workplace() / "run", command=["--rho", "0.5"], images=record)
    (folder / "best.keras").write_bytes(b"")
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


def check_importance(found: tuple[np.ndarray, Path] | None) -> None:
    assert found is None or (found[0].shape == (2,) and np.isfinite(found[0]).all())


def use_run(changed: dict[str, bytes]) -> None:
    """Read a run with changed files in each way that commands do."""
    folder, contents = finished_run()
    for name, content in {**contents, **changed}.items():
        (folder / name).write_bytes(content)
    ways: list[Callable[[], Any]] = [
        lambda: read_run(folder).selections(),
        lambda: read_run(folder).column("test_accuracy"),
        lambda: check_importance(latest_importance(folder.parent, ["t0", "t1"])),
        lambda: read_summary(folder),
        lambda: parse_main(["--resume", str(folder)]),
        lambda: parse_main(["--evaluate", str(folder)]),
        lambda: parse_evaluation(["--evaluate", str(folder)]),
        lambda: parse_main(["--weights", str(folder)]),
    ]
    for way in ways:
        with one_line():
            way()


@property_of(st.sampled_from(["config.json", "summary.json", "metrics.csv", "selections.csv"]), DAMAGES)
def a_damaged_run_folder_is_refused_in_a_line(name: str, damage: Damage) -> None:
    use_run({name: damage(finished_run()[1][name])})


@property_of(st.sampled_from(["config.json", "summary.json"]), FIELD_CHANGES)
def a_run_folder_with_another_field_is_refused_or_read(name: str, change: FieldChange) -> None:
    use_run({name: json.dumps(change(json.loads(finished_run()[1][name]))).encode()})


# --- checkpoints, weights, models -------------------------------------------------------------------------------------


@functools.cache
def checkpoint_files() -> dict[str, bytes]:
    checkpoints = Checkpoints(workplace() / "checkpoints", "id")
    for step in (1, 2):
        arrays = {"model/a": np.arange(7.0) + step, "optimizer/b/c": np.full((2, 3), step, np.float32)}
        checkpoints.save(step, State(arrays, {"history": {"step": step}}))
    return {path.name: path.read_bytes() for path in checkpoints.folder.iterdir()}


@property_of(st.integers(1, 2), DAMAGES, st.booleans())
def a_damaged_checkpoint_is_skipped_and_nothing_saved_is_lost(step: int, damage: Damage, swaps: bool) -> None:
    """`swaps`: the two files have each other's name."""
    contents = checkpoint_files()
    if swaps:
        contents = dict(zip(contents, reversed(contents.values()), strict=True))
    name = f"step-{step:010}.npz"
    folder = workplace() / "checkpoints"
    contents = {**contents, name: damage(contents[name])}
    for each, content in contents.items():
        (folder / each).write_bytes(content)
    found = None
    with one_line():
        found = Checkpoints(folder, "id").latest()
        assert found is not None
    assert found is not None, "the other one is intact"
    state = found.record["history"]["step"]
    newer = 1 if swaps else 2
    assert state in (1, 2) and (step == 2 or state == newer)
    np.testing.assert_array_equal(found.arrays["model/a"], np.arange(7.0) + state)
    np.testing.assert_array_equal(found.arrays["optimizer/b/c"], np.full((2, 3), state, np.float32))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


@functools.cache
def model_files() -> tuple[keras.Model, dict[str, bytes]]:
    """The small network, and its weights in each kind of file."""
    model, folder = as_if_trained(make_small_model()), workplace() / "models"
    folder.mkdir()
    save_model(model, folder / "my.keras")
    model.save_weights(folder / "my.weights.h5")
    return model, {path.name: path.read_bytes() for path in folder.iterdir()}


def load_weights(name: str, content: bytes) -> None:
    """Load a changed file as `--weights` does: all weights are finite, or it is refused in a line."""
    model, path = model_files()[0], fresh(name)
    path.write_bytes(content)
    before = values(model.weights)
    with one_line():
        pretrained.load(model, model, path, f"{__file__}:small")
        assert all(np.isfinite(one).all() for one in values(model.weights))
    for weight, old in zip(model.weights, before, strict=True):
        weight.assign(old)
    assert path.read_bytes() == content
    path.unlink()


@property_of(st.sampled_from(["my.keras", "my.weights.h5"]), DAMAGES)
def damaged_weights_are_refused_or_finite(name: str, damage: Damage) -> None:
    load_weights(name, damage(model_files()[1][name]))


def load_saved_model(content: bytes) -> None:
    path = fresh("my.keras")
    path.write_bytes(content)
    with one_line():
        model = load_model(path, "--evaluate")
        assert all(np.isfinite(one).all() for one in values(model.weights))
    path.unlink()


@property_of(DAMAGES)
def a_damaged_model_is_refused_or_finite(damage: Damage) -> None:
    load_saved_model(damage(model_files()[1]["my.keras"]))


@property_of(FIELD_CHANGES)
def a_model_with_another_config_is_refused_or_finite(change: FieldChange) -> None:
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(model_files()[1]["my.keras"])) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "config.json":
                content = json.dumps(change(json.loads(content))).encode()
            target.writestr(name, content)
    load_saved_model(changed.getvalue())


# --- traces and images ------------------------------------------------------------------------------------------------


@property_of(DAMAGES, st.sampled_from([None, 1, 3]))
def a_damaged_trace_is_refused_or_has_times(damage: Damage, steps: int | None) -> None:
    path = workplace() / "damaged.xplane.pb"
    path.write_bytes(damage(TRACE.read_bytes()))
    with one_line():
        trace = read_trace(path, steps)
        assert trace.op_ms and all(math.isfinite(ms) and ms >= 0 for ms in trace.op_ms.values())


@functools.cache
def images() -> dict[str, bytes]:
    """A photo in each format."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    return {kind: encoded(image, kind) for kind in decoding.FORMATS} | {
        "progressive": encoded(image, "JPEG", progressive=True),
        "palette": encoded(image.convert("P"), "PNG", transparency=3),
    }


@property_of(st.sampled_from([*decoding.FORMATS, "progressive", "palette"]), DAMAGES)
def a_damaged_image_is_decoded_or_described_in_a_line(kind: str, damage: Damage) -> None:
    path = workplace() / "photo.jpg"
    path.write_bytes(damage(images()[kind]))
    try:
        pixels = decoding.decode(str(path), 8)
    except MemoryError:
        raise
    except Exception as error:
        line = decoding.decode_failure(str(path), 0, error)
        assert line.startswith(str(path)) and "\n" not in line
    else:
        assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
