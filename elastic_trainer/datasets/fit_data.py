"""What is known of the data of `model.fit`, which alone knows the examples."""

from __future__ import annotations

from collections import deque

from elastic_trainer.datasets.batches import Batch, ShuffledData

UNKNOWN_STEPS = 1_000_000_000  # stands for the length of an epoch until the first one has ended


class FitData(ShuffledData):
    """What a scheme asks of the data of a fit, which alone knows the examples. `recent` are the latest batches."""

    view_count = None

    def __init__(self, steps_per_epoch: int, batch_size: int, recent: deque[Batch]) -> None:
        self.name, self.train_count, self.test_count, self.steps_per_epoch = "fit", 0, 0, steps_per_epoch
        self.batch_size = None  # type: ignore[assignment]  # the last batch of an epoch may be smaller
        self._batch_size, self._recent = batch_size, recent

    @property
    def full_batch(self) -> int:
        """As many as the first batch has."""
        return self._batch_size

    def is_full(self, batch: Batch) -> bool:
        """Whether it has as many examples as the first, whose steps the timing table is of."""
        return len(batch) == self._batch_size

    def importance_batches(self, index: int, count: int = 1) -> list[Batch]:
        """The latest batches, that of the current step included."""
        return [*self._recent]
