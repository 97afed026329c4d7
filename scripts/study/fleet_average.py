"""The average of a fleet: what the server makes of the boards' changes. NumPy only, so that any server can use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic_trainer.errors import UserError


class Reply(NamedTuple):
    """What a board sends after its round: changes of the tensors it trained, by name; images and steps of its round."""

    changes: dict[str, np.ndarray]
    images: int
    steps: int


def aggregate(
    weights: dict[str, np.ndarray], replies: Sequence[Reply], normalised: bool = False
) -> dict[str, np.ndarray]:
    """The weights after a round: each tensor moves by the mean change of the boards that trained it, by images.

    A tensor that nobody trained stays. Where all boards train everything alike this is FedAvg.

    Args:
        weights: at the start of the round, by name, any shapes.
        replies: of the boards; changes have the shapes of `weights`.
        normalised: as in FedNova (Wang et al., NeurIPS 2020): changes per local step are averaged, times the mean
            number of steps. So a board counts by its images and not by its steps.

    Raises:
        UserError: a reply has an unknown tensor, another shape, a value that is not finite, or no images or steps.
    """
    for place, reply in enumerate(replies):
        if reply.images < 1 or reply.steps < 1:
            raise UserError(f"reply {place}: is from {reply.images} images and {reply.steps} steps; drop it")
        for name, change in reply.changes.items():
            if name not in weights or change.shape != weights[name].shape or not np.isfinite(change).all():
                raise UserError(f"reply {place}: {name} is unknown, of another shape or not finite; drop it")
    after = {}
    for name, weight in weights.items():
        here = [reply for reply in replies if name in reply.changes]
        images = sum(reply.images for reply in here)
        steps = sum(reply.images * reply.steps for reply in here) / max(images, 1)
        change = np.zeros(weight.shape, np.float64)
        for reply in here:
            factor = steps / reply.steps if normalised else 1.0
            change += reply.images / images * factor * reply.changes[name]
        after[name] = (weight + change).astype(weight.dtype)
    return after
