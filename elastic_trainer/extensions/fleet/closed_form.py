"""The head in closed form of all boards' photos, from sums of features that they send (Fed3R, arXiv 2406.01116)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.extensions.fleet.messages import Parcel, losses_of, sums_of
from elastic_trainer.extensions.fleet.pace import Pace
from elastic_trainer.extensions.fleet.roster import Answer, Roster
from elastic_trainer.networks.tensors import last_layers
from elastic_trainer.training.feature_sums import NO_IMAGES, SCALES, SHRINKAGES, FeatureSums, Head, chosen

if TYPE_CHECKING:
    import keras


class ClosedForm:
    """Fits the head of a network.

    Args:
        model: whose last layer it is.
        roster: of the boards.
        pace: how long they have.
    """

    def __init__(self, model: keras.Model, roster: Roster, pace: Pace) -> None:
        [self._layer, *_] = last_layers(model)
        self._roster, self._pace = roster, pace

    def assign(self, head: Head, keeps: bool = False) -> None:
        """Give the network this head. With `keeps`, classes of which no board has photos keep their outputs."""
        for variable, new in zip((self._layer.kernel, self._layer.bias), head, strict=True):
            variable.assign(np.where(head.bias > NO_IMAGES, new, variable.numpy()) if keeps else new)

    def fit(self, weights: dict[str, np.ndarray], what: str) -> tuple[Head | None, list[Answer]] | None:
        """The head of the photos of all boards, None if there are no sums of features; and the boards' answers.

        None if no board has answered. Lines name what they are asked for: `what`.

        The boards send sums twice: of the photos that a head is fitted to first, and of all. Between them they say how
        well the heads of several shrinkages do on the photos that are held back.
        """
        kernel = getattr(self._layer, "kernel", None)
        if kernel is None or len(kernel.shape) != 2:
            return None, []
        features, classes = kernel.shape

        def sums(answer: Answer) -> list[FeatureSums]:
            images = answer.about.images
            return [sums_of(answer.parcel, prefix, classes, features, images) for prefix in ("first_", "all_")]

        answers = self._roster.ask(Parcel("sums", {}, weights), self._pace.pass_seconds(), what)
        if not answers:
            return None
        found = [sums for _, sums in self._roster.parsed(answers, sums, f"{what}: board {{}}: {{}}; it is left out")]
        if not found:
            return None, answers
        firsts, wholes = zip(*found, strict=True)
        first, shape = FeatureSums.together(firsts), (len(SHRINKAGES), len(SCALES))
        losses = [np.zeros(shape)]
        if first.counts.sum():
            heads = first.heads(SHRINKAGES)
            arrays = {
                "kernels": np.stack([one.kernel for one in heads]),
                "biases": np.stack([one.bias for one in heads]),
            }
            parcel = Parcel("losses", {"seconds": self._pace.round_seconds()}, arrays)
            replies = self._roster.ask(parcel, self._pace.pass_seconds(), what)
            losses += [one for one in (losses_of(reply.parcel, shape) for reply in replies) if one is not None]
            answers += replies
        head = FeatureSums.together(wholes).head(*chosen(np.sum(losses, axis=0)))
        return head if all(np.isfinite(part).all() for part in head) else None, answers
