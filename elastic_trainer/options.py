"""What a flag is, a field of a settings dataclass, and the types of its value (no TensorFlow here).

    rho: float = flag(0.5, BUDGET, share, "SHARE", used_by=(ELASTIC,), help="step time of elastic training, …")

The parsers (cli/), config.json, --resume and docs/flags.md read all they need from the field.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from elastic_trainer.errors import not_one_of

Built = TypeVar("Built")
Options = Mapping[str, Any]  # by name, complete


class Use(NamedTuple):
    """Which runs use a flag.

    Attributes:
        words: name of the flag -> these runs in words.
        holds: name of the flag, options of a run -> whether it does.
    """

    words: Callable[[str], str]
    holds: Callable[[str, Options], bool]


@dataclass(frozen=True)
class Flag:
    """A flag. What it is made from stands in its field, see `flag`."""

    name: str
    default: Any
    help: str
    section: str
    type: Callable[[str], Any]
    metavar: str | None = None
    words: str = ""
    used_by: tuple[Use, ...] = ()
    is_free: bool = False
    follows_record: bool = False
    earlier: Any = None
    evaluate: str = ""

    @property
    def is_optional(self) -> bool:
        """Whether it may be given without a value, which turns it on."""
        return self.default is False


def truth(text: str) -> bool:
    """The paper's scripts pass True and False as words."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def flag(
    default: Any,
    section: str,
    type: Callable[[str], Any] = truth,
    metavar: str | None = None,
    *,
    help: str,
    of: Callable[[Options], Any] | None = None,
    **more: Any,
) -> Any:
    """A field that is a flag.

    Args:
        default: of the field. With False, the flag may be given without a value.
        section: of docs/flags.md, and of --help.
        type: of its value, as argparse takes it. By default True or False.
        metavar: for its value in --help.
        help: in Markdown; `{names}` stands for the names that it takes.
        of: the field's value, from all options; by default it is the flag's.
        more: words: the default in words, if it follows from other flags.
            used_by: the runs that use it; others are warned. The first that does not hold is reported.
            is_free: it may change when a run continues.
            follows_record: a run that continues takes it from its record. The default may have changed since.
            earlier: what it would have been in runs from before it existed.
            evaluate: "given" if it goes with --evaluate, "run" if it comes from the evaluated run besides.
    """
    return field(default=default, metadata={"flag": Flag("", default, help, section, type, metavar, **more), "of": of})


def derived(default: Any, of: Callable[[Options], Any]) -> Any:
    """A field that is no flag: its value follows `of` all options."""
    return field(default=default, metadata={"of": of})


def flags_of(*kinds: Any) -> dict[str, Flag]:
    """The flags of settings dataclasses, by name."""
    return {
        one.name: replace(one.metadata["flag"], name=one.name)
        for kind in kinds
        for one in fields(kind)
        if "flag" in one.metadata
    }


def built(kind: type[Built], options: Options) -> Built:
    """The settings dataclass `kind`, of complete options. Fields that `options` lack keep their default."""
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        of = one.metadata.get("of")
        if of is not None:
            values[one.name] = of(options)
        elif one.name in options:
            values[one.name] = options[one.name]
    return kind(**values)


# --- types of values --------------------------------------------------------------------------------------------------


def number(kind: type, low: float, high: float, rule: str) -> Callable[[str], Any]:
    """A type for argparse: a number of `kind` from `low` to `high`; `rule` says in words what is allowed."""

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
    """A type for argparse: an integer from `low` to `high`."""
    return number(int, low, high, f"a whole number from {low:,} to {high:,}")


# Upper bounds lie far beyond any use and before what a slip of the finger would make of a device's memory.
count = whole_number(1, 1_000_000_000)
share = number(float, 1e-9, 1, "above 0 and at most 1")
rate = number(float, 1e-12, 100, "above 0 and at most 100")
at_least_0 = number(float, 0, 1e6, "a number of at least 0")


def duration(text: str) -> float:
    """Seconds, from seconds or minutes or hours."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"must be a time above 0 such as 3600, 90m or 2.5h, not '{text}'")
    return seconds


class OneOf:
    """A type for argparse: one of `names`, as they are when it is called."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise argparse.ArgumentTypeError(not_one_of(text, [*self.names]))
        return text


def names_of(type: Any) -> Iterable[str]:
    """The names that a type takes; empty if it takes other values."""
    return type.names if isinstance(type, OneOf) else ()


def stem_to_write(text: str) -> Path:
    """A type for argparse: the path of files, without what their names end with."""
    if Path(text).name in ("", ".."):
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; add a name, such as {Path(text, 'name')}")
    return Path(text)


def file_to_write(text: str) -> Path:
    """A type for argparse: the path of a file, which may exist."""
    if stem_to_write(text).is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a folder; add a name, such as {Path(text, 'name')}")
    return Path(text)


def folder(text: str) -> Path:
    """A type for argparse: the path of a folder, which need not exist but can be made."""
    path = Path(text)
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file; give a folder")
    return path


def existing_file(text: str) -> Path:
    """A type for argparse: the path of a file that exists."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{text}'")
    return Path(text)
