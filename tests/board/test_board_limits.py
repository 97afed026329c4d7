"""board_train.py where time, memory, the disk, photos or files are not as it needs them."""

import fcntl
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from small_boards import changed_copy, result_of, run, weights_of

from elastic_trainer.datasets import decoding, layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ai_edge_litert") is None, reason="ai-edge-litert is not installed"
)
pytest_plugins = ["small_boards"]


def test_a_deadline_that_ends_while_photos_are_read_keeps_those_that_were(three_wheels, exported, photos, tmp_path):
    slow = changed_copy(
        exported, tmp_path / "slow", "board_photos.py", "image = read_photo", "time.sleep(0.2); image = read_photo"
    )
    done = run(three_wheels, slow, "--data_dir", photos, "--output", tmp_path / "out", "--deadline", "4s", code=2)
    told = re.search(r"--deadline: it is over, and (\d+) of 60 photos are read; give more time", done.stderr)
    assert told is not None and int(told[1]) < 60
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"features.bin"}, "to go on from"


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
    result = result_of(tmp_path / "out")
    assert result["seconds"] <= 1.02 * 5 and 0 < result["steps"] < result["planned_steps"]  # as main.py may
    assert result["epochs"][-1]["test_accuracy"] > 0
    assert (
        f"the deadline ended it after {result['steps']} of {result['planned_steps']} steps; continue with --resume"
        in done.stdout
    )
    run(three_wheels, exported, *arguments, "--resume")
    best, result, unbroken = result["best_accuracy"], result_of(tmp_path / "out"), result_of(trained)
    assert result["best_accuracy"] >= best, "the best weights stay the best where an epoch goes on"
    assert result["steps"] == unbroken["steps"] and len(result["epochs"]) == len(unbroken["epochs"])
    assert not (tmp_path / "out" / "checkpoint.npz").exists()


def test_a_disk_that_is_full_at_the_end_loses_nothing(three_wheels, exported, photos, trained, tmp_path):
    output, line = tmp_path / "out", "        content = json.dumps(result, indent=1).encode()\n"
    error = '        raise OSError(28, "No space left", "x")\n'
    full = changed_copy(exported, tmp_path / "full", "board_run.py", line, error)
    run(three_wheels, full, "--data_dir", photos, "--output", output, code=1)
    assert {"checkpoint.npz", "weights.npz", "model.tflite"} < {path.name for path in output.iterdir()}
    run(three_wheels, exported, "--data_dir", photos, "--output", output, "--resume")
    assert {path.name for path in output.iterdir()} == {path.name for path in trained.iterdir()}
    for name, value in weights_of(trained).items():
        np.testing.assert_array_equal(weights_of(output)[name], value)


def test_a_loss_that_is_no_number_is_one_line(three_wheels, exported, photos, tmp_path):
    done = run(three_wheels, exported, "--data_dir", photos, "--output", tmp_path, "--learning_rate", "1e8", code=2)
    assert re.search(r"the loss is .* smaller --learning_rate", done.stderr)


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


def test_a_second_program_in_the_same_folder_is_refused(refusal, photos, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert f"{tmp_path}: another program uses this folder" in refusal("--data_dir", photos, "--output", tmp_path)
    finally:
        os.close(descriptor)


def test_damaged_files_of_the_export_are_named(refusal, exported, tmp_path, monkeypatch):
    folder = tmp_path / "board"
    shutil.copytree(exported, folder)
    monkeypatch.setattr(sys.modules["board_device"], "HERE", folder)
    for name in ("inference.tflite", "train.tflite"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-100])
        assert f"{name}: is damaged, or of another export or version; copy the folder" in refusal()
        (folder / name).unlink()
        assert f"{name}: cannot be read: No such file or directory; copy the folder" in refusal()
        (folder / name).write_bytes(content)
    for text in ("{}", "[]", "{"):
        (folder / "board.json").write_text(text)
        assert "board.json: is damaged, or of another export or version; copy the folder" in refusal()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: --data_dir"),
        (("--data_dir", "nowhere"), "--data_dir nowhere: is no folder; give one with"),
        (("--data_dir", "{photos}/.."), "class 'photos' is not among ant, bee, cat"),
        (("--data_dir", "{photos}", "--num_epochs", "0"), "--num_epochs: must be above 0"),
        (("--data_dir", "{photos}", "--output", "{photos}/ant/0.png/x"), "--output .*: cannot be made"),
    ],
)
def test_bad_input_is_one_line(arguments, message, refusal, photos, tmp_path):
    words = ["--output", tmp_path / "out", *(text.format(photos=photos) for text in arguments)]
    assert re.search(f"^board_train.py: error: .*({message})", refusal(*words))


def test_a_broken_photo_is_named_and_left_out(three_wheels, exported, photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "bee" / "7.png").write_bytes(b"no image")
    done = run(three_wheels, exported, "--data_dir", folder, "--output", tmp_path / "out", "--num_epochs", 1)
    assert "bee/7.png: is left out, it cannot be read: " in done.stderr
    assert sum(map(int, re.findall(r"(\d+) (?:photos to train|to test) on", done.stdout))) == 59


def test_the_board_finds_reads_and_splits_photos_by_the_code_of_main(exported):
    for module in (decoding, layout):
        name = f"board_{Path(str(module.__file__)).name}"
        assert (exported / name).read_bytes() == Path(str(module.__file__)).read_bytes()


def test_a_photo_that_the_memory_of_the_board_does_not_hold_is_named(three_wheels, exported, photos, tmp_path):
    little = changed_copy(
        exported, tmp_path / "little", "board_photos.py", "free_memory_mb(counts_swap=False)", "0.001"
    )
    done = run(three_wheels, little, "--data_dir", photos, "--output", tmp_path / "out", code=2)
    assert re.search(r"pixels take .* MB while they are decoded, and the limit is 0 MB; make it smaller", done.stderr)
