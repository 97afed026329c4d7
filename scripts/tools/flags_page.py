#!/usr/bin/env python
"""Bring the tables of docs/flags.md up to date with the fields of settings.py and the schemes of registry.py.

python scripts/tools/flags_page.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils
from elastic_trainer.cli.flags import default_text, help_text
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.files import write_text
from elastic_trainer.registry import SCHEMES
from elastic_trainer.settings import MAIN_FLAGS, PROFILER_FLAGS

ALL_FLAGS = {**MAIN_FLAGS, **PROFILER_FLAGS}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"


def flags_table(section: str) -> str:
    """A row a flag of the section."""
    flags = [flag for flag in ALL_FLAGS.values() if flag.section == section]
    rows = [f"| `--{flag.name}` | {default_text(flag)} | {help_text(flag)} |" for flag in flags]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def schemes_table() -> str:
    """A row a scheme."""
    rows = [f"| `{name}` | {scheme.trains} |" for name, scheme in SCHEMES.items()]
    return "\n".join(["| `--train_type` | trains |", "|---|---|", *rows])


def updated(page: str) -> str:
    """The page with current tables: after `<!-- flags: SECTION -->` or `<!-- schemes -->`, up to `<!-- end -->`."""

    def block(match: re.Match[str]) -> str:
        table = flags_table(match[2]) if match[2] else schemes_table()
        return f"{match[1]}\n{table}\n<!-- end -->"

    return re.sub(r"(<!-- (?:flags: ([^>]+)|schemes) -->)\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def main() -> None:
    OneLineParser(prog="flags_page.py", description=__doc__).parse_args()
    write_text(PAGE, updated(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    utils.run_cli(main)
