"""The mean of weights over the last steps of a run, which often tests better than the last weights.

Stochastic weight averaging: Izmailov et al., UAI 2018, arXiv 1803.05407. It needs no second pass for the statistics of
batch norm, which are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

LAST = 0.25  # of the schedule, whose weights are averaged (docs/log/weight_mean.md)
EVERY = 4  # steps, of which one is taken: those between them differ little
_PREFIX = "mean/"


class WeightMean:
    """The running mean of the variables that train; none before the first `add`.

    Args:
        arrays: what `to_arrays` returned, among others; it goes on from there.
    """

    def __init__(self, arrays: dict[str, np.ndarray] | None = None) -> None:
        kept = {name.removeprefix(_PREFIX): value for name, value in (arrays or {}).items() if is_mean(name)}
        self._count = int(kept.pop("count", 0))
        self._means = [kept[f"{index}"] for index in range(len(kept))]

    def add(self, variables: Sequence[keras.Variable]) -> None:
        """Take the weights as they are now."""
        values, self._count = [np.asarray(variable) for variable in variables], self._count + 1
        means = self._means or values
        self._means = [mean + (value - mean) / self._count for mean, value in zip(means, values, strict=True)]

    def assign(self, variables: Sequence[keras.Variable]) -> None:
        """Give the variables their means, if there are some."""
        for variable, mean in zip(variables, self._means, strict=False):
            variable.assign(mean)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it, by name."""
        numbered = {f"{_PREFIX}{index}": mean for index, mean in enumerate(self._means)}
        return {**numbered, f"{_PREFIX}count": np.array(self._count)} if numbered else {}


def is_mean(name: str) -> bool:
    """Whether this array in a checkpoint belongs to a mean."""
    return name.startswith(_PREFIX)
