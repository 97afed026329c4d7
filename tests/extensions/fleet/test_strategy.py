"""A fleet's average as a strategy of Flower, and Flower's strategies in a fleet's rounds."""

from types import SimpleNamespace

import numpy as np
import pytest
from fleets import data, local, make_board, make_server

pytest.importorskip(
    "flwr", reason="Flower is not installed here; ./scripts/run_fleet.sh --tests runs this in .venv-fleet"
)

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.messages import Update
from elastic_trainer.extensions.fleet.simulated import SimulatedClock
from elastic_trainer.extensions.fleet.strategy import ElasticStrategy, strategy_of

WEIGHTS = {"kernel": np.ones((3, 4), np.float32), "bias": np.zeros(4, np.float32)}
BOTH = {"kernel": np.full((3, 4), 0.5, np.float32), "bias": np.full(4, 0.3, np.float32)}
UPDATES = {
    1: Update(BOTH, 30, 4, {"loss": 0.5}),
    2: Update({"bias": np.full(4, -0.1, np.float32)}, 10, 2, {"loss": 0.7}),
    3: Update({name: 2 * change for name, change in BOTH.items()}, 20, 4, {"loss": 0.6}),
}


@pytest.fixture(autouse=True)
def _task():
    """The process is that of a task, which is whose messages it sends."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 2, 3


def after_a_round(name, words=""):
    rounds = strategy_of(name, words)
    assert rounds.choose(1, WEIGHTS, [*UPDATES]) == {*UPDATES}
    return rounds.average(1, WEIGHTS, UPDATES)


def test_strategies_of_flower_average_what_the_boards_changed():
    images = [update.images for update in UPDATES.values()]
    after = [{**WEIGHTS, **{n: WEIGHTS[n] + c for n, c in one.changes.items()}} for one in UPDATES.values()]
    found = after_a_round("FedAvg")
    for name in WEIGHTS:
        np.testing.assert_allclose(
            found[name], np.average([one[name] for one in after], axis=0, weights=images), rtol=1e-6
        )
    one_of_them = after_a_round("Krum", "num_malicious_nodes=0")
    assert any(all(np.allclose(one_of_them[name], one[name]) for name in WEIGHTS) for one in after)
    for name in ("FedAdam", "FedYogi", "FedAdagrad", "FedAvgM", "FedMedian", "FedTrimmedAvg", "MultiKrum"):
        assert after_a_round(name).keys() == WEIGHTS.keys(), name
    assert after_a_round("QFedAvg", "client_learning_rate=0.1").keys() == WEIGHTS.keys()
    step = after_a_round("FedAdam", "eta=0.001")["bias"]
    assert 0 < np.abs(step).max() <= 0.002


def test_a_strategy_that_does_not_suit_is_one_line():
    for name, words, why in (
        ("FedBest", "", "must be one of Bulyan, ElasticStrategy, FedAdagrad"),
        ("FedXgbBagging", "", "must be one of"),
        ("FedAdam", "speed=3", "does not suit FedAdam"),
    ):
        with pytest.raises(UserError, match=why):
            strategy_of(name, words)
    with pytest.raises(UserError, match="--strategy FedProx: needs boards that know 'proximal-mu'"):
        strategy_of("FedProx", "").choose(1, WEIGHTS, [1])
    assert after_a_round("Bulyan", "num_malicious_nodes=2") is None, "too few boards: the round is repeated"


def test_in_another_app_each_tensor_moves_by_those_that_sent_it_and_wrong_replies_are_left_out(caplog):
    strategy = ElasticStrategy(min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0.0)
    grid = SimpleNamespace(get_node_ids=lambda: [1, 2, 3, 4, 5])
    arrays = ArrayRecord({name: Array(weight) for name, weight in WEIGHTS.items()})
    messages = [*strategy.configure_train(1, arrays, ConfigRecord(), grid)]  # type: ignore[arg-type]

    def reply(message, arrays, **metrics):
        sent = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
        return Message(RecordDict({"a": sent, "m": MetricRecord(metrics)}), reply_to=message)

    good = {name: WEIGHTS[name] + change for name, change in BOTH.items()}
    counted = {"num-examples": 10, "steps": 3}
    replies = [
        reply(messages[0], good, **counted),
        reply(messages[1], {"bias": np.full(4, 0.1, np.float32)}, **counted),
        reply(messages[2], {"bias": np.full(4, np.nan)}, **counted),
        reply(messages[3], {"bias": np.ones(3)}, **counted),
        reply(messages[4], good, steps=3),
    ]
    after, metrics = strategy.aggregate_train(1, replies)
    assert after is not None and metrics is not None and metrics["steps"] == pytest.approx(3)
    np.testing.assert_allclose(after["kernel"].numpy(), good["kernel"], rtol=1e-6)
    np.testing.assert_allclose(after["bias"].numpy(), 0.2, rtol=1e-6)
    assert strategy.aggregate_train(1, replies[2:]) == (None, None)
    odd = [reply(messages[0], good, **counted, loss=1.0), reply(messages[1], good, **counted, loss=[1.0, 2.0])]
    after, metrics = strategy.aggregate_train(1, odd)
    assert after is not None and metrics is None


def test_a_server_runs_its_rounds_with_a_strategy_of_flower(tmp_path):
    """Its own for the rest: round 0, the deadline, the check of replies, records and the best model."""
    ends = []
    for name in ("FedAvg", "FedAdam"):
        boards = [make_board(place) for place in range(2)]
        for board in boards:
            board.clock = SimulatedClock()  # all tensors train, however busy the machine is
        folder = tmp_path / name
        server = make_server(folder, local(boards), [], data(7), rounds=1, strategy=name)
        server.run()
        assert [row["boards"] for row in server.records.rounds] == [2, 2]
        ends.append(server.weights)
    assert any((ends[0][name] != ends[1][name]).any() for name in ends[0])
