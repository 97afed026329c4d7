"""The pilot of a fleet: how photos are split, and windows, which reach every layer."""

import numpy as np
from conftest import make_small_model, make_table
from fleet_pilot import OWN_CLASSES, select_window, split_photos

from elastic_trainer.networks.tensors import head_mask, tensor_names


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
