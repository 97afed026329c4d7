"""Flags are fields of a dataclass, and the parser is made from them (no TensorFlow here).

    rho: float = flag(0.5, BUDGET, share, "SHARE", "step time of elastic training, …")

--help, config.json, --resume and docs/flags.md read all they need from the field.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from elastic_trainer.system.errors import UserError, did_you_mean, not_one_of
from elastic_trainer.system.memory import free_memory_mb


@dataclass(frozen=True)
class Flag:
    """A flag.

    Attributes:
        default: default of the field. If it is False, the flag may be given without a value.
        section: section of docs/flags.md and of --help.
        type: converts the value, as in argparse.
        metavar: stands for the value in --help.
        help: text in Markdown; `{names}` is replaced by the names that can be chosen.
        words: text for the default, if it depends on other flags.
        is_free: may change when a run is resumed.
        evaluate: "given" if the flag can be combined with --evaluate; "run" if the default then comes from the run.
    """

    default: Any
    section: str
    type: Callable[[str], Any]
    metavar: str | None
    help: str
    words: str = ""
    is_free: bool = False
    evaluate: str = ""
    name: str = ""


def flag(default: Any, *about: Any, **more: Any) -> Any:
    """A dataclass field that is a flag; the arguments are those of `Flag`."""
    return field(default=default, metadata={"flag": Flag(default, *about, **more)})


def flags_of(kind: Any) -> dict[str, Flag]:
    """The flags of a dataclass by name."""
    return {one.name: replace(one.metadata["flag"], name=one.name) for one in fields(kind) if "flag" in one.metadata}


def plain(markdown: str) -> str:
    """Markdown as plain text, for --help."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


class OneLineParser(argparse.ArgumentParser):
    """Raises `UserError` for mistakes. Flags cannot be abbreviated: the meaning would change as flags are added.

    Args:
        others: flags of other commands, by the name of the command.
    """

    def __init__(self, others: Mapping[str, Collection[str]] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._others = others or {}

    def add(
        self, flags: Mapping[str, Flag], names: Mapping[str, Collection[str]], default: Any = argparse.SUPPRESS
    ) -> None:
        """Add flags, in one group per section.

        Args:
            flags: by name.
            names: those that a flag takes, by the name of the flag.
            default: value of a flag that is not given; without one it is left out, and --help shows the flag's own.
        """
        groups = {flag.section: self.add_argument_group(flag.section) for flag in flags.values()}
        for name, one in flags.items():
            shown = "" if default is None else one.words or value_text(one.default)
            text = help_text(one, names) + (f" (default: {shown})" if shown else "")
            more: dict[str, Any] = {"nargs": "?", "const": True} if one.default is False else {}
            groups[one.section].add_argument(
                f"--{name}",
                type=one.type if name not in names else one_of(names[name]),
                metavar=one.metavar,
                default=default,
                help=plain(text).replace("%", "%%"),
                **more,
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [*(sys.argv[1:] if args is None else args)]
        empty = next((word for word in words if word.startswith("--") and word.endswith("=--")), None)
        if empty is not None:  # of which argparse makes a list without a value
            raise UserError(f"{empty.removesuffix('=--')}: '--' is no value; give another")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise UserError(message.replace("argument ", "", 1))
        words = unknown.split() or [""]
        word = next((word for word in words if word.startswith("-")), None)
        if word is None:
            raise UserError(f"'{words[0]}': unexpected argument; values follow their flag, such as --seed 1")
        name = word.partition("=")[0]
        for other, flags in self._others.items():
            if name.removeprefix("--") in flags:
                raise UserError(f"{name}: is a flag of {other}, not of {self.prog}")
        hint = did_you_mean(name, [known for known in self._option_string_actions if known.startswith("--")])
        raise UserError(f"{name}: there is no such flag{hint or '; --help lists them'}")


def value_text(value: Any) -> str:
    """A default in Markdown; empty if there is none."""
    if value is None or value == "":
        return ""
    return f"{value:g}" if type(value) in (int, float) else f"`{value}`"


def help_text(flag: Flag, names: Mapping[str, Collection[str]]) -> str:
    """Meaning of the flag, in Markdown."""
    return flag.help.replace("{names}", ", ".join(f"`{name}`" for name in names.get(flag.name, ())))


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags, value by name, as the words of a command line. A value that looks like a flag is one word with its own."""
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    return [word for flag, text in pairs for word in ([f"{flag}={text}"] if text.startswith("-") else [flag, text])]


# --- types of values: they convert the text of a command line, and refuse what is out of range -----------------------


def parse_bool(text: str) -> bool:
    """True or False, which the paper's scripts write out."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """A type: a number of `kind` from `low` to `high`. A `low` of `ABOVE_0` excludes 0 alone."""
    rule = f"above 0 and at most {high:,.10g}" if low == ABOVE_0 else f"from {low:,.10g} to {high:,.10g}"
    if kind is int:
        rule = f"a whole number {rule}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {rule}, not '{text}'")
        return value

    return parse


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type: an integer from `low` to `high`."""
    return number(low, high, int)


ABOVE_0 = 1e-12  # the smallest positive value of a flag
# Upper bounds are far above any real value; they catch typing errors that would exhaust the memory.
count = whole_number(1, 1_000_000_000)
share = number(ABOVE_0, 1)
rate = number(ABOVE_0, 100)


def duration(text: str) -> float:
    """A type: seconds, given in seconds, minutes or hours."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(
            f"must be a time above 0 and below 1e9 seconds, such as 3600, 90m or 2.5h, not '{text}'"
        )
    return seconds


def duration_text(seconds: float) -> str:
    """A time in words like those that `duration` takes: `8.3s`, `90s`, `2m 38s`, `5m`, `2h 30m`."""
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.2g}s" if whole < 10 else f"{whole}s"
    unit, part, (units, parts) = "m", "s", divmod(whole, 60)
    if whole >= 7200:
        unit, part, (units, parts) = "h", "m", divmod(round(seconds / 60), 60)
    return f"{units}{unit} {parts}{part}" if parts else f"{units}{unit}"


def memory_size(text: str) -> float:
    """A type: MB, given as `900M`, `1.5G`, or as a share of what is available now, such as `80%`."""
    available_mb = free_memory_mb()
    if text.endswith("%") and available_mb is None:
        raise argparse.ArgumentTypeError("this system does not report its available memory; give a size, such as 900M")
    factors = {"M": 1.0, "G": 1e3, "%": 0.01 * (available_mb or 0.0)}
    try:
        megabytes = float(text[:-1]) * factors[text[-1:].upper()]
    except (KeyError, ValueError):
        megabytes = 0.0
    if not 0 < megabytes < 1e9 or (text.endswith("%") and float(text[:-1]) > 100):
        raise argparse.ArgumentTypeError(f"must be a size, such as 900M, 1.5G or 80%, not '{text}'")
    return megabytes


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A type: one of `names`, which may grow until it is called."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(not_one_of(text, [*names]))
        return text

    return parse


def path_to_write(text: str) -> Path:
    """A type: the path of files, with or without the ends of their names."""
    if Path(text).name in ("", "..") or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; add a name, such as {Path(text, 'name')}")
    return Path(text)


def folder(text: str) -> Path:
    """A type: the path of a folder that exists or can be made."""
    from elastic_trainer.system.files import existing_parent

    path = Path(text)
    if not existing_parent(path).is_dir():
        raise argparse.ArgumentTypeError(f"{existing_parent(path)} is a file; give a folder")
    return path


def existing_file(text: str) -> Path:
    """A type: the path of a file that exists."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{text}'")
    return Path(text)
