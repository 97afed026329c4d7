"""A command gets its share of the processor, and so do the processes that it starts."""

import subprocess
import sys

from command_line import ROOT

SPIN = "import os, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass\nprint(os.times().user)"


def slow(*words):
    script = ROOT / "scripts" / "tools" / "slow_machine.sh"
    done = subprocess.run([script, *words], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_what_a_command_starts_gets_its_share_and_its_exit_status_is_kept():
    code, out, lines = slow("--load", "1,2", "0.1", "bash", "-c", f"{sys.executable} -c '{SPIN}'; exit 3")
    assert code == 3 and float(out) < 1, "of 3 seconds"
    assert lines[0].startswith("slow_machine: 10% of the processor by ")
    assert lines[-1].startswith("slow_machine: ended after ")


def test_bad_input_is_one_line():
    for words, says in (
        (("2", "ls"), "argument SHARE: '2' must be a share of the processor from 0.01 to 1, such as 0.25"),
        (("--load", "4,2", "1", "ls"), "argument --load: '4,2' must be two numbers of seconds, such as 20,40"),
        (("0.5",), "COMMAND: is missing, such as ./scripts/run_demo.sh"),
        (("0.5", "no_such_command"), "COMMAND: there is no program no_such_command"),
    ):
        code, _, lines = slow(*words)
        assert code == 2 and lines[-1] == f"slow_machine.py: error: {says}"
