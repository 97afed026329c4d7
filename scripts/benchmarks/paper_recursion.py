"""The solver as the paper describes it (section 5.2), without our short cuts: the reference for our solver.

P[k][t] is the largest importance of a selection whose deepest tensor is k and that takes at most t. The next selected
tensor is some j < k, whose selection is a smaller problem of the same kind. Extending the error chain from j to k costs
every t_dy between them. Plain loops on purpose, since the method is compared.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Recursion(NamedTuple):
    """Largest importance within the budget, and how many subproblems (deepest k, time t, next j) were visited."""

    importance: float
    subproblems: int


def paper_recursion(t_dy: Sequence[int], t_dw: Sequence[int], importance: Sequence[float], budget: int) -> Recursion:
    """Solve in O(N²·budget). Times are integers in backward order; selecting k costs every t_dy from the output to k.

    Two details follow this project's reading of the paper: the cost includes the deepest tensor's own t_dy, as f(M)
    says, and the deepest tensor of the network can be selected.
    """
    tensors = len(t_dy)
    chain = [sum(t_dy[: k + 1]) for k in range(tensors)]
    impossible = float("-inf")
    table = [[impossible] * (budget + 1) for _ in range(tensors)]
    subproblems = 0
    for k in range(tensors):
        for t in range(budget + 1):
            best = importance[k] if chain[k] + t_dw[k] <= t else impossible  # k alone
            for j in range(k):
                rest = t - t_dw[k] - (chain[k] - chain[j])
                if rest >= 0 and table[j][rest] + importance[k] > best:
                    best = table[j][rest] + importance[k]
            table[k][t] = best
            subproblems += k + 1
    return Recursion(max([0.0, *(row[budget] for row in table)]), subproblems)
