"""The parsers of main.py and profiler.py, made from the fields of settings.py (no TensorFlow here).

`--help` and docs/flags.md show the same text about a flag, from its field.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.options import Flag
from elastic_trainer.settings import DIGITS, MAIN_FLAGS, PAPER, PHOTOS, PROFILER_FLAGS, RECIPES

EPILOG = (
    "If a flag has three defaults, they are for digits, for image_folder, and for other data sets. docs/flags.md "
    "explains more."
)


def is_open(flag: Flag) -> bool:
    """Whether the default depends on other flags; the parser then has none."""
    return bool(flag.words) or flag.name in {**PAPER, **RECIPES["robust"]}


def default_text(flag: Flag) -> str:
    """The default in Markdown; empty if there is none."""
    if flag.words:
        return flag.words
    if flag.name not in PAPER:
        return _value_text(flag.default)
    texts = [_value_text(table[flag.name]) for table in (DIGITS, PHOTOS, PAPER)]
    return texts[0] if len({*texts}) == 1 else " / ".join(texts)


def _value_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if type(value) in (int, float) else f"`{value}`"


def help_text(flag: Flag) -> str:
    """Meaning of the flag, in Markdown."""
    return flag.help.replace("{names}", ", ".join(f"`{name}`" for name in getattr(flag.type, "names", ())))


def plain(text: str) -> str:
    """Markdown as plain text, for --help."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def add_flag(group: argparse._ActionsContainer, flag: Flag, **changed: Any) -> None:
    """Add a flag to a group; `changed` replaces arguments of `add_argument`."""
    text = default_text(flag) if "default" not in changed else ""
    settings: dict[str, Any] = {
        "type": flag.type,
        "metavar": flag.metavar,
        "default": None if is_open(flag) else flag.default,
        "help": plain(help_text(flag) + (f" (default: {text})" if text else "")).replace("%", "%%"),
    }
    if flag.is_optional:
        settings |= {"nargs": "?", "const": True, "metavar": flag.metavar or "True|False"}
    group.add_argument(f"--{flag.name}", **{**settings, **changed})


def add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, Flag]) -> None:
    """Add flags, in one group per section."""
    for section in dict.fromkeys(flag.section for flag in flags.values()):
        group = parser.add_argument_group(section)
        for flag in flags.values():
            if flag.section == section:
                add_flag(group, flag)


def main_parser() -> OneLineParser:
    """The flags of main.py."""
    description = "Train one network under one scheme."
    parser = OneLineParser([profiler_parser], prog="main.py", description=description, epilog=EPILOG)
    add_flags(parser, MAIN_FLAGS)
    return parser


def profiler_parser() -> OneLineParser:
    """The flags of profiler.py."""
    description = "Measure what each tensor of a network costs to train."
    parser = OneLineParser([main_parser], prog="profiler.py", description=description, epilog=EPILOG)
    add_flags(parser, PROFILER_FLAGS)
    return parser
