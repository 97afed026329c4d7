"""The average of a fleet: what the server makes of the boards' changes. NumPy only, so that any server can use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic_trainer.errors import UserError

# A change is too large if its norm is above LARGEST times that of its weights, or times that of so many values of
# SMALL_WEIGHT, where that is more: biases start at 0. A round of normal training changes weights by a few per cent.
LARGEST, SMALL_WEIGHT = 10.0, 0.1
MOST = 10_000_000  # images and steps of a round; more are a mistake
MOST_FACTOR = 4.0  # by which normalising may multiply a change: the change of a single step is mostly noise


class Reply(NamedTuple):
    """What a board sends after its round: changes of the tensors it trained, by name; images and steps of its round."""

    changes: dict[str, np.ndarray]
    images: int
    steps: int


def why_unfit(weights: dict[str, np.ndarray], reply: Reply) -> str | None:
    """Why `reply` must not be averaged into `weights`; None if nothing is wrong with it.

    A tensor is unknown or of another shape, a value is not finite, a change is too large (see `LARGEST`), or there are
    no images or steps.
    """
    if not (0 < reply.images <= MOST and 0 < reply.steps <= MOST):
        return f"it is from {reply.images} images and {reply.steps} steps"
    for name, change in reply.changes.items():
        if name not in weights:
            return f"the network has no tensor {name}"
        weight = weights[name]
        if change.shape != weight.shape:
            return f"{name} has the shape {change.shape}, not {weight.shape}"
        if not np.isfinite(change).all():
            return f"{name} has a value that is not finite"
        norm, least = (float(np.linalg.norm(each.astype(np.float64))) for each in (change, weight))
        most = LARGEST * max(least, SMALL_WEIGHT * weight.size**0.5)
        if norm > most:
            return f"{name} changes by {norm:.2g}, more than {LARGEST:g} times its weights"
    return None


def aggregate(
    weights: dict[str, np.ndarray], replies: Sequence[Reply], normalised: bool = False
) -> dict[str, np.ndarray]:
    """The weights after a round: each tensor moves by the mean change of the boards that trained it, by images.

    A tensor that nobody trained stays. Where all boards train everything alike this is FedAvg.

    Args:
        weights: at the start of the round, by name, any shapes.
        replies: of the boards; changes have the shapes of `weights`.
        normalised: as in FedNova (Wang et al., NeurIPS 2020): changes per local step are averaged, times the mean
            number of steps. So a board counts by its images and not by its steps. No change grows by more than
            `MOST_FACTOR`.

    Raises:
        UserError: a reply does not fit, see `why_unfit`.
    """
    for place, reply in enumerate(replies):
        if (why := why_unfit(weights, reply)) is not None:
            raise UserError(f"reply {place}: {why}; drop it")
    after = {}
    for name, weight in weights.items():
        here = [reply for reply in replies if name in reply.changes]
        images = sum(reply.images for reply in here)
        steps = sum(reply.images * reply.steps for reply in here) / max(images, 1)
        change = np.zeros(weight.shape, np.float64)
        for reply in here:
            factor = min(steps / reply.steps, MOST_FACTOR) if normalised else 1.0
            change += reply.images / images * factor * reply.changes[name]
        after[name] = (weight + change).astype(weight.dtype)
    return after
