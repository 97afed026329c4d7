"""Properties of the folder from which a board trains, see `properties.py`: any file of it may be damaged."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from properties import DAMAGES, FIELD_CHANGES, Damage, FieldChange, one_line, property_of, workplace
from small_boards import make_export, make_photos, replace_in

from elastic_trainer.board.export import load_board

SAVED = ("out/checkpoint.npz", "out/weights.npz", "out/model.tflite")
RECORDS = ("board.json", "times.json", "out/features.json")
EPOCHS = ("--num_epochs", "4")


def board_train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The board's program, on the photos beside the folder."""
    paths = ["--data_dir", str(folder.with_name("photos")), "--output", str(folder / "out")]
    command = [sys.executable, str(folder / "board_train.py"), *paths, *EPOCHS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@functools.cache
def stopped_run() -> tuple[Path, dict[str, bytes]]:
    """The folder of an export, with times of the board and a run that was stopped; the files that may be damaged."""
    pytest.importorskip("ai_edge_litert")
    make_photos(workplace() / "photos")
    folder = make_export(workplace() / "board")
    program, line = folder / "board_run.py", '        state["step"], state["sums"] = state["step"] + 1'
    whole = program.read_bytes()
    replace_in(program, line, f"        self.signal = 15 * (state['step'] == 9)\n{line}")
    assert board_train(folder, "--profile").returncode == 0
    assert board_train(folder).returncode == 128 + 15
    program.write_bytes(whole)
    names = ("train.tflite", "inference.tflite", "start.keras", "out/features.bin", *RECORDS, *SAVED)
    return folder, {name: (folder / name).read_bytes() for name in names}


def changed_folder(changed: dict[str, bytes]) -> tuple[Path, dict[str, bytes]]:
    """The folder of the run as it was stopped, but for these files; and its files."""
    folder, contents = stopped_run()
    contents = {**contents, **changed}
    shutil.rmtree(folder / "out")
    (folder / "out").mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder, contents


def use_board(changed: dict[str, bytes], *words: str) -> None:
    """Train with changed files: it ends with finite weights, or is refused in a line and keeps what is saved."""
    folder, contents = changed_folder(changed)
    done = board_train(folder, *words)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert done.returncode == 2 and lines[-1].startswith("board_train.py: error: "), done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert {name: (folder / name).read_bytes() for name in SAVED} == {name: contents[name] for name in SAVED}
    else:
        with np.load(folder / "out" / "weights.npz") as file:
            assert all(np.isfinite(file[name]).all() for name in file.files if name != "id")
        assert 0 <= json.loads((folder / "out" / "result.json").read_bytes())["best_accuracy"] <= 1


@property_of(
    st.sampled_from(["train.tflite", "inference.tflite", "out/features.bin", *RECORDS, *SAVED]), DAMAGES, is_slow=True
)
def a_damaged_board_folder_is_refused_or_trains(name: str, damage: Damage) -> None:
    use_board({name: damage(stopped_run()[1][name])}, "--resume")


@property_of(st.sampled_from(RECORDS), FIELD_CHANGES, st.booleans(), is_slow=True)
def a_board_folder_with_another_field_is_refused_or_trains(name: str, change: FieldChange, is_new: bool) -> None:
    changed = json.dumps(change(json.loads(stopped_run()[1][name]))).encode()
    use_board({name: changed}, *(["--overwrite", "--deadline", "60"] if is_new else ["--resume"]))


@property_of(st.sampled_from(["board.json", "start.keras", "out/weights.npz"]), DAMAGES, is_slow=True)
def what_a_board_trained_is_loaded_or_refused(name: str, damage: Damage) -> None:
    folder, contents = changed_folder({name: damage(stopped_run()[1][name])})
    with one_line():
        load_board(folder / "out" / "weights.npz")
    assert {one: (folder / one).read_bytes() for one in contents} == contents
