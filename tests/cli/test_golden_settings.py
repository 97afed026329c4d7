"""What 63 command lines of pages, figures and tests mean: the golden table of the fourth floor plan (LAYOUT's step 3).

golden_settings.json has the settings of `main.py` without a flag, and of each line those that differ. It was written
before the settings became one object; docs/log/smaller.md explains what has changed since. None: the run chooses.
"""

import json
import shlex
from pathlib import Path

import resolutions  # noqa: F401  # the schemes of figure 13

from elastic_trainer.cli.commands import parse_training

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_settings.json")


def settings(line):
    """By name, as JSON types; paths in this checkout are relative to it."""
    record = parse_training(shlex.split(line)).to_record()
    return json.loads(json.dumps(record).replace(f"{ROOT}/", ""))


def table(lines):
    """As in the file."""
    common = settings("")
    found = {line: {k: v for k, v in settings(line).items() if v != common[k]} for line in lines}
    return {"": common, **found}


def test_command_lines_mean_what_they_meant():
    expected = json.loads(GOLDEN.read_text())
    found = table([line for line in expected if line])
    assert len(found) > 60
    for line, values in found.items():
        assert values == expected[line], line
