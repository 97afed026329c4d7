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
SUMS, MOST = ("counts", "means", "within"), 1e7  # images of a board
log = getLogger("flwr").log
Arrays = Mapping[str, np.ndarray]
T = TypeVar("T")


class ElasticAverage(Strategy):
    """Each tensor becomes the mean of those boards that trained it, weighted by their images.

    Before the first round, the head is fitted in closed form to sums of features that the boards send. A round that
    did not make the model better, by the accuracy and then the loss on the test images of the boards that tested both,
    is dropped. A reply that is late, or cannot be, is left out with one line in the log.

    Args:
        with_head: of the arrays and sums of features, the arrays with a new head: kernel and bias, the last two.

    Attributes:
        best: arrays of the best model so far; by board, its number of test images, loss and accuracy.
        rounds: a row each, with the means over the boards.
    """

    def __init__(self, with_head: Callable[[dict[str, np.ndarray], FeatureSums], Arrays]) -> None:
        self._with_head = with_head
        self._asked, self._timeout = set[int](), 3600.0
        self.candidate: Arrays = {}  # of the present round
        self.best: tuple[Arrays, dict[int, list[float]]] = {}, {}
        self.rounds: list[dict[str, Any]] = []

    def summary(self) -> None:
        log(INFO, "ElasticAverage: each tensor is the mean of the boards that trained it")

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, **more: Any
    ) -> Result:
        """Fit the head (round 0), then train as `Strategy.start` does."""
        self.candidate, self._timeout = from_record(initial_arrays), timeout
        replies = self._ask(grid, RecordDict({ARRAYS: initial_arrays}), "query")
        sums = self._parsed(replies, "round 0", lambda reply: _sums(reply, self.candidate))
        with np.errstate(all="ignore"):
            found = self._with_head({**self.candidate}, FeatureSums.together([*sums.values()])) if sums else {}
        if found and all(np.isfinite(array).all() for array in found.values()):
            self.candidate = found
        else:
            log(WARNING, "round 0: the boards' sums give no head")
        replies = self._ask(grid, RecordDict({ARRAYS: to_record(self.candidate)}), "evaluate")
        self.aggregate_evaluate(0, replies)
        return super().start(grid, to_record(self.candidate), num_rounds, timeout, **more)

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
        updates = self._parsed(replies, f"round {server_round}", lambda reply: _update(reply, before)).values()
        self.candidate = average(before, updates)
        return to_record(self.candidate), MetricRecord({"boards": len(updates)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All boards test the new model on images that they keep for that."""
        return self._messages(grid, RecordDict({ARRAYS: arrays}), "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        found, (_, best) = self._parsed(replies, f"round {server_round}, test", _tested), self.best
        if not found:
            return None
        both = [node for node in found if node in best]
        is_better = not both or _mean(found, both) > _mean(best, both)
        if is_better:
            self.best = self.candidate, found
        else:
            log(INFO, "round %s did not make the model better and is dropped", server_round)
        accuracy, negative = _mean(found, found)
        images = int(sum(images for images, *_ in found.values()))
        tested = {IMAGES: images, "loss": -negative, "accuracy": accuracy}
        self.rounds.append({"round": server_round, "boards": len(found), **tested, "kept": is_better})
        return MetricRecord(tested)

    def _messages(self, grid: Grid, content: RecordDict, kind: str) -> list[Message]:
        self._asked = {*grid.get_node_ids()}
        return [Message(content, node, kind, ttl=self._timeout) for node in self._asked]

    def _ask(self, grid: Grid, content: RecordDict, kind: str) -> Iterable[Message]:
        return grid.send_and_receive(self._messages(grid, content, kind), timeout=self._timeout)

    def _parsed(self, replies: Iterable[Message], what: str, parse: Callable[[RecordDict], T]) -> dict[int, T]:
        """What the replies say, by board, and a line for each board that has sent none, or one that cannot be."""
        found: dict[int, T] = {}
        reasons: dict[int, str | None] = dict.fromkeys(self._asked, "it has gone, or was too late")
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in reasons:  # the server's own, for a board that has gone
                continue
            if reply.has_error():
                reasons[node] = reply.error.reason or f"error {reply.error.code}"
                continue
            try:
                found[node], reasons[node] = parse(reply.content), None
            except Exception as error:  # a board may send anything
                reasons[node] = f"{type(error).__name__}: {error}"
        for node, why in reasons.items():
            if why is not None:
                line = "".join(letter if letter.isprintable() else " " for letter in why)[:200]
                log(WARNING, "%s: board %s is left out: %s", what, node, line)
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


def _mean(tested: Mapping[int, list[float]], nodes: Iterable[int]) -> tuple[float, float]:
    """Accuracy, and loss with a minus, over the test images of these boards."""
    images, loss, accuracy = np.array([tested[node] for node in nodes]).T
    return float(np.average(accuracy, weights=images)), -float(np.average(loss, weights=images))


def _number(metrics: Mapping[str, Any], name: str, lowest: float, highest: float) -> float:
    value = metrics[name]
    if not isinstance(value, int | float) or not lowest <= value <= highest:
        raise ValueError(f"its {name} is {value}")
    return float(value)


def _checked(record: ArrayRecord, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """The arrays of a reply in float32. Raises `ValueError` for a name, a shape or a value that cannot be."""
    found = {}
    for name, sent in record.items():
        if name not in shapes:
            raise ValueError(f"it sent '{name[:60]}', which the network does not have")
        if tuple(sent.shape) != shapes[name]:
            raise ValueError(f"{name} has the shape {sent.shape} instead of {shapes[name]}")
        with np.errstate(over="ignore"):
            found[name] = sent.numpy().astype(np.float32)
        if found[name].shape != shapes[name] or not np.isfinite(found[name]).all():
            raise ValueError(f"{name} has values that are no finite numbers")
    return found


def _update(content: RecordDict, before: Arrays) -> tuple[Arrays, float]:
    shapes = {name: array.shape for name, array in before.items()}
    return _checked(content.array_records[ARRAYS], shapes), _number(content.metric_records[METRICS], IMAGES, 1, MOST)


def _tested(content: RecordDict) -> list[float]:
    metrics = content.metric_records[METRICS]
    return [_number(metrics, IMAGES, 1, MOST), _number(metrics, "loss", 0, 1e6), _number(metrics, "accuracy", 0, 1)]


def _sums(content: RecordDict, before: Arrays) -> FeatureSums:
    features, classes = [*before.values()][-2].shape  # the kernel of the head
    shapes = dict(zip(SUMS, ((classes,), (classes, features), (features, features)), strict=True))
    arrays = _checked(content.array_records[ARRAYS], shapes)
    counts, means, within = (arrays[name] for name in SUMS)
    if (counts < 0).any() or not 1 <= counts.sum() <= MOST:
        raise ValueError("its numbers of images cannot be")
    return FeatureSums(counts.astype(np.int64), means.astype(np.float64), within)
