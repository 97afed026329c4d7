"""Training examples as shuffled batches, in an order that can be made again at any time.

The order of an epoch, and which view of each example it shows (`augmentation`), depend only on the seed and the number
of the epoch. So a run can be repeated, and resumed in the middle of an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.system.errors import UserError

Structure = Any  # of arrays or tensors [examples, …]
Structures = tuple[Structure, Structure, Structure]  # inputs, targets and weights
Examples = tuple[Any, ...]  # (inputs, targets) or (inputs, targets, weights)
MAX_ROWS, MAX_VALUES = 64, 16 * 224 * 224 * 3  # of a block; values are those of its inputs
_IMPORTANCE_STREAM = 1_000_003  # seeds from here on are for importance batches, smaller ones for epochs
UNKNOWN_STEPS = 1_000_000_000  # stands for the length of an epoch of `fit` until the first one has ended


def mapped(function: Callable[[Any], Any], structure: Structure) -> Structure:
    """`tf.nest.map_structure`; what is None stays None."""
    import tensorflow as tf

    return tf.nest.map_structure(lambda part: None if part is None else function(part), structure)


def specs_of(structure: Structure) -> Structure:
    """The `tf.TensorSpec`s of batches of any size, of arrays or tensors [n, …]."""
    import tensorflow as tf

    return mapped(lambda part: tf.TensorSpec((None, *part.shape[1:]), part.dtype), structure)


def block_rows(inputs: Structure) -> int:
    """How many examples like `inputs`, [n, …], a forward pass takes at once: larger blocks cost less per row."""
    import tensorflow as tf

    values = sum(int(np.prod(part.shape[1:])) for part in tf.nest.flatten(inputs))
    return min(max(MAX_VALUES // values, 1), MAX_ROWS)


class Order(NamedTuple):
    """Examples in an order: which they are and the view of each, both int64 [n]."""

    rows: np.ndarray
    views: np.ndarray

    def part(self, chosen: slice) -> Order:
        return Order(self.rows[chosen], self.views[chosen])


NOTHING = Order(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(eq=False)
class Batch:
    """Examples of one split, each in one view; `make` makes the inputs when they are asked for.

    Targets and weights are structures of tensors [batch, …]; weights may be None. `upcoming` are the examples of the
    batches that follow, if that is known.
    """

    make: Callable[[], Structure]
    targets: Structure
    weights: Structure = None
    order: Order = NOTHING
    upcoming: Order = NOTHING

    @cached_property
    def inputs(self) -> Structure:
        """Structure of tensors [batch, …]."""
        return self.make()

    @property
    def is_loaded(self) -> bool:
        """Whether the inputs were asked for."""
        return "inputs" in vars(self)

    def parts(self, rows: int) -> Iterator[Batch]:
        """The batch in parts of `rows` examples; the last may have fewer."""
        return (self._part(slice(start, start + rows)) for start in range(0, len(self), rows))

    def _part(self, chosen: slice) -> Batch:
        targets, weights = (mapped(lambda part: part[chosen], each) for each in (self.targets, self.weights))
        return Batch(lambda: mapped(lambda part: part[chosen], self.inputs), targets, weights, self.order.part(chosen))

    def __len__(self) -> int:
        import tensorflow as tf

        parts = [part for part in tf.nest.flatten(self.targets) if part is not None]
        return int((parts or tf.nest.flatten(self.inputs))[0].shape[0])


class ShuffledData:
    """Training and test examples in memory: inputs, targets and weights (or None) of each part.

    There are none to train on where a model is only tested. Raises `UserError` if there are some, but fewer than a
    batch needs.
    """

    view_count: int | None = 1  # views of each training example; None if every epoch has a new one
    tested_later = 0  # how many other examples test the best model once, after training
    reading_seconds = 0.0  # of one of those
    export_seconds = 0.0  # to keep for an export before a deadline

    def __init__(self, name: str, train: Structures, test: Structures, batch_size: int, seed: int = 0) -> None:
        self._train, self._test = train, test
        self.train_count, self.test_count = (_count(part) for part in (train, test))
        if 0 < self.train_count < batch_size:
            raise UserError(
                f"--batch_size {batch_size}: {name} has only {self.train_count} training examples; choose at most that"
            )
        self.name, self.batch_size, self.seed = name, batch_size, seed
        self.full_batch = batch_size  # examples in most training batches, which a timing table is measured on
        self.steps_per_epoch = self.train_count // batch_size  # an incomplete last batch is dropped
        self.max_rows = MAX_ROWS

    def training_inputs(self, order: Order) -> Structure:
        """The inputs of training examples, tensors [n, …]."""
        return _rows(self._train[0], order.rows)

    def training_targets(self, rows: np.ndarray) -> tuple[Structure, Structure]:
        """Targets and weights (or None) of the training examples `rows`, int [n]."""
        return _rows(self._train[1], rows), _rows(self._train[2], rows)

    def test_inputs(self, rows: np.ndarray) -> Structure:
        """The inputs of the test examples `rows`, int [n], tensors [n, …]."""
        return _rows(self._test[0], rows)

    def test_batch(self, rows: np.ndarray) -> Batch:
        """Test examples `rows`, int [n], as they are."""
        return Batch(lambda: self.test_inputs(rows), _rows(self._test[1], rows), _rows(self._test[2], rows))

    @property
    def room_mb(self) -> float:
        """MB that features of the examples may take in memory."""
        from elastic_trainer.datasets.images import room_mb

        return room_mb()

    @property
    def guessing_loss(self) -> float | None:
        """The loss of a model that ignores its inputs; None if that is not known."""
        return None

    def views(self, epoch: int) -> np.ndarray:
        """The view, int64 [examples], that each training example shows in an epoch."""
        return np.zeros(self.train_count, np.int64)

    def train(self, epoch: int, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
        """The batches of epoch `epoch`, shuffled by seed and epoch: at most `count`, without the first `skip`.

        All are of full batch size. The next batch's inputs are made in the background once a batch's were asked for.
        """
        end = self.steps_per_epoch if count is None else min(skip + count, self.steps_per_epoch)
        rows = np.random.default_rng([self.seed, epoch]).permutation(self.train_count)
        rows = rows[skip * self.batch_size : end * self.batch_size]
        order = Order(rows, self.views(epoch)[rows])
        return _made_ahead(self._training_batch(order, start) for start in range(0, len(rows), self.batch_size))

    def _training_batch(self, order: Order, start: int) -> Batch:
        end = start + self.batch_size
        chosen = order.part(slice(start, end))
        targets, weights = self.training_targets(chosen.rows)
        return Batch(lambda: self.training_inputs(chosen), targets, weights, chosen, order.part(slice(end, None)))

    def importance_batches(self, index: int, count: int = 1) -> list[Batch]:
        """At most `count` augmented training batches for the `index`-th evaluation of importance.

        Their order is independent of the epochs'.
        """
        return [*self.train(_IMPORTANCE_STREAM + index, 0, count)]

    def test(self) -> Iterator[Batch]:
        """All test examples as they are, in a fixed order and in batches of `block_rows`; the last may be smaller."""
        rows = np.arange(self.test_count)
        count = min(block_rows(self.test_batch(rows[:1]).inputs), self.max_rows) if self.test_count else 1
        return _made_ahead(self.test_batch(rows[start : start + count]) for start in range(0, len(rows), count))

    def distinct_views(self, steps: int, before: int = 0) -> float:
        """How many different views of different examples `steps` steps are expected to show, after `before` others.

        An epoch shows every example once, in a view drawn at random.
        """
        epochs = steps * self.batch_size / self.train_count
        if self.view_count is not None and epochs > 1:
            epochs = self.views_seen(before // max(self.steps_per_epoch, 1), epochs)
        return self.train_count * epochs

    def views_seen(self, first: int, epochs: float) -> float:
        """How many views of an example are expected to be shown in so many epochs, at least one, from `first` on."""
        return 1.0

    def kept_views(self, view_mb: float, room_mb: float) -> int:
        """How many views of each example have their features kept, if one view of all examples takes `view_mb`.

        The first two always have. Further ones take at most half of `room_mb`; the rest is for features of tests.
        """
        return min(self.view_count or 1, max(int(room_mb / 2 // (view_mb or 1.0)), 2))


class ArrayData(ShuffledData):
    """Examples as arrays [examples, …].

    Args:
        train, test: each (inputs, targets) or (inputs, targets, weights of the examples in the loss). Inputs, targets
            and weights are arrays, or lists, tuples or dicts of arrays.
        batch_size: examples a step.
        seed: of the training order.

    Raises:
        ValueError: a split is no such tuple, is empty, has arrays of different lengths, or alone has weights.
        UserError: there are fewer training examples than a batch needs.
    """

    def __init__(self, train: Examples, test: Examples, batch_size: int, seed: int = 0) -> None:
        own, others = _checked(train), _checked(test)
        if (own[2] is None) != (others[2] is None):
            raise ValueError("train and test: give weights of the examples for both, or for none")
        super().__init__("the data", own, others, batch_size, seed)

    @property
    def specs(self) -> tuple[Structure, Structure, Structure]:
        """Specs of inputs, targets and weights, as a `Task` takes them; the first axis is the batch."""
        return specs_of(self._train)


class FitData(ShuffledData):
    """What a scheme asks of the data of `fit`, which alone knows the examples; `recent` are the latest batches."""

    view_count = None

    def __init__(self, steps_per_epoch: int, full_batch: int, recent: deque[Batch]) -> None:
        self.name, self.train_count, self.test_count, self.steps_per_epoch = "fit", 0, 0, steps_per_epoch
        self.batch_size = None  # type: ignore[assignment]  # the last batch of an epoch may be smaller
        self.full_batch, self._recent = full_batch, recent  # as many as the first batch has

    def importance_batches(self, index: int, count: int = 1) -> list[Batch]:
        """The latest batches, that of the current step included."""
        return [*self._recent]


def _rows(structure: Structure, rows: np.ndarray) -> Structure:
    """These rows of arrays, as tensors."""
    import tensorflow as tf

    return mapped(lambda array: tf.constant(array[rows]), structure)


def _count(examples: Structures) -> int:
    import tensorflow as tf

    return next(len(array) for array in tf.nest.flatten(examples) if array is not None)


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


def _made_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same; while the inputs of batches are asked for, each is made in the background during the one before."""
    with ThreadPoolExecutor(1) as reader:
        is_wanted = False
        for batch, following in pairwise(chain(batches, [None])):
            assert batch is not None
            if following is not None and is_wanted:
                following.make = reader.submit(following.make).result
            yield batch
            is_wanted = batch.is_loaded
