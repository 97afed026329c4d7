"""What the forward pass costs a step, by the depth of its selection, with and without cached features.

    depth      tensors of the backward order from the output down to the deepest selected one; 0 trains nothing
    R(depth)   forward operations that depend on one of these tensors: every step recomputes them
    P(depth)   forward operations that depend on the images and on none of these tensors: the frozen prefix
    M(depth)   what passes from there to the rest, the features of a batch, in MB
    misses     examples whose features must be computed, over all examples that the steps train on

    computed   the prefix runs in every step:   t_fw_factor * (R + P)
    cached     its features are kept:           t_fw_factor * R + reading_factor * M
                                                + misses * (t_fw_factor * P + writing_factor * M)

The cheaper way is taken. At 1 miss an example, a cache is not worth it. What it takes depends on depth alone, so the
solver stays exact where it does not decrease with depth. Without M it never does: one tensor deeper moves time from P
to R, and misses <= 1. Where fewer MB pass at a deeper cut, the solver is given the largest time so far.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ForwardCosts(NamedTuple):
    """Wall times in ms a step, float [N+1] by depth.

    Attributes:
        step_ms: of the forward pass within the step itself.
        making_ms: of computing features for the cache; 0 without one.
        is_cached: bool [N+1], whether features are used.
    """

    step_ms: np.ndarray
    making_ms: np.ndarray
    is_cached: np.ndarray


def forward_sums(t_fw_ms: np.ndarray, preprocessing_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """R and P, float [N+1] by depth, from `Attribution.t_fw_ms` [N] and its `preprocessing_ms`."""
    recomputed = np.concatenate([[0.0], np.cumsum(t_fw_ms)])
    return recomputed, preprocessing_ms + recomputed[-1] - recomputed


def forward_costs(
    recomputed_ms: np.ndarray, prefix_ms: np.ndarray, reading_ms: np.ndarray, writing_ms: np.ndarray, misses: float
) -> ForwardCosts:
    """The cheaper way to each depth.

    Args:
        recomputed_ms, prefix_ms: float [N+1], t_fw_factor * R and t_fw_factor * P. The last of P is preprocessing
            alone, which is not cached by itself.
        reading_ms, writing_ms: float [N+1], reading_factor * M and writing_factor * M.
        misses: see the module's header.
    """
    cached_ms, making_ms = recomputed_ms + reading_ms, misses * (prefix_ms + writing_ms)
    is_cached = (prefix_ms > prefix_ms[-1]) & (cached_ms + making_ms <= recomputed_ms + prefix_ms)
    is_cached &= misses < 1
    step_ms = np.where(is_cached, cached_ms, recomputed_ms + prefix_ms)
    return ForwardCosts(step_ms, np.where(is_cached, making_ms, 0.0), is_cached)
