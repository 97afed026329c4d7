"""The average, round 0, and replies that cannot be, with boards in this process."""

import logging

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed here; ./scripts/run_fleet.sh --tests runs this")

from elastic_fleet.strategy import ElasticAverage, average, from_record, to_record
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from elastic_trainer import FeatureSums

RNG = np.random.default_rng(0)
SHAPES = {"a": (3, 4), "b": (4,), "c": (2,)}
BEFORE = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def moved(names):
    return {name: BEFORE[name] + RNG.normal(size=SHAPES[name]).astype(np.float32) for name in names}


class Boards:
    """A grid whose boards answer by `answer(node, kind, content)`; None is no answer."""

    def __init__(self, count, answer):
        self._nodes, self._answer = range(1, count + 1), answer

    def get_node_ids(self):
        return self._nodes

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            content = self._answer(node, message.metadata.message_type, message.content)
            replies += [] if content is None else [Message(content, reply_to=message)]
        return replies


def trained(arrays, images=10):
    return RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": images})})


def garbled(content):
    """A reply whose array is no array."""
    array = Array("float32", (3, 4), "numpy.ndarray", content)
    return RecordDict({"arrays": ArrayRecord({"a": array}), "metrics": MetricRecord({"num-examples": 10})})


def measured(accuracy=0.5, loss=1.0, images=4):
    metrics = {"num-examples": images, "loss": loss, "accuracy": accuracy}
    return RecordDict({"metrics": MetricRecord(metrics)})


def run(answer, rounds=1, boards=3, with_head=lambda arrays, sums: arrays):
    """The strategy after a run whose boards answer so."""
    strategy = ElasticAverage(with_head)
    strategy.start(Boards(boards, answer), to_record(BEFORE), rounds, timeout=1)
    return strategy


def test_the_average_is_that_of_numpy_over_the_boards_that_trained_a_tensor():
    updates = [(moved("ab"), 30), (moved("b"), 10), (moved("abc"), 5)]
    found = average({**BEFORE, "d": np.ones(2, np.float32)}, updates)
    for name in "abc":
        here = [(arrays[name], images) for arrays, images in updates if name in arrays]
        expected = np.average([array for array, _ in here], axis=0, weights=[images for _, images in here])
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6)
        assert found[name].dtype == np.float32
    assert (found["d"] == 1).all(), "nobody trained it"


def test_a_round_that_made_the_model_worse_is_dropped():
    accuracies, starts = iter((0.5, 0.7, 0.6, 0.8)), []

    def answer(node, kind, content):
        if kind == "train":
            starts.append(from_record(content.array_records["arrays"])["a"])
            return trained({name: array + 1 for name, array in from_record(content.array_records["arrays"]).items()})
        return measured(next(accuracies)) if kind == "evaluate" else None

    strategy = run(answer, rounds=3, boards=1)
    assert (starts[2] == starts[1]).all(), "round 2 was dropped"
    np.testing.assert_allclose(strategy.best[0]["a"], BEFORE["a"] + 2, rtol=1e-6)
    assert [one["kept"] for one in strategy.rounds] == [True, True, False, True]


def test_models_are_compared_on_the_boards_that_tested_both():
    """Board 2, whose photos are harder, answers from round 1 on."""
    tests, now = iter(({1: 0.8}, {1: 0.9, 2: 0.2}, {1: 0.85, 2: 0.1})), dict[int, float]()

    def answer(node, kind, content):
        if kind == "evaluate" and node == 1:
            now.clear()
            now.update(next(tests))
        if kind == "evaluate":
            return measured(now[node]) if node in now else None
        return trained(moved("a")) if kind == "train" else None

    assert [one["kept"] for one in run(answer, rounds=2, boards=2).rounds] == [True, True, False]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (trained({"a": np.full((3, 4), np.nan, np.float32)}), "no finite numbers"),
        (trained({"a": np.zeros((4, 3), np.float32)}), "has the shape (4, 3)"),
        (trained({"z": np.zeros(3, np.float32)}), "sent 'z'"),
        (trained(moved("a"), images=0), "num-examples is 0"),
        (trained(moved("a"), images=float("nan")), "num-examples is nan"),
        (trained({"a": np.full((3, 4), 1e300)}), "no finite numbers"),
        (trained(moved("a"), images=1e12), "num-examples is"),
        (RecordDict({}), "KeyError"),
        (garbled(b""), "EOFError"),
        (garbled(b"PK\x03\x04junk"), "BadZipFile"),
        (Error(0, "no photos"), "no photos"),
        (None, "it has gone, or was too late"),
    ],
)
def test_a_bad_reply_is_left_out_with_one_line(bad, why, caplog):
    good = moved("ab")
    logging.getLogger("flwr").propagate = True

    def answer(node, kind, content):
        if kind == "train":
            return bad if node == 2 else trained(good)
        return measured() if kind == "evaluate" else None

    strategy = run(answer)
    found = [record.getMessage() for record in caplog.records if "round 1: board 2 is left out" in record.getMessage()]
    assert len(found) == 1 and why in found[0]
    np.testing.assert_allclose(strategy.candidate["a"], good["a"], rtol=1e-6)


def test_round_0_has_the_head_of_all_photos():
    """From the boards' sums it is the one from the photos in one place."""
    features, labels = RNG.normal(size=(90, 3)).astype(np.float32), np.arange(90) % 4
    features += labels[:, None]
    parts = [labels < 2, (labels == 2), (labels == 3)]  # each board lacks classes

    def answer(node, kind, content):
        if kind == "query":
            own = FeatureSums.of(features[parts[node - 1]], labels[parts[node - 1]], 4)
            return RecordDict({"arrays": to_record(dict(zip(own._fields, own, strict=True)))})
        return measured() if kind == "evaluate" else trained({})

    def with_head(arrays, sums):
        return {**arrays, "a": sums.head(0.1, 0.5).kernel, "b": sums.head(0.1, 0.5).bias}

    strategy = ElasticAverage(with_head)
    strategy.start(Boards(3, answer), to_record({name: BEFORE[name] for name in "ab"}), 1, timeout=1)
    expected = FeatureSums.of(features, labels, 4).head(0.1, 0.5)
    np.testing.assert_allclose(strategy.best[0]["a"], expected.kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(strategy.best[0]["b"], expected.bias, rtol=1e-4, atol=1e-4)
