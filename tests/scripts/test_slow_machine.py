"""A command gets its share of the processor, and so do the processes that it starts."""

import subprocess
import sys

import pytest
from command_line import ROOT

SPIN = "import os, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass\nprint(os.times().user)"


def slow(*words):
    script = ROOT / "scripts" / "tools" / "slow_machine.sh"
    return subprocess.run([script, *words], check=False, capture_output=True, text=True)


def test_what_a_command_starts_gets_its_share_and_its_exit_status_is_kept():
    done = slow("0.1", "bash", "-c", f"{sys.executable} -c '{SPIN}'; exit 3")
    if "no control group here" in done.stderr:
        pytest.skip("the kernel lets us make no control group")
    assert done.returncode == 3 and float(done.stdout) < 1, "of 3 seconds"


def test_bad_input_is_one_line():
    for words, says in (
        (("2", "ls"), "SHARE: '2' must be a share of the processors, such as 0.25"),
        (("0.5",), "COMMAND: there is no program ''"),
        (("0.5", "no_such_command"), "COMMAND: there is no program 'no_such_command'"),
    ):
        done = slow(*words)
        assert done.returncode == 2 and done.stderr == f"slow_machine.sh: error: {says}\n"
