"""How the images of a run differ from those that it was started with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
