"""What the forward pass costs a step, by the depth of its selection, with and without cached features.

    depth      tensors of the backward order from the output down to the deepest selected one; 0 trains nothing
    R(depth)   forward operations that depend on one of these tensors: every step recomputes them
    P(depth)   forward operations that depend on the images and on none of these tensors: the frozen prefix

    M(depth)   what passes from there to the rest, the features of a batch, in MB

    computed   the prefix runs in every step:   forward_factor * (R(depth) + P(depth))
    new        its features are cached:         forward_factor * R(depth) + reading_factor * M(depth)
                                                + share * (forward_factor * P(depth) + writing_factor * M(depth))
    kept       features that were cached for `cached_depth` serve all selections that are not deeper: the same with
               R, P and M of cached_depth, and cached_share

The shares are the prefixes that must still be computed, over the steps that use them; from 1 on, a cache is not worth
it. The cheapest way is taken. What it takes depends on depth alone, so the solver stays exact where it does not
decrease with depth. Without M it never does: one tensor deeper moves time from P to R, and share <= 1; kept features
cost the same at every depth that they serve, and at cached_depth they cost no more than new ones, as cached_share <=
share. Where fewer MB pass at a deeper cut, the solver is given the largest time so far.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class FeatureUse(NamedTuple):
    """Whether a selection may run on cached features.

    Attributes:
        share: images whose features a new cache must compute, over those of the steps that use it; 1 if no cache is
            possible. 0 leaves out what making it costs.
        cached_depth: of the selection that the present cache was made for, or None if there is no cache.
        cached_share: as `share`, of what is missing in the present cache; at most `share`.
    """

    share: float = 1.0
    cached_depth: int | None = None
    cached_share: float = 0.0


COMPUTED = FeatureUse()  # the prefix is computed in every step
CACHED = FeatureUse(share=0.0)  # its features exist already


class ForwardCosts(NamedTuple):
    """Wall times in ms a step, float [N+1] by depth.

    Attributes:
        step_ms: of the forward pass within the step itself.
        making_ms: of computing features for the cache; 0 without one.
        cached_depth: int [N+1], the depth that the features in use are of; -1 where the prefix is computed.
    """

    step_ms: np.ndarray
    making_ms: np.ndarray
    cached_depth: np.ndarray


def forward_sums(t_fw_ms: np.ndarray, preprocessing_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """R and P, float [N+1] by depth, from `Attribution.t_fw_ms` [N] and its `preprocessing_ms`."""
    recomputed = np.concatenate([[0.0], np.cumsum(t_fw_ms)])
    return recomputed, preprocessing_ms + recomputed[-1] - recomputed


def forward_costs(
    recomputed_ms: np.ndarray,
    prefix_ms: np.ndarray,
    features: FeatureUse,
    reading_ms: np.ndarray | None = None,
    writing_ms: np.ndarray | None = None,
) -> ForwardCosts:
    """The cheapest way to each depth.

    Args:
        recomputed_ms, prefix_ms: float [N+1], forward_factor * R and forward_factor * P. The last of P is preprocessing
            alone.
        features: what may be used.
        reading_ms, writing_ms: float [N+1], reading_factor * M and writing_factor * M; by default 0.
    """
    depths = np.arange(len(recomputed_ms))
    on_features_ms = recomputed_ms if reading_ms is None else recomputed_ms + reading_ms
    computing_ms = prefix_ms if writing_ms is None else prefix_ms + writing_ms
    # A prefix of nothing but preprocessing is not cached.
    is_new = (features.share < 1) & (prefix_ms > prefix_ms[-1])
    is_new &= on_features_ms + features.share * computing_ms <= recomputed_ms + prefix_ms
    step_ms = np.where(is_new, on_features_ms, recomputed_ms + prefix_ms)
    making_ms = np.where(is_new, features.share * computing_ms, 0.0)
    cached_depth = np.where(is_new, depths, -1)
    if features.cached_depth is not None:
        kept_ms = on_features_ms[features.cached_depth]
        missing_ms = features.cached_share * computing_ms[features.cached_depth]
        is_kept = (depths <= features.cached_depth) & (kept_ms + missing_ms <= step_ms + making_ms)
        step_ms = np.where(is_kept, kept_ms, step_ms)
        making_ms = np.where(is_kept, missing_ms, making_ms)
        cached_depth = np.where(is_kept, features.cached_depth, cached_depth)
    return ForwardCosts(step_ms, making_ms, cached_depth)
