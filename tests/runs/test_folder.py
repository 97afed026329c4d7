"""The folder of a run: one run at a time writes to it, and only a run's files are deleted."""

import subprocess
import sys

import pytest
from command_line import ROOT

from elastic_trainer.runs.folder import run_folder
from elastic_trainer.system.errors import UserError


def test_second_run_in_the_same_folder_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    program = f"""
import time
from pathlib import Path
from elastic_trainer.runs.folder import run_folder
with run_folder(Path({str(tmp_path)!r}), "mine", resume=True):
    print("locked", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(UserError, match=r"another run is writing .*--run_name"),
            run_folder(tmp_path, "mine", resume=True),
        ):
            pass
        with run_folder(tmp_path, "mine") as other:
            assert other.name == "mine-2"
    finally:
        holder.kill()
        holder.wait()
    with run_folder(tmp_path, "mine", resume=True):  # the lock ended with its process
        assert (tmp_path / "mine" / "config.json").exists()


def test_partial_files_of_a_killed_run_are_deleted(tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    left = [folder / ".123.metrics.csv", folder / "checkpoints" / ".123.step-0000000001.npz"]
    kept = [folder / ".gitignore", folder / "notes.txt"]
    for path in left + kept:
        path.touch()
    with run_folder(tmp_path, "mine", resume=True):
        assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_a_folder_that_is_no_run_is_refused_and_nothing_is_changed(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    for arguments, message in (
        ((tmp_path / "file" / "logs", "mine"), "Not a directory"),
        ((tmp_path, "file", True), "--run_name file: .* is a file"),
        ((tmp_path, "mine", True), "--resume: .* contains no run"),
    ):
        with pytest.raises(UserError, match=message), run_folder(*arguments):
            pass
    with run_folder(tmp_path, "mine") as folder:
        assert folder.name == "mine-2" and folder.is_dir()
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "mine", "thesis.tex"}, "nothing was written there"
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "text"
