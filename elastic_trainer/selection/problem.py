"""The Tensor Selector's problem (paper sections 3.3 and 6), made from the timing table, in backward order.

Here and in the table alone do tensors change their order: whatever asks for a selection, and the selection that it
gets, has them in the order of `model.trainable_variables`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elastic_trainer.timing.table import TimingTable

# Importance (1 is the largest) of a filler: a tensor whose update would raise the loss now. It trains where the budget
# has room, as in full training, and before no other. Not in the paper, which never selects such tensors.
# Without a gradient, importance is 0: training it would change nothing.
FILLER = 1e-6


class Problem(NamedTuple):
    """Which tensors to train; arrays [N] in backward order, times in ms of a step.

    Always-trained tensors have zero value; they and the chain to them are already paid for. A gamma and its kernel are
    one tensor, at the place of the deeper one; the other gains and costs nothing.
    """

    t_dy_ms: np.ndarray  # what going one tensor deeper adds to a step
    t_dw_ms: np.ndarray  # what training each tensor adds
    importance: np.ndarray
    left_ms: float  # what both may add
    always: np.ndarray  # bool [N], always trained
    pairs: list[tuple[int, int]]  # places of the other gammas and of their kernels, which train only together
    positions: np.ndarray  # as of `TimingTable`

    @classmethod
    def of(
        cls,
        table: TimingTable,
        head: np.ndarray,
        importance: np.ndarray,
        budget_ms: float,
        misses: float,
        has_fillers: bool = False,
    ) -> Problem:
        """The problem of a step that may take `budget_ms` and always trains `head`; `misses` as in `timing.fit`.

        With `has_fillers`, tensors of negative importance train where the budget has room.
        """
        always, kernels = head[table.positions], table.kernels
        t_dy_ms = table.wall_t_dy_ms(misses)
        t_dy_ms[: table.depth(head)] = 0.0
        t_dw_ms = np.where(always, 0.0, table.wall_t_dw_ms)
        gains = np.where(always, 0.0, importance[table.positions])
        gammas = np.flatnonzero((kernels >= 0) & ~always & ~always[kernels])
        pairs = [(int(gamma), int(kernels[gamma])) for gamma in gammas]
        for pair in pairs:
            deep, shallow = max(pair), min(pair)
            for each in (t_dw_ms, gains):
                each[deep] += each[shallow]
                each[shallow] = 0.0
        if has_fillers:
            gains[gains < 0] = FILLER
        left_ms = budget_ms - table.predict_ms(head, misses)
        return cls(t_dy_ms, t_dw_ms, gains, left_ms, always, pairs, table.positions)

    def mask(self, solution: np.ndarray) -> np.ndarray:
        """Bool [N] over `model.trainable_variables`: always-trained tensors, and those that `solution` selects.

        It is int, of at most N tensors: the first of the backward order.
        """
        selected = self.always.copy()
        selected[: len(solution)] |= solution == 1
        for pair in self.pairs:
            selected[[*pair]] = selected[max(pair)]
        mask = np.empty_like(selected)
        mask[self.positions] = selected
        return mask
