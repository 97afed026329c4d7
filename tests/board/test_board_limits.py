"""board_train.py where time, memory, the disk, photos or files are not as it needs them."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_boards import NAMES, changed_copy, run, weights_of

from elastic_trainer.board.needs import needs_line
from elastic_trainer.datasets import decoding, digests

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ai_edge_litert") is None, reason="ai-edge-litert is not installed"
)
pytest_plugins = ["small_boards"]


def test_the_best_weights_stay_the_best_where_resume_goes_on_with_an_epoch(board_modules):
    """A deadline ended the epoch early, and what it had reached then is better than at its end."""
    accuracies, weights = iter([0.85, 0.82]), iter([1.0, 2.0])
    run = object.__new__(board_modules.train.Run)
    run.recipe, run.args, run.finishing = (
        {"validation_share": 1.0, "average_head": False},
        SimpleNamespace(deadline=None),
        None,
    )
    run.examples, run.epoch_steps, run.planned, run.best = SimpleNamespace(test=np.arange(4)), 10, 10, {}
    run.network = SimpleNamespace(
        validate=lambda *_: (0.5, next(accuracies), 4), call=lambda name: {"weights": next(weights)}
    )
    run.state = {"step": 5, "steps": 5, "seconds": 1.0, "validation": [], "epochs": [], "sums": [1.0, 1.0]}
    run.state |= {"best": None, "test_photos": 4}
    run.write_model = lambda: None
    run.end_epoch()
    run.go_on()
    assert run.state["epochs"] == [] and run.state["steps"] == 10
    run.state["step"] = 10
    run.end_epoch()
    assert run.best == {"weights": 1.0} and run.state["best"] == {"accuracy": 0.85, "tested": 4}


def test_a_deadline_that_reading_the_photos_would_miss_is_refused_early(three_wheels, exported, photos, tmp_path):
    slow = changed_copy(
        exported, tmp_path / "slow", "board_photos.py", "image = read_photo", "time.sleep(0.1); image = read_photo"
    )
    start = time.monotonic()
    done = run(three_wheels, slow, "--data_dir", photos, "--output", tmp_path / "out", "--deadline", "4s", code=2)
    assert time.monotonic() - start < 4
    assert re.search(r"--deadline: 60 photos take \d s to read .*; give more than \d+ s, or fewer photos", done.stderr)
    assert not [*(tmp_path / "out").iterdir()]


def test_a_deadline_is_kept_where_each_step_and_prediction_is_slow(three_wheels, exported, photos, trained, tmp_path):
    line = "        return self.runner(name)(**values)"
    slow = changed_copy(
        exported,
        tmp_path / "slow",
        "board_engines.py",
        line,
        "        __import__('time').sleep(0.3 * (name in ('gradients', 'infer')))\n" + line,
    )
    arguments = ("--data_dir", photos, "--output", tmp_path / "out")
    done = run(three_wheels, slow, *arguments, "--deadline", "5s")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["seconds"] < 5 and 0 < result["steps"] < result["planned_steps"]
    assert result["epochs"][-1]["test_accuracy"] > 0
    assert (
        f"the deadline ended it after {result['steps']} of {result['planned_steps']} steps; continue with --resume"
        in done.stdout
    )
    run(three_wheels, exported, *arguments, "--resume")
    result, unbroken = (json.loads((folder / "result.json").read_text()) for folder in (tmp_path / "out", trained))
    assert result["steps"] == unbroken["steps"] and len(result["epochs"]) == len(unbroken["epochs"])
    assert not (tmp_path / "out" / "checkpoint.npz").exists()


def test_a_validation_that_the_deadline_cuts_short_says_of_how_many_photos(board_modules):
    network = object.__new__(board_modules.network.Network)
    network.part, network.infer = 2, lambda features: {"logits": features}
    labels = np.arange(10) % 2
    examples, photos = SimpleNamespace(labels=labels, read=lambda rows, _: np.eye(2)[labels[rows]]), np.arange(10)
    turns = iter([True, True, False])
    assert network.validate(examples, photos, lambda: next(turns))[1:] == (1.0, 4)
    assert network.validate(examples, photos, lambda: True)[1:] == (1.0, 10)
    assert network.validate(examples, photos, lambda: False)[1:] == (1.0, 2)


@pytest.fixture(scope="module")
def unfinished(three_wheels, exported, photos, tmp_path_factory):
    """The output of a run whose disk was full when it wrote its results."""
    place = tmp_path_factory.mktemp("unfinished")
    line, error = "        accuracies = [", '        raise OSError(28, "No space left", "x")\n'
    full = changed_copy(exported, place / "full", "board_run.py", line, error + line)
    run(three_wheels, full, "--data_dir", photos, "--output", place / "out", code=1)
    return place / "out"


def test_a_checkpoint_that_has_lost_arrays_is_refused(board_modules, unfinished, tmp_path, capsys):
    """Zip has no checksum of its list of contents, so a damaged one may hide some."""
    path = tmp_path / "checkpoint.npz"
    _, arrays = board_modules.train.read_checkpoint(unfinished / "checkpoint.npz")
    with np.load(unfinished / "checkpoint.npz") as file:
        np.savez(path, **{name: file[name] for name in file.files if name != min(arrays)})
    with pytest.raises(SystemExit):
        board_modules.train.read_checkpoint(path)
    assert f"--resume: {path} cannot be read (arrays are missing)" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_loses_nothing(three_wheels, exported, trained, unfinished, tmp_path):
    output = shutil.copytree(unfinished, tmp_path / "out")
    assert {path.name for path in output.iterdir()} == {"checkpoint.npz", "weights.npz", "model.tflite"}
    run(three_wheels, exported, "--data_dir", tmp_path / "elsewhere", "--output", output, "--resume")
    assert {path.name for path in output.iterdir()} == {path.name for path in trained.iterdir()}
    for name, value in weights_of(trained).items():
        np.testing.assert_array_equal(weights_of(output)[name], value)


@pytest.fixture
def refusal(board_modules, exported, monkeypatch, capsys):
    """A function of words that runs the program in this process, and returns the line that it ends with."""

    def refuse(*words):
        monkeypatch.setattr(sys, "argv", ["board_train.py", *map(str, words)])
        with pytest.raises(SystemExit, match="2"):
            board_modules.train.main()
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        return line

    return refuse


def test_a_disk_without_room_for_the_features_is_refused_at_the_start(refusal, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000))
    line = refusal("--data_dir", photos, "--output", tmp_path / "out")
    assert re.search(r"--output .*: features of 60 photos, and training, take .* MB, and the disk has 0 MB", line)


def test_the_export_says_what_the_board_needs(three_wheels, exported, photos, tmp_path):
    done = run(three_wheels, exported, "--data_dir", photos, "--output", tmp_path, "--learning_rate", "1e8", code=2)
    assert re.search(r"the loss is .* smaller --learning_rate", done.stderr)
    [features_mb, memory_mb] = re.findall(r"([\d,]+) MB", needs_line(exported, 60 * 10**6))
    assert features_mb == f"{(tmp_path / 'features.bin').stat().st_size:,}"
    assert 40 < int(memory_mb) < 100  # of so small a network


def test_a_second_program_in_the_same_folder_is_refused(refusal, exported, photos, tmp_path):
    for folder, words in ((tmp_path, ("--data_dir", photos, "--output", tmp_path)), (exported, ("--profile",))):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            assert f"{folder}: another program (process {os.getpid()}) uses this folder" in refusal(*words)
        finally:
            os.close(descriptor)


def test_damaged_files_of_the_export_are_named(refusal, exported, tmp_path, monkeypatch):
    folder, record = tmp_path / "board", json.loads((exported / "board.json").read_text())
    shutil.copytree(exported, folder)
    monkeypatch.setattr(sys.modules["board_device"], "HERE", folder)
    for name in ("inference.tflite", "train.tflite"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-100])
        assert f"{name}: is damaged, or of another export than board.json; copy the folder" in refusal()
        (folder / name).unlink()
        assert f"{name}: cannot be read: No such file or directory; copy the folder" in refusal()
        (folder / name).write_bytes(content)
    record["recipe"]["num_epochs"] = 5
    for text in ("{}", "[]", json.dumps(record)):
        (folder / "board.json").write_text(text)
        assert "board.json: cannot be read: is damaged, or of another version; copy the folder" in refusal()
    (folder / "board.json").write_text("{")
    assert "board.json: cannot be read: Expecting property name" in refusal()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data_dir: is missing"),
        (("--data_dir", "nowhere"), "--data_dir nowhere: there is no such folder or archive"),
        (("--data_dir", "{photos}/ant/0.png"), "--data_dir .*: is not a complete tar archive"),
        (("--data_dir", "{photos}/.."), "'photos' is no class of the network|contains no photos"),
        (("--data_dir", "{photos}", "--num_epochs", "0"), "--num_epochs: must be above 0"),
        (("--data_dir", "{photos}", "--test_fraction", "1"), "--test_fraction: must be above 0 and at most 0.9"),
        (("--data_dir", "{photos}", "--selection", "all"), "--selection: invalid choice"),
        (("--data_dir", "{photos}", "--output", "{photos}/ant/0.png/x"), "--output .*: cannot be made"),
    ],
)
def test_bad_input_is_one_line(arguments, message, refusal, photos, tmp_path):
    words = ["--output", tmp_path / "out", *(text.format(photos=photos) for text in arguments)]
    assert re.search(f"^board_train.py: error: .*({message})", refusal(*words))


def test_a_broken_photo_is_named_or_left_out(three_wheels, exported, photos, tmp_path):
    folder = tmp_path / "photos"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        for path in (photos / name).iterdir():
            (folder / name / path.name).write_bytes(path.read_bytes())
    (folder / "bee" / "7.png").write_bytes(b"no image")
    done = run(three_wheels, exported, "--data_dir", folder, "--output", tmp_path / "out", code=2)
    assert "bee/7.png: cannot be read as an image" in done.stderr and "--skip_broken" in done.stderr
    run(three_wheels, exported, "--data_dir", folder, "--output", tmp_path / "out", "--skip_broken")


def test_the_board_reads_and_splits_photos_by_the_code_of_main(exported):
    for name, module in (("board_decoding.py", decoding), ("board_digests.py", digests)):
        assert (exported / name).read_bytes() == Path(str(module.__file__)).read_bytes()


def test_a_photo_that_the_memory_of_the_board_does_not_hold_is_named(three_wheels, exported, photos, tmp_path):
    little = changed_copy(
        exported, tmp_path / "little", "board_photos.py", "free_memory_mb(counts_swap=False)", "0.001"
    )
    done = run(three_wheels, little, "--data_dir", photos, "--output", tmp_path / "out", code=2)
    assert re.search(r"pixels take .* MB while they are decoded, and the limit is 0 MB; make it smaller", done.stderr)
