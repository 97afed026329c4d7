"""The scripts as a user starts them: from any folder, and the benchmarks on a small network."""

import json
import runpy
import subprocess
import sys

import pytest
from command_line import NETWORK, ROOT

SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "scripts").glob("*/*.py")
    if "__main__" in (text := path.read_text(encoding="utf-8")) and path.parent.name != "board"
    if "run_path(" not in text  # it is main.py, with something changed
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_script(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 0 and script.rpartition("/")[2] in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("script", ["benchmarks/fuzz.py", "energy.py", "board/load.py"])
def test_scripts_start_in_any_folder(script, tmp_path):
    words = [sys.executable, ROOT / "scripts" / script, "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("quick_profiles")
def test_benchmark_prints_its_results_as_json_last(monkeypatch, capsys):
    path, keys = f"{ROOT}/scripts/benchmarks/benchmark_rho.py", {"rho", "kept", "profiled_full_step_ms"}
    monkeypatch.setattr("sys.argv", [path, *NETWORK, "--batch_size", "8", "--quick"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code == 0 and keys <= set(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts/benchmarks/records").glob("*.json")), ids=lambda path: path.name
)
def test_each_record_says_what_machine_it_is_of(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["environment"]["processor"] and record["environment"]["packages"]["tensorflow"]
