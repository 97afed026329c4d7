"""The fleet's average: each tensor over the boards that trained it, without replies that do not fit."""

import numpy as np
import pytest

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.average import Reply, aggregate, why_unfit

RNG = np.random.default_rng(0)
WEIGHTS = {"kernel": RNG.normal(size=(3, 4)).astype("float32"), "bias": RNG.normal(size=4).astype("float32")}


def reply(images, steps, *names):
    return Reply({name: RNG.normal(size=WEIGHTS[name].shape) for name in names}, images, steps)


@pytest.mark.parametrize("normalised", [False, True])
def test_boards_that_train_everything_alike_give_the_weighted_mean_of_their_weights(normalised):
    replies = [reply(100, 7, *WEIGHTS), reply(300, 7, *WEIGHTS)]
    after = aggregate(WEIGHTS, replies, normalised)
    for name, weight in WEIGHTS.items():
        each = [weight + one.changes[name] for one in replies]
        np.testing.assert_allclose(after[name], np.average(each, axis=0, weights=[100, 300]), rtol=1e-5)
        assert after[name].dtype == weight.dtype


def test_a_tensor_counts_those_who_trained_it_and_one_that_nobody_trained_stays():
    fast, slow = reply(100, 9, "kernel"), reply(300, 2)
    after = aggregate(WEIGHTS, [fast, slow])
    np.testing.assert_allclose(after["kernel"], WEIGHTS["kernel"] + fast.changes["kernel"], rtol=1e-5)
    assert (after["bias"] == WEIGHTS["bias"]).all()


def test_normalised_changes_do_not_favour_the_board_with_more_steps():
    fast, slow = Reply({"bias": np.full(4, 0.3)}, 100, 30), Reply({"bias": np.full(4, -0.1)}, 100, 10)
    np.testing.assert_allclose(aggregate({"bias": np.zeros(4)}, [fast, slow])["bias"], 0.1)
    np.testing.assert_allclose(aggregate({"bias": np.zeros(4)}, [fast, slow], True)["bias"], 0, atol=1e-12)


def test_the_change_of_a_single_step_is_not_multiplied_without_bound():
    fast, slow = Reply({"bias": np.zeros(4)}, 100, 99), Reply({"bias": np.full(4, 0.01)}, 100, 1)
    np.testing.assert_allclose(aggregate({"bias": np.zeros(4)}, [fast, slow], True)["bias"], 0.5 * 4 * 0.01)


@pytest.mark.parametrize(
    "bad",
    [
        Reply({"other": np.zeros(4)}, 1, 1),
        Reply({"bias": np.zeros(1)}, 1, 1),
        Reply({"bias": np.full(4, np.nan)}, 1, 1),
        Reply({"kernel": 1e6 * WEIGHTS["kernel"]}, 1, 1),
        Reply({}, 0, 1),
        Reply({}, 1, 10**400),
    ],
)
def test_a_reply_that_does_not_fit_is_refused_by_its_place(bad):
    with pytest.raises(UserError, match=r"^reply 1: .*; drop it$"):
        aggregate(WEIGHTS, [reply(1, 1, *WEIGHTS), bad])


def test_a_bias_of_zeros_may_start_to_train():
    assert why_unfit({"bias": np.zeros(4)}, Reply({"bias": np.full(4, 0.5)}, 1, 1)) is None


def test_it_is_flowers_average_where_all_boards_train_everything():
    pytest.importorskip("flwr", reason="Flower is not installed here; scripts/run_fleet.sh installs it")
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    replies = [reply(100, 7, *WEIGHTS), reply(300, 4, *WEIGHTS)]
    records = [
        RecordDict(
            {
                "arrays": ArrayRecord({name: Array(WEIGHTS[name] + one.changes[name]) for name in WEIGHTS}),
                "metrics": MetricRecord({"images": one.images}),
            }
        )
        for one in replies
    ]
    theirs = aggregate_arrayrecords(records, "images")
    for name, weight in aggregate(WEIGHTS, replies).items():
        np.testing.assert_allclose(weight, theirs[name].numpy(), rtol=1e-5, atol=1e-6)
