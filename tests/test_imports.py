"""Imports go downwards only: between rooms, and without TensorFlow for a mistake; ruff holds the top level."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"main", "profiler", "train", "models", "data", "selection_solver_DP", "utils", "elastic_trainer"}


def modules_after(code):
    """Names of the top-level packages and modules that are imported once `code` has run in the checkout."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split("\n")[-2].split()}


def test_rooms_import_only_rooms_below_them_and_without_circles():
    linted = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_solver_imports_nothing_of_ours():
    assert modules_after("import selection_solver_DP") & OURS == {"selection_solver_DP"}


def test_what_commands_share_imports_neither_a_step_nor_tensorflow():
    assert modules_after("import utils") & {*OURS, "tensorflow", "keras"} == {"utils", "elastic_trainer"}


def test_the_package_shows_its_names_and_reads_photos_without_tensorflow():
    code = "import io, elastic_trainer; from PIL import Image; elastic_trainer.__version__, dir(elastic_trainer);"
    code += "Image.new('L', (2, 2)).save(file := io.BytesIO(), 'PNG'); elastic_trainer.read_photo(file.getvalue(), 8)"
    assert modules_after(code) & {*OURS, "tensorflow", "keras"} == {"elastic_trainer"}


COUNT_FILES = """
import sys
from pathlib import Path
import elastic_trainer.keras_callback
names = [name for name in sys.modules if name.startswith(("elastic_trainer", "selection_solver"))]
print(sum(Path(sys.modules[name].__file__).stat().st_size > 0 for name in names))
"""


def test_the_callback_loads_few_files():
    command = [sys.executable, "-c", COUNT_FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 20 < int(done.stdout.splitlines()[-1]) <= 40


@pytest.mark.parametrize("script", ["demo", "run_figure"])
def test_scripts_load_tensorflow_only_when_they_can_hide_its_lines(script):
    code = f"import sys; sys.path.insert(0, 'scripts/figures'); import {script}"
    assert not modules_after(code) & {"tensorflow", "keras"}


MISTAKES = {
    "main": (
        ["--rho", "7"],
        ["--model_name", "resnet5"],
        ["--resume", "no/such/run"],
        ["--evaluate", "no/such/run"],
        ["--deadline", "9", "--plan", "--rho", "0"],
    ),
    "profiler": (["--rho", "0.5"], ["--from_trace", "no/such/trace"]),
    "data": (["show", "--dataset_name", "digits", "--data_dir", "x"], ["prepare", "--dataset_name", "digits"]),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_on_the_command_line_is_answered_without_tensorflow(command):
    code = f"""
import sys, {command}
from elastic_trainer.system.errors import UserError
for sys.argv[1:] in {MISTAKES[command]!r}:
    try:
        {command}.main()
    except UserError:
        continue
    sys.exit('not refused: ' + ' '.join(sys.argv))
"""
    assert not modules_after(code) & {"tensorflow", "keras"}
