"""Files are complete or absent; the errors of a command line take one line."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

import utils


def test_full_disk_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "summary.json"
    utils.write_json(path, {"old": 1})

    def full_disk():
        with utils.atomic_path(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(utils.UserError, match=r"summary\.json: cannot be written: No space left on device"):
        full_disk()
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("kind", ["numpy", "tensorflow", "python"])
def test_out_of_memory_is_one_line(kind, capsys):
    def main():
        if kind == "numpy":
            np.zeros(2**55, np.uint8)
        if kind == "python":
            raise MemoryError
        message = "Graph execution error:\n\nOOM when allocating tensor with shape[65536,64,112,112] and type float\n"
        raise tf.errors.ResourceExhaustedError(None, None, message)

    with pytest.raises(SystemExit) as stopped:
        utils.run_cli(main)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    reason = {"numpy": r" \(Unable to allocate 32.0 PiB .*\)", "python": ""}.get(kind, r" \(.*65536,64,112,112\]\)")
    assert len(lines) == 1 and re.search(f": error: memory ran out{reason}; a smaller --batch_size", lines[0]), lines


def test_other_errors_keep_their_traceback():
    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        utils.run_cli(main)


def test_every_step_runs_and_each_failure_is_one_line(capsys):
    done = []

    def fail(why):
        raise utils.UserError(why)

    with pytest.raises(SystemExit) as stopped:
        utils.run_each(lambda: fail("no energy"), lambda: done.append(1), lambda: fail("no export"))
    assert stopped.value.code == 2 and done == [1]
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "error: no energy",
        "error: no export",
    ]


def test_defect_in_a_step_is_raised_after_the_others():
    done = []
    with pytest.raises(ZeroDivisionError):
        utils.run_each(lambda: 1 / 0, lambda: done.append(1))
    assert done == [1]
