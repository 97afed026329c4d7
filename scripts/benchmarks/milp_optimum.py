"""The selection problem as a mixed-integer linear program, solved by HiGHS: the optimum, without rounding of times."""

from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp


class Optimum(NamedTuple):
    """The best selection that HiGHS found, an upper bound, and whether both were proven to be equal."""

    importance: float
    upper_bound: float
    proven: bool


def milp_optimum(
    t_dy: np.ndarray, t_dw: np.ndarray, importance: np.ndarray, budget: float, time_limit_seconds: float = 60
) -> Optimum:
    """Minimise -I·M so that t_dw·M + t_dy·F <= budget, M_k <= F_k and F_{k+1} <= F_k; M is binary, F is 1 if reached.

    Arrays are [N] in backward order. F need not be declared integer: the smallest F that M allows is integer.

    Raises:
        RuntimeError: HiGHS neither solved the problem nor ran out of time.
    """
    tensors = len(t_dy)
    # HiGHS' tolerances are absolute. Half a unit separates integer times. Others are scaled until the tolerance is
    # negligible relative to the budget.
    has_integer_times = bool(np.all(t_dy == np.floor(t_dy)) and np.all(t_dw == np.floor(t_dw)))
    limit, scale = (np.floor(budget) + 0.5, 1.0) if has_integer_times else (1e4, 1e4 / budget)
    gain_scale = 1e3 / max(float(np.max(np.abs(importance))), 1e-9)
    one = sparse.identity(tensors, format="csr")
    deeper = sparse.diags_array([-np.ones(tensors), np.ones(tensors - 1)], offsets=[0, 1], format="csr")[:-1]
    rows = sparse.bmat(
        [
            [sparse.csr_matrix(t_dw * scale), sparse.csr_matrix(t_dy * scale)],
            [one, -one],
            [None, deeper],
        ],
        format="csr",
    )
    upper = np.concatenate(([limit], np.zeros(2 * tensors - 1)))
    result = milp(
        np.concatenate((-importance * gain_scale, np.zeros(tensors))),
        constraints=LinearConstraint(rows, -np.inf, upper),
        integrality=np.repeat([1, 0], tensors),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": time_limit_seconds},
    )
    if result.status not in (0, 1):  # neither solved nor out of time
        raise RuntimeError(result.message)
    reached = 0.0 if result.x is None else float(importance @ np.round(result.x[:tensors]))
    bound = result.mip_dual_bound
    upper_bound = float(np.sum(np.maximum(importance, 0))) if bound is None else -float(bound) / gain_scale
    return Optimum(reached, max(upper_bound, reached), result.status == 0)
