"""Options in config.json: which may change when a run continues (--resume), and what did; `cli.commands` checks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_trainer.registry import DATASETS
from elastic_trainer.settings import MAIN_FLAGS

# Options that may change when a run continues.
FREE_ON_RESUME = {"command", *(name for name, flag in MAIN_FLAGS.items() if flag.is_free)}


def without_effect(config: dict[str, Any]) -> set[str]:
    """Options that do not change the result of a run, unless they say which images there are, or what a step takes."""
    return FREE_ON_RESUME - {"micro_batch"} - ({"data_dir"} if DATASETS[config["dataset_name"]].is_folder else set())


def first_change(now: dict[str, Any], before: dict[str, Any], free: set[str]) -> str | None:
    """The first option not in `free` that differs between two configurations, as "--name was, not is"."""
    for name, value in now.items():
        unknown_yet = name == "num_classes" and value is None
        if name not in free and not unknown_yet and value != before.get(name, value):
            return f"--{name} {before[name]}, not {value}"
    return None


def changed_images(now: dict[str, Any], before: dict[str, Any]) -> str | None:
    """How the images of a run differ from those that it was started with, by `ImageData.record`; None: they do not."""
    change = changed_class(now["class_names"], before["class_names"])
    for kind in ("training", "test", "held_out"):
        is_, was = now.get(f"{kind}_images"), before.get(f"{kind}_images")
        if change is None and is_ != was:
            change = f"other {kind.replace('_', '-')} images ({was}; now {is_})"
    return change


def changed_class(now: Sequence[str], before: Sequence[str]) -> str | None:
    """How two lists of class names differ, as "class 3 'was', not 'is'"; None if they are equal."""
    if len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True), 1)
        return next((f"class {number} '{was}', not '{is_}'" for number, (is_, was) in pairs if is_ != was), None)
    sides = (("missing", before, now), ("new", now, before))
    found = [f"'{name}' is {what}" for what, some, others in sides for name in some if name not in others]
    return f"{len(before)} classes, not {len(now)} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"
