"""Files are complete or absent; the errors of a command line take one line."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from command_line import ROOT

import utils
from elastic_trainer.system.errors import UserError, printable
from elastic_trainer.system.files import (
    atomic_path,
    write_csv,
    write_json,
    write_text,
)


def test_full_disk_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})

    def full_disk():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"summary\.json: cannot be written: No space left on device"):
        full_disk()
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(SystemExit, match="1"):  # it may succeed as it is, once there is room
        utils.run_cli(full_disk)


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
    assert len(lines) == 1 and re.search(f": error: out of memory{reason}; reduce --batch_size", lines[0]), lines


def test_path_too_long_for_the_system_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        utils.run_cli(lambda: print(Path("long" * 100).exists()))
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(r": error: 'long.*long': File name too long; give a shorter path$", line) and len(line) < 120, line


def test_other_errors_keep_their_traceback():
    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        utils.run_cli(main)


ODD = "caf\udce9 é\n\x85\u2028\x1b[1m 日本\u200d"


def test_printable_escapes_what_breaks_a_line_or_cannot_be_encoded_and_nothing_else():
    assert printable(ODD) == r"caf\udce9 é\n\x85\u2028\x1b[1m 日本" + "\u200d"


def test_files_and_output_take_names_that_are_not_utf8(tmp_path):
    write_text(tmp_path / "text", ODD)
    write_csv(tmp_path / "table.csv", ["name"], [[ODD]])
    for name in ("text", "table.csv"):
        assert r"caf\udce9 é" in (tmp_path / name).read_text(encoding="utf-8")
    code = f"import utils; utils.run_cli(lambda: print({ODD!r}))"
    for encoding in ("utf-8", "ascii"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
        assert done.returncode == 0 and rb"caf\udce9" in done.stdout, done.stderr


def test_a_command_that_has_just_started_ends_at_ctrl_c_without_a_traceback():
    press = "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
    code = "import os, signal, sys, time; sys.argv[0] = {name!r}; import utils; {rest}"
    cases = {
        (str(ROOT / "main.py"), press): -signal.SIGINT,
        (str(ROOT / "main.py"), f"utils.run_cli(lambda: ({press.replace(';', ',')}))"): 128 + signal.SIGINT,
    }
    for (name, rest), status in cases.items():
        words = [sys.executable, "-c", code.format(name=name, rest=rest)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False, preexec_fn=_takes_ctrl_c)
        assert (done.returncode, done.stderr) == (status, b"")
    words = [sys.executable, "-c", code.format(name="somewhere/else.py", rest=press)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False, preexec_fn=_takes_ctrl_c)
    assert b"KeyboardInterrupt" in done.stderr, "a program that imports it keeps its own handler"


def _takes_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without
