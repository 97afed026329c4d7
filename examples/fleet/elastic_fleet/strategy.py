"""A strategy for boards that train different tensors of one network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from logging import INFO, WARNING, getLogger
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from elastic_trainer import FeatureSums

ARRAYS, CONFIG, METRICS, IMAGES = "arrays", "config", "metrics", "num-examples"
SUMS = "counts", "means", "within"
log = getLogger("flwr").log
Arrays = Mapping[str, np.ndarray]
T = TypeVar("T")


class ElasticAverage(Strategy):
    """Each tensor becomes the mean of those boards that trained it, weighted by their images.

    Before the first round, the head is fitted in closed form to sums of features that the boards send. A round that
    made the model worse, by the accuracy and then the loss on the boards' test images, is dropped. A reply that is
    late, or cannot be, is left out with one line in the log.

    Args:
        with_head: of the arrays and sums of features, the arrays with a new head.

    Attributes:
        best: arrays of the best model so far, and its number of images, loss and accuracy.
    """

    def __init__(self, with_head: Callable[[dict[str, np.ndarray], FeatureSums], Arrays]) -> None:
        self._with_head = with_head
        self._asked = set[int]()
        self.candidate: Arrays = {}  # of the present round
        self.best: tuple[Arrays, Mapping[str, Any]] = {}, {}
        self.rounds: list[dict[str, Any]] = []

    def summary(self) -> None:
        log(INFO, "ElasticAverage: each tensor is the mean of the boards that trained it")

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, timeout: float = 3600, **named: Any) -> Result:
        """Fit the head (round 0), then train as `Strategy.start` does."""
        before = from_record(initial_arrays)
        content = RecordDict({ARRAYS: initial_arrays})
        replies = self._ask(grid, content, "query", timeout)
        sums = self._parsed(replies, "round 0", lambda reply: _sums(reply, before))
        self.candidate = self._with_head({**before}, FeatureSums.together(sums)) if sums else before
        replies = self._ask(grid, RecordDict({ARRAYS: to_record(self.candidate)}), "evaluate", timeout)
        self.aggregate_evaluate(0, replies)
        return super().start(grid, to_record(self.candidate), *args, timeout=timeout, **named)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All boards train from the best model."""
        config["server-round"] = server_round
        content = RecordDict({ARRAYS: to_record(self.best[0] or self.candidate), CONFIG: config})
        return self._messages(grid, content, "train")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        before = self.best[0] or self.candidate
        updates = self._parsed(replies, f"round {server_round}", lambda reply: _update(reply, before))
        self.candidate = average(before, updates)
        return to_record(self.candidate), MetricRecord({"boards": len(updates)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All boards test the new model on images that they keep for that."""
        return self._messages(grid, RecordDict({ARRAYS: arrays}), "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        found = self._parsed(replies, f"round {server_round}, test", _tested)
        if not found:
            return None
        images, *measures = np.array(found).T
        loss, accuracy = (float(np.average(values, weights=images)) for values in measures)
        tested = {IMAGES: int(images.sum()), "loss": loss, "accuracy": accuracy}
        is_better = not self.best[1] or (accuracy, -loss) > (self.best[1]["accuracy"], -self.best[1]["loss"])
        if is_better:
            self.best = self.candidate, tested
        else:
            log(INFO, "round %s made the model worse and is dropped", server_round)
        self.rounds.append({"round": server_round, "boards": len(found), **tested, "kept": is_better})
        return MetricRecord(tested)

    def _messages(self, grid: Grid, content: RecordDict, kind: str) -> list[Message]:
        self._asked = {*grid.get_node_ids()}
        return [Message(content, node, kind) for node in self._asked]

    def _ask(self, grid: Grid, content: RecordDict, kind: str, timeout: float) -> Iterable[Message]:
        return grid.send_and_receive(self._messages(grid, content, kind), timeout=timeout)

    def _parsed(self, replies: Iterable[Message], what: str, parse: Callable[[RecordDict], T]) -> list[T]:
        """What the replies say, and a line for each board that has sent none, or one that cannot be."""
        found: list[T] = []
        reasons: dict[int, str | None] = dict.fromkeys(self._asked, "it has gone, or was too late")
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in reasons:  # the server's own, for a board that has gone
                continue
            reasons[node] = reply.error.reason if reply.has_error() else None
            try:
                found += [] if reply.has_error() else [parse(reply.content)]
            except (KeyError, TypeError, ValueError) as error:
                reasons[node] = f"{type(error).__name__}: {error}"
        for node, why in reasons.items():
            if why is not None:
                log(WARNING, "%s: board %s is left out: %s", what, node, " ".join(str(why).split())[:200])
        return found


def average(before: Arrays, updates: Collection[tuple[Arrays, float]]) -> Arrays:
    """The arrays after a round: each is the mean of the `updates` that have it, by their numbers of images.

    Args:
        before: float32 by name; those that nobody trained stay.
        updates: of each board, the arrays that it trained, and its number of images, above 0.
    """
    after = {}
    for name, array in before.items():
        here = [(arrays[name], images) for arrays, images in updates if name in arrays]
        total = sum(images for _, images in here)
        mean = sum((images / total * new.astype(np.float64) for new, images in here), np.zeros(array.shape))
        after[name] = mean.astype(array.dtype) if here else array
    return after


def to_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def from_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def _number(metrics: Mapping[str, Any], name: str, lowest: float = 0.0) -> float:
    value = metrics[name]
    if not isinstance(value, int | float) or not lowest <= value < 1e12:
        raise ValueError(f"its {name} is {value}")
    return float(value)


def _checked(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Raises `ValueError` for a name, a shape or a value that cannot be."""
    for name, array in arrays.items():
        if name not in shapes:
            raise ValueError(f"it sent '{name[:60]}', which the network does not have")
        if array.shape != shapes[name]:
            raise ValueError(f"{name} has the shape {array.shape} instead of {shapes[name]}")
        if array.dtype.kind not in "fi" or not np.isfinite(array).all():
            raise ValueError(f"{name} has values that are no finite numbers")
    return arrays


def _update(content: RecordDict, before: Arrays) -> tuple[Arrays, float]:
    shapes = {name: array.shape for name, array in before.items()}
    arrays = _checked(from_record(content.array_records[ARRAYS]), shapes)
    return arrays, _number(content.metric_records[METRICS], IMAGES, 1)


def _tested(content: RecordDict) -> list[float]:
    metrics = content.metric_records[METRICS]
    return [_number(metrics, IMAGES, 1), _number(metrics, "loss"), _number(metrics, "accuracy")]


def _sums(content: RecordDict, before: Arrays) -> FeatureSums:
    features, classes = [*before.values()][-2].shape  # the kernel of the head
    shapes = dict(zip(SUMS, ((classes,), (classes, features), (features, features)), strict=True))
    arrays = _checked(from_record(content.array_records[ARRAYS]), shapes)
    counts, means, within = (arrays[name] for name in SUMS)
    if (counts < 0).any() or not 1 <= counts.sum() < 1e12:
        raise ValueError("its numbers of images cannot be")
    return FeatureSums(counts.astype(np.int64), means, within)
