"""Round 0 of a fleet: the head of all photos, which the server computes from sums of features (Fed3R).

The boards send sums twice: of the photos that a head is fitted to first, and of all. Between them they say how well the
heads of several shrinkages do on the photos that are held back. So the head is that of all photos together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.extensions.fleet.roster import Answer
from elastic_trainer.training.closed_form_head import SHRINKAGES, chosen, held_losses
from elastic_trainer.training.feature_sums import FeatureSums, Head

if TYPE_CHECKING:
    import keras


def packed_sums(prefix: str, sums: FeatureSums) -> dict[str, np.ndarray]:
    """The sums as arrays of a parcel; the scatter is symmetric, so half of it is enough."""
    half = sums.within[np.triu_indices(len(sums.within))]
    return {f"{prefix}counts": sums.counts, f"{prefix}means": sums.means, f"{prefix}within": half}


def unpacked_sums(prefix: str, arrays: Mapping[str, np.ndarray], classes: int, features: int) -> FeatureSums:
    """What `packed_sums` packed. Raises `ValueError` if it is of other sizes, or not finite."""
    counts, means, half = (arrays.get(f"{prefix}{name}", np.zeros(0)) for name in ("counts", "means", "within"))
    if (len(counts), means.shape, len(half)) != (classes, (classes, features), features * (features + 1) // 2):
        raise ValueError("its sums are of another network or of other classes")
    if not (np.isfinite(means).all() and np.isfinite(half).all() and (counts >= 0).all()):
        raise ValueError("its sums are not finite")
    within = np.zeros((features, features), np.float32)
    within[np.triu_indices(features)] = half
    return FeatureSums(counts, means, within + np.triu(within, 1).T)


def both_sums(features: np.ndarray, labels: np.ndarray, is_held: np.ndarray, classes: int) -> dict[str, np.ndarray]:
    """A board's arrays for the server: sums without the photos of bool [n] `is_held`, and of all."""
    first = FeatureSums.of(features[~is_held], labels[~is_held], classes)
    return {**packed_sums("first_", first), **packed_sums("all_", FeatureSums.of(features, labels, classes))}


def losses_of(arrays: Mapping[str, np.ndarray], features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The losses of the server's heads, whose kernels and biases are `arrays`, on a board's photos held back."""
    heads = [Head(*pair) for pair in zip(arrays["kernels"], arrays["biases"], strict=True)]
    return held_losses(heads, features, labels) if len(labels) else np.zeros(0)


def first_head(
    ask: Callable[[str, dict[str, np.ndarray]], list[Answer]],
    weights: dict[str, np.ndarray],
    layer: keras.layers.Layer,
    say: Callable[[str], object],
) -> tuple[Head | None, list[Answer]]:
    """The head of the photos of all boards, and their answers.

    Args:
        ask: sends all boards a message of some kind, with arrays; returns the answers.
        weights: of the network.
        layer: its last one.
        say: is given a line on each board whose sums do not fit.

    Returns:
        None instead of a head where the network has none in closed form, or no board sent sums.
    """
    kernel = getattr(layer, "kernel", None)
    if kernel is None or len(kernel.shape) != 2:
        return None, []
    answers, (features, classes) = ask("sums", weights), kernel.shape
    firsts, wholes = [], []
    for one in answers:
        try:
            if "none" in one.parcel.values:
                raise ValueError(str(one.parcel.values["none"])[:200])
            parts = [unpacked_sums(prefix, one.parcel.arrays, classes, features) for prefix in ("first_", "all_")]
        except ValueError as error:
            say(f"round 0: board {one.member.name}: {error}; it is left out")
            continue
        firsts.append(parts[0])
        wholes.append(parts[1])
    if not wholes:
        return None, answers
    first, losses = FeatureSums.together(firsts), np.zeros((len(SHRINKAGES), 1))
    if first.counts.sum():
        heads = first.heads(SHRINKAGES)
        found = ask(
            "losses",
            {name: np.stack(each) for name, each in zip(("kernels", "biases"), zip(*heads, strict=True), strict=True)},
        )
        each = [one.parcel.arrays.get("losses", np.zeros(0)) for one in found]
        fitting = [one for one in each if one.ndim == 2 and len(one) == len(SHRINKAGES) and np.isfinite(one).all()]
        losses = np.sum(fitting, axis=0) if fitting else losses
        answers = [*answers, *found]
    return FeatureSums.together(wholes).head(*chosen(losses)), answers
