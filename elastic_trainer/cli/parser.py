"""The parser of all command lines (no TensorFlow here, so that mistakes are reported at once)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from elastic_trainer.errors import UserError, did_you_mean


class OneLineParser(argparse.ArgumentParser):
    """Raises `UserError` for mistakes. Flags cannot be abbreviated: the meaning would change as flags are added.

    Args:
        siblings: make the parsers of the other commands, to recognise their flags.
    """

    def __init__(self, siblings: Sequence[Callable[[], argparse.ArgumentParser]] = (), **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._siblings = siblings

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse`, but no word stays unknown: the parser of a subcommand reports it, which knows its flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        raise UserError(
            message.replace("argument ", "", 1) if unknown == message else self._unknown(unknown.split() or [""])
        )

    def _unknown(self, words: list[str]) -> str:
        word = next((word for word in words if word.startswith("-")), None)
        if word is None:
            return f"'{words[0]}': unexpected argument; values follow their flag, such as --seed 1"
        flag = word.partition("=")[0]
        for other in (make() for make in self._siblings):
            if flag in other._option_string_actions:
                return f"{flag}: is a flag of {other.prog}, not of {self.prog}"
        hint = did_you_mean(flag, [known for known in self._option_string_actions if known.startswith("--")])
        return f"{flag}: there is no such flag{hint or '; --help lists them'}"

    def given(self, arguments: Sequence[str]) -> list[str]:
        """Names of the options that `arguments` contain."""
        absent = object()
        names = [action.dest for action in self._actions if action.dest != "help"]
        found = vars(self.parse_args(arguments, argparse.Namespace(**dict.fromkeys(names, absent))))
        return [name for name in names if found[name] is not absent]


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags, value by name, as the words of a command line. A value that looks like a flag is one word with its own."""
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    return [word for flag, text in pairs for word in ([f"{flag}={text}"] if text.startswith("-") else [flag, text])]
