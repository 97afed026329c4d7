"""From operation times to wall time: a linear model, fitted to the measured steps of a few selections.

Independent operations overlap, so their times do not add up to a step. Wall time = constant + a·(time of shared
operations) + b·(time of the selected tensors' own operations) predicts a step within a few per cent, and being linear,
it keeps the solver exact. The paper (section 4) adds operation times up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """Wall time in ms = constant_ms + chain_factor · (sum of t_dy down to the deepest) + own_factor · (sum of t_dw).

    `constant_ms` holds the forward pass and what every step does; the factors are below 1 by as much as operations
    overlap. The names are keys of profile.json. Errors are relative, in per cent, each of a selection that was left out
    of the fit that predicts it; None if no selection was measured.
    """

    constant_ms: float
    chain_factor: float
    own_factor: float
    median_error_percent: float | None
    p95_error_percent: float | None
    selections: int
    rounds: int


def selection_sums(selected: np.ndarray, t_dy: np.ndarray, t_dw: np.ndarray) -> tuple[float, float]:
    """Sum of t_dy down to the deepest of `selected` (bool [N], backward order), and of t_dw over the selected."""
    if not selected.any():
        return 0.0, 0.0
    return float(t_dy[: np.flatnonzero(selected)[-1] + 1].sum()), float(t_dw[selected].sum())


def fit_wall_time(t_dy_ms: np.ndarray, t_dw_ms: np.ndarray, measured_ms: np.ndarray, rounds: int) -> Fit:
    """Non-negative least squares of relative errors.

    Args:
        t_dy_ms, t_dw_ms: [selections] sums of operation times, see `selection_sums`.
        measured_ms: [selections] wall times of steps.
        rounds: how often each step was measured.
    """
    from scipy.optimize import nnls

    features = np.stack([np.ones_like(t_dy_ms), t_dy_ms, t_dw_ms], axis=1)

    def solve(rows: np.ndarray) -> np.ndarray:
        return nnls(features[rows] / measured_ms[rows, None], np.ones(len(rows)))[0]

    everything = np.arange(len(measured_ms))
    factors = solve(everything)
    predicted = np.array([features[i] @ solve(np.delete(everything, i)) for i in everything])
    errors = 100 * np.abs(predicted / measured_ms - 1)
    constant, chain, own = (float(factor) for factor in factors)
    return Fit(
        constant_ms=constant,
        chain_factor=chain,
        own_factor=own,
        median_error_percent=float(np.median(errors)),
        p95_error_percent=float(np.percentile(errors, 95)),
        selections=len(measured_ms),
        rounds=rounds,
    )
