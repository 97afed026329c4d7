"""The average of a fleet: what the server makes of the boards' changes. NumPy only, so that any server can use it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from elastic_trainer.extensions.fleet.messages import Result, Update

MAX_FACTOR = 2.0  # by which normalising may multiply a change: that of few steps is mostly noise (docs/log/fleet.md)


class OwnAverage:
    """How a `FleetServer` averages by itself: all boards train, and their changes are added up by `aggregate`."""

    def __init__(self, normalised: bool = True) -> None:
        self._normalised = normalised

    def choose(self, number: int, weights: Mapping[str, np.ndarray], nodes: Collection[int]) -> set[int]:
        """The nodes that train in this round."""
        return {*nodes}

    def average(
        self, number: int, weights: Mapping[str, np.ndarray], updates: Mapping[int, Update]
    ) -> dict[str, np.ndarray] | None:
        """The weights after a round, in which the nodes made these `updates`; None: there are none."""
        return aggregate(weights, [*updates.values()], self._normalised)


def aggregate(
    weights: Mapping[str, np.ndarray], updates: Sequence[Update], normalised: bool = False
) -> dict[str, np.ndarray]:
    """The weights after a round: each tensor moves by the mean change of the boards that trained it, by images.

    A tensor that nobody trained stays. Where all boards train everything alike this is FedAvg.

    Args:
        weights: at the start of the round, by name, any shapes.
        updates: of the boards, checked by `messages.update_of`.
        normalised: as in FedNova (Wang et al., NeurIPS 2020): changes per local step are averaged, times the mean
            number of steps. So a board counts by its images and not by its steps. No change grows by more than
            `MAX_FACTOR`.
    """
    after = {}
    for name, weight in weights.items():
        here = [update for update in updates if name in update.changes]
        images = sum(update.images for update in here)
        steps = sum(update.images * update.steps for update in here) / max(images, 1)
        change = np.zeros(weight.shape, np.float64)
        for update in here:
            factor = min(steps / update.steps, MAX_FACTOR) if normalised else 1.0
            change += update.images / images * factor * update.changes[name]
        after[name] = (weight + change).astype(weight.dtype)
    return after


def mean_result(tests: Sequence[Result]) -> dict[str, float] | None:
    """Loss and accuracy over the test photos of all boards; None if there are none."""
    counts = [test.images for test in tests]
    if not any(counts):
        return None
    return {
        name: float(np.average([getattr(one, name) for one in tests], weights=counts)) for name in Result._fields[:2]
    }
