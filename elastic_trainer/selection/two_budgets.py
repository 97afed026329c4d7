"""The Tensor Selector under two budgets, time and memory: the largest importance that fits both.

Time is as in `selection_solver_DP`: an own part of each tensor, and the error chain down to the deepest. Memory
(`timing.memory_costs`) has the same parts, and what the forward pass keeps for any of several tensors. That is a mixed
integer program, which HiGHS solves to within `GAP` of the largest importance, whatever the units: x says which tensors
train, y which the error chain passes, z what is kept.

    maximise I·x   t_dw·x + t_dy·y <= time   own·x + chain·y + kept·z <= memory
    y_k >= x_k   y_k >= y_(k+1)   z >= x of its owners   z >= y of its chain
"""

from __future__ import annotations

import numpy as np

from elastic_trainer.selection.problem import Problem
from elastic_trainer.system.machine import silenced
from elastic_trainer.timing.memory_costs import NO_CHAIN, MemoryCosts

GAP = 1e-3  # of the importance
MAX_NODES = 5000  # of the search, so that it ends; what it has found by then is taken


def solve_both(problem: Problem, memory: MemoryCosts, room_mb: float) -> np.ndarray:
    """The best selection, int8 [N] in backward order, with what always trains in it; that alone if nothing more fits.

    `memory` is what a step takes, and `room_mb` what it may take.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    t_dy, t_dw, importance, time_budget, always, pairs, _ = problem
    count, kept = len(t_dy), memory.kept
    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, from, to
    x, y, z = range(count), range(count, 2 * count), range(2 * count, 2 * count + len(kept))
    rows.append(({**dict(zip(x, t_dw, strict=True)), **dict(zip(y, t_dy, strict=True))}, -np.inf, time_budget))
    megabytes = [*memory.own_mb, *memory.chain_mb, *(each.megabytes for each in kept)]
    rows.append((dict(enumerate(megabytes)), -np.inf, room_mb - memory.always_mb))
    rows += [({y[k]: 1.0, x[k]: -1.0}, 0.0, np.inf) for k in range(count)]
    rows += [({y[k]: 1.0, y[k + 1]: -1.0}, 0.0, np.inf) for k in range(count - 1)]
    for index, each in enumerate(kept):
        rows += [({z[index]: 1.0, x[owner]: -1.0}, 0.0, np.inf) for owner in each.owners]
        if each.chain > NO_CHAIN:
            rows.append(({z[index]: 1.0, y[each.chain]: -1.0}, 0.0, np.inf))
    rows += [({x[one]: 1.0, x[other]: -1.0}, 0.0, 0.0) for one, other in pairs]
    numbers = [(line, place, value) for line, (row, *_) in enumerate(rows) for place, value in row.items() if value]
    lines, places, values = (np.array(part) for part in zip(*numbers, strict=True))
    matrix = coo_matrix((values, (lines, places)), shape=(len(rows), len(megabytes))).tocsc()
    lowest, highest = np.zeros(len(megabytes)), np.ones(len(megabytes))
    lowest[:count] = always
    of_pairs = {k for pair in pairs for k in pair}
    highest[:count] = always | (importance > 0) | np.isin(np.arange(count), [*of_pairs])
    with silenced(1):  # HiGHS prints some lines whatever its options
        found = milp(
            -np.concatenate([importance, np.zeros(len(megabytes) - count)]),
            integrality=np.arange(len(megabytes)) < count,
            bounds=Bounds(lowest, highest),
            constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
            options={"mip_rel_gap": GAP, "node_limit": MAX_NODES},
        )
    selected = always if found.x is None else found.x[:count] > 0.5
    return selected.astype(np.int8)
