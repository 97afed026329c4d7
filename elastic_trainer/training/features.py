"""Which features a run keeps at present: decided for each new step (`training.feature_cache` keeps them).

A step that trains the upper part of a network then starts from what is kept, and the forward pass below it costs
nothing; the paper computes it in every step. That is done where it is possible and measured to take less time.
"""

from __future__ import annotations

import time
from pathlib import Path

from tqdm import tqdm

from elastic_trainer.datasets.batches import Batch, Order, ShuffledData
from elastic_trainer.training.feature_cache import FeatureCache
from elastic_trainer.training.prefix import Cut, SplitStep
from elastic_trainer.training.step import TrainStep


class Features:
    """What a run keeps of its frozen prefix.

    Args:
        data: the training examples; without them none ever are.
        folder: of a file for features that exceed the memory which the examples leave (`ShuffledData.room_mb`).
        in_float16: round them to float16, for half the room.
        measures: keep them only where that is measured to save time; else wherever they are asked for.

    Attributes:
        cache: of the present step; None while none are kept.
        megabytes: the most that features took so far.
    """

    def __init__(
        self,
        data: ShuffledData | None = None,
        folder: Path = Path(),
        in_float16: bool = False,
        measures: bool = True,
    ) -> None:
        self._data, self._folder, self._in_float16, self._measures = data, folder, in_float16, measures
        self._reported: set[str] = set()
        self.cache: FeatureCache | None = None
        self._keys: frozenset[int] | None = None
        self.megabytes = 0.0

    def adopt(self, step: TrainStep, upcoming: Order, steps: int, keep: bool = True) -> None:
        """Decide whether `step` starts from features.

        Args:
            step: trains from now on.
            upcoming: the examples of the next steps.
            steps: for which new features are of use; 0: none are made.
            keep: use the features that are kept at present, if `step` can.
        """
        if self._data is None:
            return
        keys = self._keys if keep else None
        cut = Cut(step, keys)
        if keep and self.cache is not None and cut.tensors:
            self.cache.split = SplitStep(step, cut)
            return
        self.drop()  # before new features take memory
        if keys is not None and not cut.tensors:
            cut = Cut(step)
        if cut.random is not None:
            self._report(f"the network draws random numbers before its last frozen layer, in {cut.random}")
        elif cut.tensors and self._data.view_count is None:
            self._report("--augment flip_rotate shows new views in every epoch; --cached_views K draws from K of each")
        elif cut.tensors and steps:
            try:
                cache = FeatureCache(SplitStep(step, cut), self._data, self._folder, self._in_float16)
                if self._measures:
                    cache.check_saving(upcoming, steps)
                self.cache, self._keys = cache, cut.keys
                self.megabytes = max(cache.megabytes, self.megabytes)
            except (OSError, ValueError, FloatingPointError) as error:
                self._report(str(error))

    @property
    def are_possible(self) -> bool:
        """Whether a step may get some: they were not found to be impossible, or of no use."""
        return self._data is not None and self._data.view_count is not None and not self._reported

    def prepare(self, batch: Batch, upcoming: Order) -> float:
        """Compute the features of `batch` if they are missing, and some of the `upcoming` examples.

        Returns:
            Seconds that it took. If features can no longer be kept, which is reported, `cache` is None afterwards.
        """
        if self.cache is None:
            return 0.0
        start = time.perf_counter()
        try:
            self.cache.prepare(batch, upcoming)
        except (OSError, FloatingPointError) as error:
            self._report(str(error))
            self.drop()
        return time.perf_counter() - start

    def drop(self) -> None:
        """Keep none from now on."""
        self.cache = self._keys = None

    def cut_like(self, step: TrainStep) -> None:
        """Cut the next step where `step` may be cut, if possible: a resumed run repeats the steps bit for bit."""
        self._keys = Cut(step).keys

    def _report(self, why: str) -> None:
        """Say once why no features are kept."""
        if why not in self._reported:
            self._reported.add(why)
            tqdm.write(f"feature cache disabled: {why}")
