"""The fleet's average: each tensor over the boards that trained it; and its windows, which reach every layer."""

import numpy as np
import pytest
from conftest import make_small_model, make_table
from fleet_average import Reply, aggregate
from fleet_pilot import OWN_CLASSES, select_window, split_photos

from elastic_trainer.errors import UserError
from elastic_trainer.networks.tensors import head_mask, tensor_names

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
    fast, slow = Reply({"bias": np.full(4, 30.0)}, 100, 30), Reply({"bias": np.full(4, -10.0)}, 100, 10)
    assert (aggregate({"bias": np.zeros(4)}, [fast, slow])["bias"] == 10).all()
    assert (aggregate({"bias": np.zeros(4)}, [fast, slow], normalised=True)["bias"] == 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        Reply({"other": np.zeros(4)}, 1, 1),
        Reply({"bias": np.zeros(1)}, 1, 1),
        Reply({"bias": np.full(4, np.nan)}, 1, 1),
        Reply({}, 0, 1),
    ],
)
def test_a_reply_that_does_not_fit_is_refused_by_its_place(bad):
    with pytest.raises(UserError, match=r"^reply 1: .*; drop it$"):
        aggregate(WEIGHTS, [reply(1, 1, *WEIGHTS), bad])


def test_each_photo_is_on_one_board_and_classes_of_a_board_on_no_other():
    labels, persons = np.tile(np.arange(10), 12), np.arange(12).repeat(10)
    by_person, by_class = (split_photos(labels, persons, split, 0) for split in ("even", "uneven"))
    for boards in (by_person, by_class):
        assert sorted(np.concatenate(boards)) == [*range(120)]
    assert len({len({*persons[rows]} & {*persons[other]}) for rows in by_person for other in by_person}) == 2
    for rows, own in zip(by_class, OWN_CLASSES, strict=True):
        assert {*labels[rows]} == {0, 1, 2, 3, *own}


def test_windows_reach_every_layer_and_start_again():
    model = make_small_model()
    table, head = make_table(model), head_mask(model)
    start = table.depth(head)
    importance, trained, starts = np.ones(len(head)), head.copy(), []
    while start not in starts:
        starts.append(start)
        mask, start = select_window(table, importance, head, 0.35, start)
        assert mask[head].all()
        trained |= mask
    layers = np.array([name.rpartition("/")[0] for name in tensor_names(model)])
    assert start == table.depth(head) and len(starts) > 2 and {*layers[trained]} == {*layers}
