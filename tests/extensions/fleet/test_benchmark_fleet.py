"""The benchmark of a fleet: how photos are split, and when a rule counts as there."""

import numpy as np
from benchmark_fleet import RULES, by_class, by_person, summed_up
from digits_on_boards import owners


def test_each_photo_is_on_one_board_and_classes_of_a_board_on_no_other():
    labels, persons = np.tile(np.arange(10), 12), np.arange(12).repeat(10)
    owned, own = by_class(labels, 0, 4)
    people = by_person(persons, 0, 4)
    for boards in (people, owned):
        assert sorted(np.concatenate(boards)) == [*range(120)]
    assert sum(len({*persons[rows]}) for rows in people) == 12
    alone = {*np.concatenate(own)}
    assert len(alone) == 6
    for rows, classes in zip(owned, own, strict=True):
        assert {*labels[rows]} & alone == {*classes}


def test_times_count_until_a_share_of_central_trainings_last_accuracy():
    def run(rule, accuracy, seed=0):
        about = {"round_seconds": 10.0, "coverage": 1.0, "megabytes_a_round": 1.0, "slow_classes_percent": None}
        return {"rule": rule, "seed": seed, "accuracy": accuracy, **about}

    found = summed_up([run("central", [0.5, 0.7, 0.8]), run("ours", [0.5, 0.73, 0.77]), run("drops", [0.5, 0.6, 0.7])])
    assert [*found] == [name for name in RULES if name in ("central", "ours", "drops")]
    assert found["ours"]["to_95%"] == {"seeds": "1 of 1", "round": 2.0, "seconds": 20.0}
    assert found["drops"]["to_95%"]["seconds"] is None
    assert summed_up([run("ours", [0.5, 0.6])])["ours"]["to_95%"]["seeds"] == "0 of 1"


def test_the_slowest_board_of_the_digits_has_rare_ones_alone_and_each_lacks_some():
    labels = np.repeat(np.arange(10), 90)
    places = owners(labels, 3)
    here = [{*labels[places == board].tolist()} for board in range(3)]
    assert here == [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 6, 7}, {0, 1, 2, 3, 8, 9}]
    counts = np.bincount(labels[places >= 0])
    assert (counts[:8] == 90).all() and (counts[8:] == 30).all()
