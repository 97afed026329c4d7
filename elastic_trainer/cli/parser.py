"""The parser of all command lines, and the types of their values. No TensorFlow, so mistakes are answered at once."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import KERAS_NETWORKS, MODEL_NAMES


class OneLineParser(argparse.ArgumentParser):
    """Mistakes become a `UserError`. No flag may be shortened: its meaning would change as flags are added.

    Args:
        siblings: make the parsers of the other commands, whose flags a user may have meant.
    """

    def __init__(self, siblings: Sequence[Callable[[], argparse.ArgumentParser]] = (), **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._siblings = siblings

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with one line that names the flag."""
        kind, _, rest = message.partition("unrecognized arguments: ")
        raise UserError(self._unknown(rest.split()) if not kind and rest else message.replace("argument ", "", 1))

    def _unknown(self, words: list[str]) -> str:
        """What is wrong with words that belong to no flag."""
        word = next((word for word in words if word.startswith("-")), None)
        if word is None:
            return f"'{words[0]}' belongs to no flag; each value stands behind its flag, such as --seed 1"
        flag = word.partition("=")[0]
        for other in (make() for make in self._siblings):
            if flag in other._option_string_actions:
                return f"{flag}: is a flag of {other.prog}, not of {self.prog}"
        hint = did_you_mean(flag, [known for known in self._option_string_actions if known.startswith("--")])
        return f"{flag}: there is no such flag{hint or '; --help lists them'}"

    def given(self, arguments: Sequence[str]) -> list[str]:
        """Names of the options that `arguments` set, whatever their value."""
        absent = object()
        names = [action.dest for action in self._actions if action.dest != "help"]
        found = vars(self.parse_args(arguments, argparse.Namespace(**dict.fromkeys(names, absent))))
        return [name for name in names if found[name] is not absent]


def did_you_mean(text: str, names: Sequence[str]) -> str:
    """`; did you mean '…'?` with the one of `names` that is most like `text`, or nothing if none is."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""


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


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags, value by name, as the words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A type for argparse: one of `names`; the message for another word suggests the nearest."""

    def parse(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(names)}{did_you_mean(text, names)}")

    return parse


def network(text: str) -> str:
    """A network we know, in any case, a .keras file, or file.py:function; the file must be there."""
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        if not function.isidentifier():
            raise argparse.ArgumentTypeError(f"'{text}': '{function}' is no name of a function; give file.py:function")
    elif text.endswith(".keras"):
        file = text
    elif text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"'{text}': name the function that makes the model, as {text}:function")
    else:
        known = dict.fromkeys((*MODEL_NAMES, *(name.lower() for name in KERAS_NETWORKS)))
        if text.lower() in known:
            return text.lower()
        raise argparse.ArgumentTypeError(
            f"'{text}' is not one of {', '.join(MODEL_NAMES)}, FILE.keras, FILE.py:FUNCTION, or a network of "
            f"keras.applications{did_you_mean(text, [*known])}"
        )
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{file}'")
    return os.path.normpath(text)


def weights(text: str) -> str:
    """imagenet, none, or the path of a file or of a run's folder, which must be there."""
    if text in ("imagenet", "none") or (text and Path(text).exists()):
        return text
    hint = did_you_mean(text, ("imagenet", "none"))
    raise argparse.ArgumentTypeError(
        f"'{text}' is neither imagenet nor none, and there is no such file or folder of a run{hint}"
    )


def truth(text: str) -> bool:
    """The paper's scripts pass True and False as words."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def add_switch(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    """A flag that is off, and that is turned on with or without the word True behind it."""
    group.add_argument(flag, type=truth, nargs="?", const=True, default=False, metavar="True|False", help=text)


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
