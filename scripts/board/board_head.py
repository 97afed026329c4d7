"""The head in closed form, from the features of the photos to train on. Part of board_train.py; NumPy alone."""

from typing import Dict, List  # Python 3.6

import numpy as np
from board_memory import free_memory_mb
from board_sums import (
    HELD_BACK,
    SCALES,
    SHRINKAGES,
    FeatureSums,
    Head,
    chosen,
    cross_entropy,
    held_back,
    held_losses,
    mean_head,
)

BLOCK = 256  # photos whose features are in memory


def blocks(network, examples, rows, has_time):
    """What the head reads, logits and labels of each block of photos; None instead once there is no time."""
    for start in range(0, len(rows), BLOCK):
        some, found = rows[start : start + BLOCK], []
        for first in range(0, len(some), network.part):
            if not has_time():
                yield None
                return
            part = some[first : first + network.part]
            result = network.infer(examples.read(part, 0))
            found.append([result[name][: len(part)] for name in ("head_inputs", "logits")])
        yield [np.concatenate(each) for each in zip(*found)] + [examples.labels[some]]


def fit(network, examples, places, has_time):
    """The linear discriminant of what the head reads, as main.py fits it; `places` are those of the head's kernel and
    bias among the variables that train. Two passes over the photos, in blocks.

    Returns the head, whether it does better on photos that it was not fitted to than the one that the network has, bool
    [classes], the outputs whose scale is known, and its mean loss on those photos. None if the network has no such
    head, or memory or time is short.
    """
    state = network.call("state")
    kernel, bias = (state[f"weights_{place}"] for place in places)
    free_mb = free_memory_mb(counts_swap=False)
    if free_mb is not None and 36 * len(kernel) ** 2 / 1e6 > free_mb:  # copies of the covariance
        return None
    is_held = held_back(examples.labels[examples.train])
    sums: Dict[int, FeatureSums] = {}
    heads: List[Head] = []
    losses, loss_before = np.zeros((len(SHRINKAGES), len(SCALES))), 0.0
    for held in (0, 1):
        for found in blocks(network, examples, examples.train[is_held == held], has_time):
            if found is None:
                return None
            features, logits, labels = found
            if not np.allclose(features @ kernel + bias, logits, rtol=1e-3, atol=1e-3):
                return None  # something follows the layer
            block = FeatureSums.of(features, labels, len(bias))
            sums[held] = FeatureSums.together([sums[held], block]) if held in sums else block
            if held:
                heads = heads or sums[0].heads(SHRINKAGES)
                losses += held_losses(heads, features, labels)
                loss_before += len(labels) * cross_entropy(logits, labels)
    total = FeatureSums.together([*sums.values()])
    is_scaled = (total.counts > 0) & (total.counts.max() >= HELD_BACK)
    is_better, loss = not heads or np.min(losses) < loss_before, np.min(losses) / max(is_held.sum(), 1)
    return total.head(*chosen(losses)), is_better, is_scaled, loss


def set_head(network, places, state, head):
    """Give the network `state` with this head."""
    network.call("load", **{**state, **dict(zip((f"weights_{place}" for place in places), head))})


def average_head(network, places, found):
    """Replace the head by the mean of itself and what `fit` found, if anything, as main.py does it."""
    if found and found[2].any():
        head, _, is_scaled, loss = found
        state = network.call("state")
        trained = Head(*(state[f"weights_{place}"] for place in places))
        set_head(network, places, state, mean_head(trained, head, is_scaled, loss))
