"""How the images of a run differ from those that it was started with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.runs.reader import read_config
from elastic_trainer.system.errors import UserError


def check_classes(folder: Path, names: Sequence[str]) -> None:
    """Raise `UserError` if the run to resume in `folder` was started with other classes than these."""
    _refuse(folder, changed_class(names, read_config(folder)["images"]["class_names"]))


def check_images(folder: Path, now: dict[str, Any]) -> None:
    """Raise `UserError` if the run to resume in `folder` was started with other images; `now`: `ImageData.record`."""
    _refuse(folder, changed_images(now, read_config(folder)["images"]))


def _refuse(folder: Path, change: str | None) -> None:
    if change is not None:
        raise UserError(
            f"--resume: the run in {folder} was started with {change}; use the same, or give another --run_name"
        )


def changed_images(now: dict[str, Any], before: dict[str, Any]) -> str | None:
    """How the images of a run differ from those that it was started with, by `ImageData.record`; None: they do not."""
    change = changed_class(now["class_names"], before["class_names"])
    for kind in ("training", "test"):
        is_, was = now.get(f"{kind}_images"), before.get(f"{kind}_images")
        if change is None and is_ != was:
            change = f"other {kind} images ({was}; now {is_})"
    return change


def changed_class(now: Sequence[str], before: Sequence[str]) -> str | None:
    """How two lists of class names differ, as "class 3 'was', not 'is'"; None if they are equal."""
    if len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True), 1)
        return next((f"class {number} '{was}', not '{is_}'" for number, (is_, was) in pairs if is_ != was), None)
    sides = (("missing", before, now), ("new", now, before))
    found = [f"'{name}' is {what}" for what, some, others in sides for name in some if name not in others]
    return f"{len(before)} classes, not {len(now)} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"
