"""Options in config.json: which may change when a run continues, which do not affect results, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import MAIN_FLAGS

# Options that may change when a run continues.
FREE_ON_RESUME = {"command", *(name for name, flag in MAIN_FLAGS.items() if flag.is_free)}


def without_effect(config: dict[str, Any]) -> set[str]:
    """Options that do not change the result of a run. `data_dir` is one of them unless it identifies the images."""
    return FREE_ON_RESUME - ({"data_dir"} if DATASETS[config["dataset_name"]].is_folder else set())


def first_change(now: dict[str, Any], before: dict[str, Any], free: set[str]) -> str | None:
    """The first option not in `free` that differs between two configurations, as "--name was, not is"."""
    for name, value in now.items():
        unknown_yet = name == "num_classes" and value is None
        if name not in free and not unknown_yet and value != before.get(name, value):
            return f"--{name} {before[name]}, not {value}"
    return None


def changed_images(now: dict[str, Any], before: dict[str, Any] | None) -> str | None:
    """How the images of a run differ from those that it was started with; None if they are the same.

    Args:
        now, before: see `ImageData.record`; None for a run without a record, which is not compared.
    """
    if before is None:
        return None
    change = changed_class(now["class_names"], before["class_names"])
    for kind in ("training", "test"):
        is_, was = now[f"{kind}_images"], before[f"{kind}_images"]
        if change is None and is_ != was:
            change = f"other {kind} images ({was}; now {is_})"
    return change


def changed_class(now: Sequence[str], before: Sequence[str]) -> str | None:
    """The first class name that differs between two lists, as "class 3 was, not is"; None if they are equal."""
    for number, (is_, was) in enumerate(zip_longest(now, before), 1):
        if is_ != was:
            names = ("none" if name is None else f"'{name}'" for name in (was, is_))
            return f"class {number} {', not '.join(names)}"
    return None
