"""From operation times to wall time: a linear model, fitted to the measured steps of a few selections.

Independent operations overlap, so their times do not add up to a step. Wall time = constant + a·(time of shared
operations) + b·(time of the selected tensors' own operations) + c·(time of the forward pass). It predicts a step within
a few per cent, and the solver can keep to it exactly. The paper (section 5) adds operation times up.

An operation takes a few microseconds more than its traced time. Where operations are short, as in small networks, that
is as long as the operations themselves. So every operation that has a time counts `untraced_ms` more. A table of a
foreign trace (`--from_trace`) has no fit, and counts nothing more.

What is recomputed behind the prefix grows with depth as the error chain does. So a second factor could not be separated
from a (docs/log/time_model.md).

The forward pass depends on depth alone, with and without cached features:

    depth      tensors of the backward order from the output down to the deepest selected one; 0 trains nothing
    R(depth)   forward operations that depend on one of these tensors: every step recomputes them
    P(depth)   forward operations that depend on the images and on none of these tensors: the frozen prefix
    M(depth)   what passes from there to the rest, the features of a batch, in MB
    misses     examples whose features must be computed, over all examples that the steps train on

    computed   the prefix runs in every step:   c·(R + P)
    cached     its features are kept:           c·R + copying_factor·M + misses·(c·P + copying_factor·M)

The cheaper way is taken; at 1 miss an example, a cache is not worth it. Without M, going deeper never costs less, since
it moves time from P to R, and misses <= 1. So the solver stays exact; where fewer MB pass at a deeper cut, it is given
the largest time so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """Wall time in ms = constant_ms + t_dy_factor · (sum of t_dy down to the deepest) + t_dw_factor · (sum of t_dw)
    + t_fw_factor · (R + P, or R from cached features). copying_factor is what reading or keeping a MB of features
    takes, in ms; it is measured, not fitted. untraced_ms is part of a table's operation times.

    `constant_ms` holds what every step does; the factors are below 1 by as much as operations overlap. The names are
    keys of profile.json. Errors are relative, in per cent, each of a selection that was left out of the fit that
    predicts it, with and without cached features; None if fewer than two selections were measured.
    """

    constant_ms: float
    t_dy_factor: float
    t_dw_factor: float
    t_fw_factor: float
    median_error_percent: float | None
    p95_error_percent: float | None
    selections: int
    rounds: int
    copying_factor: float = 0.0
    untraced_ms: float = 0.0


def forward_sums(t_fw_ms: np.ndarray, preprocessing_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """R and P, float [N+1] by depth, from `Attribution.t_fw_ms` [N] and its `preprocessing_ms`."""
    recomputed_ms = np.concatenate([[0.0], np.cumsum(t_fw_ms)])
    return recomputed_ms, preprocessing_ms + recomputed_ms[-1] - recomputed_ms


def with_kernels(selected: np.ndarray, kernels: np.ndarray) -> np.ndarray:
    """Bool [N] `selected` in backward order, without gammas whose kernel (`Attribution.kernels`) is not in it."""
    return selected & ((kernels < 0) | selected[kernels])


def depth_of(selected: np.ndarray) -> int:
    """How many tensors there are from the output down to the deepest of `selected`, bool [N] in backward order."""
    return int(np.flatnonzero(selected)[-1]) + 1 if selected.any() else 0


def selection_sums(selected: np.ndarray, t_dy: np.ndarray, t_dw: np.ndarray) -> tuple[float, float]:
    """Sum of t_dy down to the deepest of `selected` (bool [N], backward order), and of t_dw over the selected."""
    return float(t_dy[: depth_of(selected)].sum()), float(t_dw[selected].sum())


def fit_wall_time(
    sums: np.ndarray,
    operations: np.ndarray,
    measured_ms: np.ndarray,
    selections: np.ndarray,
    rounds: int,
    max_untraced_ms: float = 0.0,
    other_ms: float = 0.0,
) -> Fit:
    """Non-negative least squares of relative errors, with the best `untraced_ms` up to `max_untraced_ms`.

    What few steps leave open, the trace decides: by it, all parts of the longest step shrink alike when they overlap.
    The more selections there are, the less does a part's distance from that count.

    Args:
        sums: [steps, 3], operation times of each in ms: t_dy down to the deepest tensor, t_dw of the selected, and
            R + P, or R from cached features.
        operations: [steps, 3], how many operations each sum is of.
        measured_ms: [steps] wall times, each of `rounds`.
        selections: int [steps], which selection each step trains; its steps are left out of the fit together.
        other_ms: operation times in every step that are in none of the sums.
    """
    from scipy.optimize import minimize_scalar, nnls

    def features(untraced_ms: float) -> np.ndarray:
        return np.column_stack([np.ones(len(sums)), sums + untraced_ms * operations])

    def solve(rows: np.ndarray) -> tuple[float, np.ndarray]:
        """The best `untraced_ms`, and the factors with it."""

        longest = np.flatnonzero(rows)[sums[rows].sum(axis=1).argmax()]
        weight = 1 / len(np.unique(selections[rows]))  # of the trace

        def solution(untraced_ms: float) -> tuple[np.ndarray, float]:
            parts = features(untraced_ms) / measured_ms[:, None]
            expected = np.array([other_ms, 1.0, 1.0, 1.0])
            expected /= parts[longest] @ expected
            prior = weight * parts[longest]
            return nnls(
                np.vstack([parts[rows], np.diag(prior)]), np.concatenate([np.ones(rows.sum()), prior * expected])
            )

        best = minimize_scalar(lambda ms: solution(ms)[1], bounds=(0.0, max_untraced_ms), method="bounded")
        untraced_ms = float(best.x) if best.fun < solution(0.0)[1] else 0.0
        return untraced_ms, solution(untraced_ms)[0]

    predicted, different = np.full_like(measured_ms, np.nan), np.unique(selections)
    for selection in different if len(different) > 1 else ():
        left_out = selections == selection
        untraced_ms, factors = solve(~left_out)
        predicted[left_out] = features(untraced_ms)[left_out] @ factors
    errors = 100 * np.abs(predicted / measured_ms - 1)
    median, largest = (None if np.isnan(errors[0]) else float(np.percentile(errors, q)) for q in (50, 95))
    untraced_ms, factors = solve(np.ones(len(measured_ms), bool))
    constant, chain, own, forward = map(float, factors)
    return Fit(constant, chain, own, forward, median, largest, len(different), rounds, untraced_ms=untraced_ms)
