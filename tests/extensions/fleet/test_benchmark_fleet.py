"""The benchmark of a fleet: how photos are split, windows that reach every layer, and when a rule counts as there."""

import numpy as np
from benchmark_fleet import RULES, WindowBoard, WindowScheme, by_class, by_person, select_window, summed_up
from conftest import make_small_model, make_table
from fleets import data, make_server, make_setup

from elastic_trainer.extensions.fleet.simulated import simulation
from elastic_trainer.networks.tensors import head_mask, tensor_names


def test_each_photo_is_on_one_board_and_classes_of_a_board_on_no_other():
    labels, persons = np.tile(np.arange(10), 12), np.arange(12).repeat(10)
    owned, own = by_class(labels, 0)
    people = by_person(persons, 0)
    for boards in (people, owned):
        assert sorted(np.concatenate(boards)) == [*range(120)]
    assert sum(len({*persons[rows]}) for rows in people) == 12
    alone = {*np.concatenate(own)}
    assert len(alone) == 6
    for rows, classes in zip(owned, own, strict=True):
        assert {*labels[rows]} & alone == {*classes}


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


def test_a_slow_board_of_fedel_moves_its_window_and_a_fast_one_trains_everything(tmp_path):
    WindowScheme.of_boards.clear()
    setup, photos = make_setup(data(count=48)), data(count=48)
    parts = np.array_split(np.arange(photos.train_count), 2)
    pass_seconds = len(parts[0]) // photos.batch_size * setup.table.full_step_ms / 1e3
    link, clock = simulation(setup, parts, [1.0, 2.0], lambda line: None, WindowBoard, message_seconds=0.0)
    server = make_server(tmp_path, link, [], photos, grace=100.0, round_seconds=1.05 * pass_seconds, clock=clock)
    server.run()
    chosen = {
        board: [places for _, name, places in server.records.selections if name == board]
        for board in ("board-1", "board-2")
    }
    count = len(setup.model.trainable_variables)
    assert all(len(places) == count for places in chosen["board-1"])
    first, second = (setup.table.depth(np.isin(np.arange(count), places)) for places in chosen["board-2"])
    assert first < second, "tries before the first round move no window"


def test_times_count_until_a_share_of_central_trainings_last_accuracy():
    def run(rule, accuracy, seed=0):
        about = {"round_seconds": 10.0, "coverage": 1.0, "bytes_a_round": 1e6, "slow_classes_accuracy": None}
        return {"rule": rule, "seed": seed, "accuracy": accuracy, **about}

    found = summed_up([run("central", [0.5, 0.7, 0.8]), run("ours", [0.5, 0.73, 0.77]), run("drops", [0.5, 0.6, 0.7])])
    assert [*found] == [name for name in RULES if name in ("central", "ours", "drops")]
    assert found["ours"]["to_90%"] == {"seeds": "1 of 1", "round": 1.0, "seconds": 10.0}
    assert found["ours"]["to_95%"]["seconds"] == 20.0 and found["drops"]["to_90%"]["seconds"] is None
