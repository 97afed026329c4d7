"""The command lines as a user runs them."""

import json

import plot
import pytest
from command_line import NETWORK, ROOT, command, error_line, run_here, train_here
from small_images import write_noise

import profiler
from elastic_trainer.system.errors import UserError


def test_bad_option_is_one_line_on_stderr():
    assert "--rho: must be above 0 and at most 1, not '7'" in error_line("main.py", "--rho", "7")


@pytest.mark.usefixtures("quick_profiles")
def test_profile_train_and_compare_work_one_after_the_other(tmp_path, capsys):
    """Profile, train and compare as a user does, on the digits, with some mistakes."""
    flags = [*NETWORK, "--logdir", tmp_path]
    run_here(profiler.main, "profiler.py", *flags)
    out = capsys.readouterr().out
    assert "operation time that matched no operation of the network: 0." in out and "smallest feasible rho" in out
    [folder] = (tmp_path / "profiles").glob("*_16_10_64")
    assert {"table.csv", "profile.json", "timing.png", "timing.pdf"} <= {path.name for path in folder.iterdir()}
    original = (folder / "profile.json").read_text()
    profile = json.loads(original)
    assert profile["full_step_ms"] == pytest.approx(profile["forward_ms"] + profile["backward_ms"])

    profile["environment"]["packages"]["tensorflow"] = "2.0.0"
    (folder / "profile.json").write_text(json.dumps(profile))
    train_here(*flags, "--max_steps", 1, "--run_name", "stale", "--rho", 0.9)
    assert "different setup: tensorflow 2.0.0" in (out := capsys.readouterr().out)
    assert "times follow from FLOPs, and from this run's steps; to measure them first: python profiler.py" in out
    (folder / "profile.json").write_text(original)
    with pytest.raises(UserError, match=r"--rho 0.01: training the head alone takes.* give at least 0\."):
        train_here(*flags, "--rho", 0.01)

    run = ["--max_steps", "6", "--run_name", "mine", "--rho", "0.9"]
    done = command("main.py", *flags, *run)  # a process of its own finds the same network
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == ["accuracy", "time:", "next:"]
    train_here(*flags, *run)
    assert (tmp_path / "mine" / "summary.json").is_file() and (tmp_path / "mine-2" / "summary.json").is_file()
    train_here(*flags, "--train_type", "full_training", "--max_steps", "6", "--run_name", "full")
    summary = json.loads((tmp_path / "full" / "summary.json").read_text())
    assert summary["train_type"] == "full_training" and summary["rho"] is None

    capsys.readouterr()
    runs = [tmp_path / "full", tmp_path / "mine-2"]
    run_here(plot.main, "plot.py", "curves", *runs, "--output", tmp_path / "figure")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "scheme"
    assert [line.split("  ")[0] for line in lines[2:4]] == ["ElasticTrainer", "Full training"]
    assert (tmp_path / "figure.pdf").is_file() and (tmp_path / "figure.png").is_file()


def test_a_model_that_cannot_be_saved_is_refused_before_training(tmp_path):
    model = [*NETWORK, "--model_name", f"{ROOT}/tests/zoo.py:subclassed", "--train_type", "full_training"]
    with pytest.raises(UserError, match="--save_model: Keras cannot save this model and load it again: Object Subcl"):
        train_here(*model, "--logdir", tmp_path, "--save_model")
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing"


def test_a_run_without_a_home_folder_in_the_c_locale_writes_names_in_utf8(tmp_path, monkeypatch):
    """As in a container: the user has no entry in the system's list, and Python takes file names as ASCII."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pwd\n\ndef none(*_):\n    raise KeyError\n\npwd.getpwuid = none\n"
    )
    photos = write_noise(tmp_path / "phötos")
    for part in ("train", "test"):
        (photos / part / "bee").rename(photos / part / "bée")
    words = ["--dataset_name", "image_folder", "--data_dir", photos, "--model_name", f"{ROOT}/tests/zoo.py:branches"]
    words += ["--input_size", 12, "--train_type", "full_training", "--max_steps", 1, "--export", "tflite"]
    monkeypatch.delenv("HOME")
    for name, value in (("PYTHONPATH", str(tmp_path)), ("LC_ALL", "C"), ("PYTHONUTF8", "0")):
        monkeypatch.setenv(name, value)
    done = command("main.py", *words, "--logdir", tmp_path, "--run_name", "é")
    assert done.returncode == 0 and done.stderr.count("no home folder") == 1, done.stderr
    assert "atplotlib" not in done.stderr
    assert (tmp_path / "é" / "labels.txt").read_bytes().decode() == "ant\nbée\ncat\n"
