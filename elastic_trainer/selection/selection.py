"""The tensors to train from now on, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Choice:
    """The tensors to train from now on, and why.

    Attributes:
        mask: bool [N] over `model.trainable_variables`.
        importance: [N], normalised, or None for a scheme that does not measure it.
        predicted_step_ms, budget_step_ms: by the time budget, or None.
        epoch: when it was made, in epochs since the begin.
        rho, slowdown, correction: as in `time_budget.Allowance`, or None.
    """

    mask: np.ndarray
    importance: np.ndarray | None = None
    predicted_step_ms: float | None = None
    budget_step_ms: float | None = None
    epoch: float = 0
    rho: float | None = None
    slowdown: float | None = None
    correction: float | None = None

    @property
    def full_step_ms(self) -> float | None:
        """Full training's step as it would have run when this was chosen, or None without a budget."""
        return self.budget_step_ms / self.rho if self.budget_step_ms and self.rho else None
