"""Training and test examples as arrays in memory, of any structure: for `Trainer` in your program."""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData, Structure, Structures, mapped, specs_of

Examples = tuple[Any, ...]  # (inputs, targets) or (inputs, targets, weights)


class ArrayData(ShuffledData):
    """Examples as arrays [examples, …].

    Args:
        train, test: each (inputs, targets) or (inputs, targets, weights of the examples in the loss). Inputs, targets
            and weights are arrays, or lists, tuples or dicts of arrays.
        batch_size: examples a step.
        seed: of the training order.
        memory_mb: MB that features may take in memory; by default a quarter of what is available.

    Raises:
        ValueError: a split is no such tuple, is empty, has arrays of different lengths, or alone has weights.
        UserError: there are fewer training examples than a batch needs.
    """

    def __init__(
        self, train: Examples, test: Examples, batch_size: int, seed: int = 0, memory_mb: float | None = None
    ) -> None:
        own, others = _checked(train), _checked(test)
        if (own[2] is None) != (others[2] is None):
            raise ValueError("train and test: give weights of the examples for both, or for none")
        super().__init__("the data", own, others, batch_size, seed)
        self.memory_mb = memory_mb

    @property
    def specs(self) -> tuple[Structure, Structure, Structure]:
        """Specs of inputs, targets and weights, as a `Task` takes them; the first axis is the batch."""
        return specs_of(self._train)


def _checked(examples: Examples) -> Structures:
    """Inputs, targets and weights (or None) as arrays."""
    import tensorflow as tf

    if not isinstance(examples, tuple | list) or len(examples) not in (2, 3):
        raise ValueError("train and test: each is a tuple (inputs, targets) or (inputs, targets, weights)")
    parts = mapped(np.asarray, (*examples, None)[:3])
    lengths = {len(array) for array in tf.nest.flatten(parts) if array is not None}
    if lengths == {0}:
        raise ValueError("there are no examples")
    if len(lengths) != 1:
        raise ValueError(f"inputs, targets and weights have different numbers of examples: {sorted(lengths)}")
    return parts
