"""Flags, which are fields of the settings dataclasses, and the types of their values (no TensorFlow here).

    rho: float = flag(0.5, BUDGET, share, "SHARE", used_by=(ELASTIC,), help="step time of elastic training, …")

The parsers (cli/), config.json, --resume and docs/flags.md read all they need from the field.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from elastic_trainer.errors import not_one_of
from elastic_trainer.files import existing_parent
from elastic_trainer.machine import available_memory_mb

Settings = TypeVar("Settings")
Options = Mapping[str, Any]  # by name, complete


class Use(NamedTuple):
    """Which runs use a flag."""

    words: str  # for these runs
    holds: Callable[[Options], bool]  # options of a run -> whether it is one of them


@dataclass(frozen=True)
class Flag:
    """A flag; `flag` explains the attributes."""

    name: str
    default: Any
    help: str
    section: str
    type: Callable[[str], Any]
    metavar: str | None = None
    words: str = ""
    used_by: tuple[Use, ...] = ()
    is_free: bool = False
    evaluate: str = ""

    @property
    def is_optional(self) -> bool:
        """It may be given without a value, which means True."""
        return self.default is False


def parse_bool(text: str) -> bool:
    """A type for argparse: True or False, which the paper's scripts write out."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def flag(
    default: Any,
    section: str,
    type: Callable[[str], Any] = parse_bool,
    metavar: str | None = None,
    *,
    help: str,
    of: Callable[[Options], Any] | None = None,
    **more: Any,
) -> Any:
    """A dataclass field that is a flag.

    Args:
        default: default of the field. If it is False, the flag may be given without a value.
        section: section of docs/flags.md and of --help.
        type: converts the value, as in argparse. The default takes True or False.
        metavar: stands for the value in --help.
        help: text in Markdown; `{names}` is replaced by the names that `type` takes.
        of: all options -> value of the field; by default the value of the flag.
        more: words: text for the default, if it depends on other flags.
            used_by: conditions for a run to use the flag. If one does not hold, a warning names it.
            is_free: may change when a run continues.
            evaluate: "given" if the flag can be combined with --evaluate; "run" if the default then comes from the run.
    """
    return field(default=default, metadata={"flag": Flag("", default, help, section, type, metavar, **more), "of": of})


def derived(default: Any, of: Callable[[Options], Any]) -> Any:
    """A dataclass field that is not a flag: `of` computes its value from all options."""
    return field(default=default, metadata={"of": of})


def flags_of(*kinds: Any) -> dict[str, Flag]:
    """The flags of settings dataclasses by name."""
    return {
        one.name: replace(one.metadata["flag"], name=one.name)
        for kind in kinds
        for one in fields(kind)
        if "flag" in one.metadata
    }


def from_options(kind: type[Settings], options: Options) -> Settings:
    """The settings dataclass `kind` with the values of `options`. Fields missing there keep their default."""
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        of = one.metadata.get("of")
        if of is not None:
            values[one.name] = of(options)
        elif one.name in options:
            values[one.name] = options[one.name]
    return kind(**values)


# --- types of values --------------------------------------------------------------------------------------------------


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """A type for argparse: a number of `kind` from `low` to `high`. A `low` of `ABOVE_0` excludes 0 alone."""
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


def shares(text: str) -> tuple[float, ...]:
    """A type for argparse: different shares, such as `0.3,0.7`."""
    found = tuple(share(part) for part in text.split(","))
    if len({*found}) < len(found):
        raise argparse.ArgumentTypeError(f"must be different shares, such as 0.3,0.7, not '{text}'")
    return found


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type for argparse: an integer from `low` to `high`."""
    return number(low, high, int)


ABOVE_0 = 1e-12  # the smallest positive value of a flag
# Upper bounds are far above any real value; they catch typing errors that would exhaust the memory.
count = whole_number(1, 1_000_000_000)
share = number(ABOVE_0, 1)
rate = number(ABOVE_0, 100)
at_least_0 = number(0, 1e6)


def duration(text: str) -> float:
    """A type for argparse: seconds, given in seconds, minutes or hours."""
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
    """A type for argparse: MB, given as `900M`, `1.5G`, or as a share of what is available now, such as `80%`."""
    available_mb = available_memory_mb()
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


class OneOf:
    """A type for argparse: one of `names`, which may grow until it is called."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise argparse.ArgumentTypeError(not_one_of(text, [*self.names]))
        return text


def stem_to_write(text: str) -> Path:
    """A type for argparse: the path of files without the ends of their names."""
    if Path(text).name in ("", ".."):
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; add a name, such as {Path(text, 'name')}")
    return Path(text)


def file_to_write(text: str) -> Path:
    """A type for argparse: the path of a file, which may exist."""
    if stem_to_write(text).is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; add a name, such as {Path(text, 'name')}")
    return Path(text)


def folder(text: str) -> Path:
    """A type for argparse: the path of a folder that exists or can be made."""
    path = Path(text)
    if not existing_parent(path).is_dir():
        raise argparse.ArgumentTypeError(f"{existing_parent(path)} is a file; give a folder")
    return path


def existing_file(text: str) -> Path:
    """A type for argparse: the path of a file that exists."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{text}'")
    return Path(text)
