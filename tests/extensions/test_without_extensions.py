"""Extensions are optional: nothing above needs them, and they use public names alone."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "elastic_trainer" / "extensions"
STEPS = ("data", "models", "profiler", "selection_solver_DP", "train", "utils")
NETWORK = """
import keras

def tiny(shape, classes):
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(shape), *layers])
"""
PROGRAM = """
import pkgutil, signal, sys
from importlib import import_module

import elastic_trainer

for found in pkgutil.walk_packages(elastic_trainer.__path__, "elastic_trainer."):
    import_module(found.name)
for name in sys.argv[1:]:
    import_module(name)
import main
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.trainer import Trainer

def line_of(*words):
    sys.argv = ["main.py", "--dataset_name", "digits", "--logdir", "logs", *words]
    try:
        main.main()
    except (Stopped, UserError) as error:
        return str(error)

RUN = ("--train_type", "full_training", "--input_size", "8", "--max_steps", "3", "--run_name", "tiny")
usual = Trainer.step

def stopped(trainer, batch):
    result = usual(trainer, batch)
    signal.raise_signal(signal.SIGINT)
    return result

Trainer.step = stopped
print("1", line_of("--model_name", "network.py:tiny", *RUN, "--export", "tflite"))
Trainer.step = usual
sys.argv = ["main.py", "--resume", "logs/tiny"]
main.main()
print("2", line_of("--train_type", "prunetrain"))
print("3", line_of("--export", "train_tflite"))
print("4", line_of("--export_rho", "0.3"))
print([name for name in sys.modules if "extensions." in name])
"""


def test_without_extensions_the_rest_imports_trains_resumes_and_exports(tmp_path):
    shutil.copytree(ROOT / "elastic_trainer", tmp_path / "elastic_trainer", ignore=lambda *_: ["extensions"])
    shutil.copytree(ROOT / "weights", tmp_path / "weights")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "network.py").write_text(NETWORK)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *STEPS], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = {line[0]: line for line in lines if line[:2] in ("1 ", "2 ", "3 ", "4 ")}
    assert "stopped after step 2 of 3" in said["1"]
    assert "--train_type: 'prunetrain' is not one of full_training" in said["2"]
    assert "--export: 'train_tflite' is not one of tflite" in said["3"]
    assert "--export_rho: there is no such flag" in said["4"]
    assert (tmp_path / "logs" / "tiny" / "model.tflite").is_file() and lines[-1] == "[]"


def test_extensions_use_public_names_of_other_rooms():
    private = []
    for path in EXTENSIONS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elastic_trainer"):
                private += [f"{path.name}: {one.name}" for one in node.names if one.name.startswith("_")]
    assert not private


def test_nothing_above_extensions_names_a_module_of_theirs():
    above = [path for path in (ROOT / "elastic_trainer").rglob("*.py") if EXTENSIONS not in path.parents]
    above += [ROOT / f"{name}.py" for name in STEPS]
    naming = {
        path.name for path in above if re.search(r"extensions\.(?!\{)|import extensions", path.read_text("utf-8"))
    }
    assert not naming
