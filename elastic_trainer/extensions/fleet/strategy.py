"""A fleet's average as one of Flower's strategies, for other apps, and Flower's strategies in a fleet's rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from types import SimpleNamespace
from typing import Any

import click
import flwr.serverapp.strategy as flowers
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.config import parse_config_args
from flwr.serverapp import Grid
from flwr.serverapp.exception import AppExitException
from flwr.serverapp.strategy import FedAvg
from flwr.supercore import log

from elastic_trainer.errors import UserError, first_line
from elastic_trainer.extensions.fleet.average import OwnAverage, aggregate
from elastic_trainer.extensions.fleet.messages import MAX_REPORTED, Parcel, Update, images_of, update_of

EXAMPLES, STEPS = "num-examples", "steps"
KNOWN = {"server-round"}  # of what a strategy asks of boards, what they need not know


class ElasticStrategy(FedAvg):
    """FedAvg for nodes that train parts of a network: each tensor moves by the mean change of those that trained it.

    A reply's arrays are the new weights of the tensors that its node has trained: all, or some. Its metrics have the
    number of examples, and may have "steps", by which changes are normalised (`average.aggregate`). A reply that cannot
    be (`messages.update_of`) is left out, and named in the log.

    Args:
        normalised: whether changes are averaged by local step.
        options: those of `FedAvg`.
    """

    def __init__(self, normalised: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.normalised = normalised
        self._weights: dict[str, np.ndarray] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._weights = {name: array.numpy() for name, array in arrays.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        updates, used = [], []
        for reply in valid:
            try:
                updates.append(self._update(reply.content))
                used.append(reply.content)
            except (ValueError, TypeError, KeyError, StopIteration) as error:
                node = reply.metadata.src_node_id
                log(WARNING, "aggregate_train: the reply of node %s is left out: %s", node, first_line(error))
        if not updates:
            return None, None
        after, metrics = aggregate(self._weights, updates, self.normalised), None
        try:
            metrics = self.train_metrics_aggr_fn(used, self.weighted_by_key)
        except (ValueError, TypeError, KeyError) as error:  # such as a number from one node, and a list from another
            log(WARNING, "aggregate_train: the nodes' metrics do not fit together: %s", first_line(error))
        return _record(after), metrics

    def _update(self, content: RecordDict) -> Update:
        """What a reply says, with changes in the place of weights. Raises `ValueError` or the like if it cannot be."""
        [arrays], [metrics] = content.array_records.values(), content.metric_records.values()
        changes = {}
        for name, array in arrays.items():
            after, before = array.numpy(), self._weights.get(name)
            with np.errstate(all="ignore"):  # `update_of` looks for what is not finite, not of this shape, or unknown
                changes[name] = after if before is None or after.shape != before.shape else after - before
        values = {"images": metrics[self.weighted_by_key], STEPS: metrics.get(STEPS, 1)}
        parcel = Parcel("trained", values, changes)
        return update_of(parcel, images_of(parcel), MAX_REPORTED, self._weights)


def strategy_of(name: str, words: str) -> OwnAverage | StrategyRounds:
    """The fleet's own average, or the strategy of `flwr.serverapp.strategy` that has this name.

    Args:
        name: of the class.
        words: its arguments as Flower writes a configuration, such as "eta=0.01 tau=0.001".

    Raises:
        UserError: there is none, or it has not these arguments.
    """
    found = {one: getattr(flowers, one) for one in flowers.__all__}
    kinds = {one: kind for one, kind in found.items() if issubclass(kind, FedAvg) and "Xgb" not in one}
    if name != ElasticStrategy.__name__ and name not in kinds:
        raise UserError(f"--strategy {name}: must be one of {', '.join(sorted([*kinds, ElasticStrategy.__name__]))}")
    one_node = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 1)
    try:
        options: dict[str, Any] = parse_config_args([words] if words else None)
        if name == ElasticStrategy.__name__:
            return OwnAverage(**options)
        return StrategyRounds(kinds[name](**{**one_node, **options}))
    except (TypeError, ValueError, click.ClickException) as error:
        raise UserError(f"--strategy_args {words}: does not suit {name} ({first_line(error)})") from error


class StrategyRounds:
    """What a strategy decides of the rounds of a `FleetServer`: which boards train, and the weights afterwards.

    Deadlines, boards that come back and the check of their replies are the server's.
    """

    def __init__(self, strategy: FedAvg) -> None:
        self._strategy, self._asked = strategy, dict[int, Message]()

    def choose(self, number: int, weights: Mapping[str, np.ndarray], nodes: Sequence[int]) -> set[int]:
        """The nodes that train in this round. Raises `UserError` if the strategy asks for what boards do not know."""
        config = ConfigRecord()
        grid: Any = SimpleNamespace(get_node_ids=lambda: nodes)
        messages = self._strategy.configure_train(number, _record(weights), config, grid)
        self._asked = {message.metadata.dst_node_id: message for message in messages}
        if unknown := sorted({*config} - KNOWN):
            name = type(self._strategy).__name__
            raise UserError(f"--strategy {name}: needs boards that know '{unknown[0]}', and these do not")
        return {*self._asked}

    def average(
        self, number: int, weights: Mapping[str, np.ndarray], updates: Mapping[int, Update]
    ) -> dict[str, np.ndarray] | None:
        """The weights after a round, in which the nodes made these `updates`; None: the strategy has none."""
        replies = [Message(_reply(weights, update), reply_to=self._asked[node]) for node, update in updates.items()]
        try:
            after, _ = self._strategy.aggregate_train(number, replies)
        except (AppExitException, KeyError, ValueError) as error:
            raise UserError(f"--strategy {type(self._strategy).__name__}: {first_line(error)}") from error
        if after is None:
            return None
        return {name: array.numpy().astype(weights[name].dtype) for name, array in after.items()}


def _record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _reply(weights: Mapping[str, np.ndarray], update: Update) -> RecordDict:
    """A board's update as the reply that strategies expect: the new weights of all tensors."""
    after = {name: weights[name] + update.changes.get(name, 0) for name in weights}
    metrics: dict[str, Any] = {EXAMPLES: update.images, STEPS: update.steps}
    loss = update.reported.get("loss")
    if loss is not None:
        metrics["train_loss"] = loss
    return RecordDict({"arrays": _record(after), "metrics": MetricRecord(metrics)})
