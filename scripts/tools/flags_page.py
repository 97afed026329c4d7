#!/usr/bin/env python
"""Bring the tables of docs/flags.md and docs/presets.md up to date with the settings and the schemes.

python scripts/tools/flags_page.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils
from elastic_trainer.cli.commands import NAMES
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import MAIN_FLAGS, PRESETS, PROFILER_FLAGS, preset_table
from elastic_trainer.settings.flags import OneLineParser, help_text, value_text
from elastic_trainer.system.files import write_text

ALL_FLAGS = {**MAIN_FLAGS, **PROFILER_FLAGS}
PAGES = [Path(__file__).resolve().parents[2] / "docs" / name for name in ("flags.md", "presets.md")]


def flags_table(section: str) -> str:
    """A row a flag of the section."""
    flags = [flag for flag in ALL_FLAGS.values() if flag.section == section]
    rows = [
        f"| `--{flag.name}` | {flag.words or value_text(flag.default)} | {help_text(flag, NAMES)} |" for flag in flags
    ]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def schemes_table() -> str:
    """A row a scheme."""
    rows = [f"| `{name}` | {scheme.trains} |" for name, scheme in SCHEMES.items()]
    return "\n".join(["| `--train_type` | trains |", "|---|---|", *rows])


def presets_table() -> str:
    """A row a setting in which the presets differ."""
    head, *rows = preset_table(PRESETS)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| `{name}` | {' | '.join(values)} |" for name, *values in rows)])


def updated(page: str) -> str:
    """The page with current tables, each between `<!-- flags: SECTION -->`, presets or schemes, and `<!-- end -->`."""

    def block(match: re.Match[str]) -> str:
        others = {"schemes": schemes_table, "presets": presets_table}
        table = flags_table(match[3]) if match[3] else others[match[2]]()
        return f"{match[1]}\n{table}\n<!-- end -->"

    return re.sub(r"(<!-- (flags: ([^>]+)|schemes|presets) -->)\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def main() -> None:
    OneLineParser(prog="flags_page.py", description=__doc__).parse_args()
    for page in PAGES:
        write_text(page, updated(page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    utils.run_cli(main)
