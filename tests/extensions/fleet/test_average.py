"""The fleet's average: each tensor over the boards that trained it, without updates that do not fit."""

import numpy as np
import pytest

from elastic_trainer.extensions.fleet.average import aggregate, mean_result
from elastic_trainer.extensions.fleet.messages import Result, Update

RNG = np.random.default_rng(0)
WEIGHTS = {"kernel": RNG.normal(size=(3, 4)).astype("float32"), "bias": RNG.normal(size=4).astype("float32")}


def update(images, steps, *names):
    return Update({name: RNG.normal(size=WEIGHTS[name].shape) for name in names}, images, steps)


@pytest.mark.parametrize("normalised", [False, True])
def test_boards_that_train_everything_alike_give_the_weighted_mean_of_their_weights(normalised):
    updates = [update(100, 7, *WEIGHTS), update(300, 7, *WEIGHTS)]
    after = aggregate(WEIGHTS, updates, normalised)
    for name, weight in WEIGHTS.items():
        each = [weight + one.changes[name] for one in updates]
        np.testing.assert_allclose(after[name], np.average(each, axis=0, weights=[100, 300]), rtol=1e-5)
        assert after[name].dtype == weight.dtype


def test_a_tensor_counts_those_who_trained_it_and_one_that_nobody_trained_stays():
    fast, slow = update(100, 9, "kernel"), update(300, 2)
    after = aggregate(WEIGHTS, [fast, slow])
    np.testing.assert_allclose(after["kernel"], WEIGHTS["kernel"] + fast.changes["kernel"], rtol=1e-5)
    assert (after["bias"] == WEIGHTS["bias"]).all()


def test_normalised_changes_do_not_favour_the_board_with_more_steps():
    fast, slow = Update({"bias": np.full(4, 0.3)}, 100, 30), Update({"bias": np.full(4, -0.1)}, 100, 10)
    np.testing.assert_allclose(aggregate({"bias": np.zeros(4)}, [fast, slow])["bias"], 0.1)
    np.testing.assert_allclose(aggregate({"bias": np.zeros(4)}, [fast, slow], True)["bias"], 0, atol=1e-12)


def test_the_change_of_a_single_step_is_not_multiplied_without_bound():
    fast, slow = Update({"bias": np.zeros(4)}, 100, 99), Update({"bias": np.full(4, 0.01)}, 100, 1)
    np.testing.assert_allclose(aggregate({"bias": np.zeros(4)}, [fast, slow], True)["bias"], 0.5 * 2 * 0.01)


def test_a_test_counts_by_its_photos():
    assert mean_result([Result(1.0, 0.5, 30), Result(2.0, 0.9, 10), Result(9.0, 0.0, 0)]) == {
        "loss": 1.25,
        "accuracy": 0.6,
    }
    assert mean_result([]) is None and mean_result([Result(9.0, 0.0, 0)]) is None


def test_it_is_flowers_average_where_all_boards_train_everything():
    pytest.importorskip("flwr", reason="Flower is not installed here; scripts/run_fleet.sh installs it")
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    updates = [update(100, 7, *WEIGHTS), update(300, 4, *WEIGHTS)]
    records = [
        RecordDict(
            {
                "arrays": ArrayRecord({name: Array(WEIGHTS[name] + one.changes[name]) for name in WEIGHTS}),
                "metrics": MetricRecord({"images": one.images}),
            }
        )
        for one in updates
    ]
    theirs = aggregate_arrayrecords(records, "images")
    for name, weight in aggregate(WEIGHTS, updates).items():
        np.testing.assert_allclose(weight, theirs[name].numpy(), rtol=1e-5, atol=1e-6)
