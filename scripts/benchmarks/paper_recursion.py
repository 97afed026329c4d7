"""The solver as the paper describes it (section 5.2), without any of our short cuts, to hold ours against.

P[k][t] is the largest importance of a selection whose deepest tensor is k and that takes at most t. Below k the next
selected tensor is some j < k, whose own selection is a smaller problem of the same kind; stretching the error chain
from j to k costs every t_dy in between. Plain loops on purpose: what is compared is the method, and nothing is hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Recursion(NamedTuple):
    """Largest importance within the budget, and how many subproblems (deepest k, time t, next j) were looked at."""

    importance: float
    subproblems: int


def paper_recursion(t_dy: Sequence[int], t_dw: Sequence[int], importance: Sequence[float], budget: int) -> Recursion:
    """Solve in O(N²·budget); times are whole numbers in backward order, selecting k costs every t_dy down to and of k.

    Two things are read into the paper, as elsewhere in this project: the deepest tensor's own t_dy is paid, as f(M)
    has it, and the deepest tensor of the network can be selected.
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
