"""A command gets its share of the processor, and so do the processes that it starts."""

import subprocess
import sys

import pytest
from command_line import ROOT

SPIN = "import os, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass\nprint(os.times().user)"

SCRIPT = ROOT / "scripts" / "tools" / "slow_machine.sh"
# As where the kernel lets nobody make a control group.
WITHOUT_GROUP = "import pathlib, sys, slow_machine as m; m.CGROUPS = pathlib.Path('/no'); sys.exit(m.main())"


def slow(*words, script=(SCRIPT,)):
    done = subprocess.run([*script, *words], check=False, capture_output=True, text=True, cwd=SCRIPT.parent)
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_what_a_command_starts_gets_its_share_and_its_exit_status_is_kept():
    code, out, lines = slow("--load", "1,2", "0.1", "bash", "-c", f"{sys.executable} -c '{SPIN}'; exit 3")
    if "no control group" in lines[-1]:
        pytest.skip("the kernel lets us make no control group")
    assert code == 3 and float(out) < 1, "of 3 seconds"
    assert lines[0].startswith("slow_machine: 10% of the processor by /")
    assert lines[-1].startswith("slow_machine: ended after ")


def test_without_a_control_group_nothing_is_run():
    code, out, [*_, line] = slow("0.5", "echo", "ran", script=(sys.executable, "-c", WITHOUT_GROUP))
    assert code == 2 and not out and "SHARE: no control group can be made here" in line


def test_bad_input_is_one_line():
    for words, says in (
        (("2", "ls"), "argument SHARE: '2' must be a share of the processor from 0.01 to 1, such as 0.25"),
        (("--load", "4,2", "1", "ls"), "argument --load: '4,2' must be two numbers of seconds, such as 20,40"),
        (("0.5",), "COMMAND: is missing, such as ./scripts/run_demo.sh"),
        (("0.5", "no_such_command"), "COMMAND: there is no program no_such_command"),
    ):
        code, _, lines = slow(*words)
        assert code == 2 and lines[-1] == f"slow_machine.py: error: {says}"
