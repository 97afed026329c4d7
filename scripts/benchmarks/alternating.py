"""Steps of full training that alternate with a run's own steps, so whatever disturbs the machine disturbs both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_trainer.machine import is_undisturbed, stolen_seconds
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.timing.wall_time import measure_ms

if TYPE_CHECKING:
    from elastic_trainer.datasets.batches import Batch


class AlternatingDigits:
    """Digits, cut to a few steps an epoch; before each batch a step of full training of another network is timed.

    It stands in for `ImageData` in a run.

    Args:
        network: gives input size, batch size and seed.
        steps: in an epoch.
        full: the step of full training.

    Attributes:
        full_ms: time of the step of full training before each batch.
        undisturbed: whether other virtual machines took no time from that step and from the run's step after it.
    """

    def __init__(self, network: NetworkSettings, steps: int, full: Callable[[Any, Any], object]) -> None:
        import data
        from elastic_trainer.datasets.image_data import ImageData

        digits = data.load("digits", network.input_size, network.batch_size, network.seed)
        train, test = (
            split._replace(images=split.images[:count], labels=split.labels[:count])
            for split, count in ((digits._train, steps * network.batch_size), (digits._test, network.batch_size))
        )
        self._data = ImageData("digits", digits.class_names, train, test, network.batch_size, network.seed)
        self._full = full
        self.full_ms: list[float] = []
        self.undisturbed: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train(self, epoch: int, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
        """Batches as of `ImageData.train`, each after a timed step of full training."""
        for batch in self._data.train(epoch, skip, count):
            start, stolen = time.perf_counter(), stolen_seconds()
            self.full_ms.append(float(measure_ms([partial(self._full, batch.inputs, batch.targets)], 1)[0, 0]))
            yield batch
            self.undisturbed.append(is_undisturbed(time.perf_counter() - start, stolen_seconds() - stolen))
